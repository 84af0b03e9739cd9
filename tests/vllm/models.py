"""Makes the small models of these tests: `models.py FOLDER`, run by the Python that has vLLM, from the project's root.

Promises: nothing is fetched; a model's folder is whole or not there; one that is there costs nothing; the random ones
have the same weights wherever they are made.

`tiny`: a random Qwen3, 2.4 M parameters, float32. `tiny-next`: the same a training step later, as far as anyone can
tell. `moe`: a random Qwen3-MoE, 8 experts, 2 of them a token, in 2 layers. `smollm2`: SmolLM2-135M-Instruct.
"""

# pyright: reportMissingImports=false
# Run by the Python that has vLLM, whose packages the project's own has not.

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from pipeline.engines.tiny.smollm2 import smollm2_policy

# The vocabulary and the end of turn are SmolLM2's, whose tokenizer they share.
SHAPE = {
    "vocab_size": 49_152,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wide enough that the distributions are far from uniform.
    "initializer_range": 0.3,
}


def tiny() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, hidden_size=48, intermediate_size=128))


def moe() -> PreTrainedModel:
    # vLLM's kernel for experts on CPU takes widths that are multiples of 32.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **sizes, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1)
    )


def save(folder: Path, make: Callable[[], PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    make().float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def later(before: Path, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The weights of `before`, each a little off."""
    noise = torch.Generator().manual_seed(1)
    weights = load_file(before / "model.safetensors")
    moved = {name: old + 0.02 * torch.randn(old.shape, generator=noise) for name, old in weights.items()}
    folder.mkdir()
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((before / name).read_bytes())
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    smollm2 = smollm2_policy(folder / "smollm2")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(smollm2 / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    makers: dict[str, Callable[[Path], None]] = {
        "tiny": lambda part: save(part, tiny, tokenizer),
        "tiny-next": lambda part: later(folder / "tiny", part, tokenizer),
        "moe": lambda part: save(part, moe, tokenizer),
    }
    for name, make in makers.items():
        if not (folder / name).is_dir():
            part = folder / f"{name}.part"
            make(part)
            part.rename(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
