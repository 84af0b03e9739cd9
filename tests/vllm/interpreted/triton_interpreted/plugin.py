"""What vLLM loads in each of its processes: the one kernel that Triton's interpreter cannot run is replaced."""

# pyright: reportMissingImports=false
# Runs in vLLM's environment, whose packages the project's has not.


def top_k_without_triton():
    """Let top-k and top-p be applied by vLLM's own PyTorch code, as where Triton is not installed."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
