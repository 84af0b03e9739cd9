"""A small CPU engine with vLLM's wire: Llama in plain torch, a paged KV cache, continuous batching."""
