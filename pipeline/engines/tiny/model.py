"""Llama in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings.

Promises: parameter names and the rotary convention are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``, halves
rotated), so any tied Llama checkpoint loads unchanged; logits are float32; with a KV cache the same weights give the same
logits as a full forward pass. Weights travel between processes as one safetensors blob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load as _load_blob
from safetensors.torch import save as _save_blob
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Hyperparameters under their Hugging Face ``config.json`` names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions pair its halves")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """Read a ``config.json`` object. Raises ValueError for another architecture, untied embeddings or scaled rope."""
        if raw.get("model_type") != "llama":
            raise ValueError(f"model_type is {raw.get('model_type')!r}: only 'llama' is supported")
        if not raw.get("tie_word_embeddings", False):
            raise ValueError("tie_word_embeddings is false: only tied embeddings are supported")
        if raw.get("rope_scaling"):
            raise ValueError(f"rope_scaling={raw['rope_scaling']!r} is not supported")
        known = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        known.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        known.setdefault("num_key_value_heads", raw["num_attention_heads"])
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """The ``config.json`` object that transformers and vLLM load too."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        } | asdict(self)


class KVCache(Protocol):
    """What attention needs of a cache. ``mask`` is bool, broadcastable to [B, heads, T, S]; True attends."""

    @property
    def mask(self) -> Tensor: ...

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's k, v [B, kv_heads, T, head_dim]; return all of them so far, [B, kv_heads, S, head_dim]."""
        ...


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, head_dim] of integer ``positions`` [B, T] (RoFormer, arXiv:2104.09864; halves convention)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = positions[:, None, :, None].to(torch.float32) * inverse
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = (
            layer,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        batch, length, _ = x.shape
        q = _rotate(self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = _rotate(
            self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin
        )
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
            mask = cache.mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class _Mlp(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = _Attention(c, layer)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = _Mlp(c)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(_Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Llama(nn.Module):
    """The policy network, for training (no cache) and for the engine (with one)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        logits_at: Tensor | None = None,
    ) -> Tensor:
        """Next-token logits, float32 [B, T, vocab]; row t predicts token t + 1.

        tokens: int64 [B, T], right-padded (causal attention keeps padding out of real rows).
        positions: int64 [B, T], default 0..T-1. Packed rows pass restarting positions and their own ``mask``.
        mask: bool, broadcastable to [B, heads, T, T], True attends; default causal. With a cache, the cache's is used.
        logits_at: int64 [B]: only this row of each sequence, giving [B, vocab] (a wide head over a long prompt is costly).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache)
        if logits_at is not None:
            x = x[torch.arange(x.shape[0]), logits_at]
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()


def weights_to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """One safetensors blob of a state dict (what ``policy.published`` refers to)."""
    return _save_blob({name: tensor.detach().contiguous() for name, tensor in state.items()})


def weights_from_bytes(blob: bytes) -> dict[str, Tensor]:
    """State dict of a blob. Raises ``safetensors.SafetensorError`` when the blob is not safetensors."""
    return _load_blob(blob)


def load_policy(path: str | Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Configuration and weights of a policy directory. Raises FileNotFoundError naming the missing file."""
    config, weights = Path(path) / "config.json", Path(path) / "model.safetensors"
    for needed in (config, weights):
        if not needed.is_file():
            raise FileNotFoundError(
                f"no {needed}: a policy directory has config.json, model.safetensors, tokenizer.json"
            )
    return LlamaConfig.from_json(json.loads(config.read_text())), weights_from_bytes(weights.read_bytes())


def save_policy(path: str | Path, config: LlamaConfig, state: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``; the tokenizer is its owner's to write."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(
        json.dumps(config.to_json() | {"torch_dtype": dtype}, indent=2) + "\n"
    )
    (directory / "model.safetensors").write_bytes(weights_to_bytes(state))


def load_model(path: str | Path) -> Llama:
    """A ``Llama`` with a policy directory's weights in float32, gradients on. Raises as ``load_policy``."""
    config, state = load_policy(path)
    model = Llama(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    return model
