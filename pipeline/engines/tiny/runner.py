"""The model and its paged KV cache: computes one step for a batch whose rows may be at any position.

Promises: a row's logits depend on its own tokens alone, up to float rounding, as kernels differ by batch shape (rows
attend through their block tables; padding writes to a block that nobody owns); weights change only between steps, whole
or not at all; each step names the version it ran under.
One thread at a time may use a runner.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Rows
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.tiny.model import Llama, LlamaConfig, weights_from_bytes
from pipeline.engines.tiny.sampling import draw, processed_logprobs, restricted
from pipeline.engines.tiny.scheduler import Sampled, Sequence


class WeightsRefused(ValueError):
    """A weight blob that does not fit the model; the weights in use are unchanged."""


class _PagedView:
    """The cache as one batch sees it (``model.KVCache``): where to write this step's rows and which to gather."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, gather: Tensor, mask: Tensor) -> None:
        self._keys, self._values, self._slots, self._gather, self.mask = keys, values, slots, gather, mask

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        whole: list[Tensor] = []
        for cache, new in ((self._keys[layer], k), (self._values[layer], v)):
            cache.index_copy_(0, self._slots, new.transpose(1, 2).reshape(-1, *cache.shape[1:]))
            whole.append(cache[self._gather].transpose(1, 2))
        return whole[0], whole[1]


class ModelRunner:
    """Owns the weights, the cache [layers, blocks * block_size, kv_heads, head_dim] float32, and the random streams."""

    def __init__(self, config: LlamaConfig, state: dict[str, Tensor], blocks: int, block_size: int) -> None:
        self.config, self.block_size, self.version = config, block_size, 0
        self._model = Llama(config).eval().requires_grad_(False)
        self.load(state)
        shape = (config.num_hidden_layers, blocks * block_size, config.num_key_value_heads, config.head_dim)
        # Zeros, not empty: a masked position has weight 0, and 0 times a stray NaN would still be NaN.
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._random: WeakKeyDictionary[Sequence, np.random.Generator] = WeakKeyDictionary()

    @property
    def weight_bytes(self) -> int:
        """Size of the parameters in float32."""
        return sum(4 * p.numel() for p in self._model.parameters())

    def load_bytes(self, blob: bytes, version: int) -> None:
        """Take over a safetensors blob as ``version``. Raises WeightsRefused and changes nothing when it does not fit."""
        try:
            state = weights_from_bytes(blob)
        except Exception as error:
            # safetensors raises a class of its own, derived from Exception alone.
            raise WeightsRefused(f"weights of version {version} are not safetensors: {error}") from error
        self.load(state)
        self.version = version

    def load(self, state: dict[str, Tensor]) -> None:
        """Copy a state dict in, as float32. Raises WeightsRefused, before copying, for a misfit or a non-finite value."""
        own = dict(self._model.named_parameters())
        if own.keys() != state.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise WeightsRefused(f"weights do not fit the model: missing {missing[:3]}, unknown {extra[:3]}")
        for name, tensor in state.items():
            if tensor.shape != own[name].shape:
                raise WeightsRefused(
                    f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}"
                )
            if not torch.isfinite(tensor).all():
                raise WeightsRefused(f"{name} holds NaN or infinity")
        for name, parameter in own.items():
            parameter.copy_(state[name])

    @torch.inference_mode()
    def step(self, batch: Rows[Sequence]) -> tuple[int, list[Sampled]]:
        """Feed each row's tokens that are not in the cache and sample its next one: (weight version, samples).

        A batch is either all new (whole prompts, right-padded) or all running (one token each); the code has one path.
        """
        done = [0 if not s.output else s.cached for s in batch]
        fresh = [s.prompt if not s.output else (s.output[-1],) for s in batch]
        logits = self._forward(batch, done, fresh)
        params = [s.params for s in batch]
        logprobs = processed_logprobs(logits, params)
        uniform = torch.tensor([self._stream(s).random() for s in batch], dtype=torch.float64)
        tokens = draw(logprobs, uniform, torch.tensor([p.temperature == 0 for p in params]))
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        open_ids = torch.isfinite(logprobs).numpy()
        return self.version, [
            Sampled(int(token), float(logprob), np.flatnonzero(mask).tolist() if restricted(p) else [])
            for token, logprob, mask, p in zip(tokens.numpy(), chosen.numpy(), open_ids, params, strict=True)
        ]

    @torch.inference_mode()
    def score(
        self, token_ids: tuple[int, ...], k: int
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Of tokens 1 to T-1, given those before: log-probabilities [T-1], ids and log-probabilities [T-1, k] of the
        likeliest. Temperature 1; the cache is left alone. Its logits take 4 * T * vocabulary bytes."""
        tokens = torch.tensor([token_ids])
        logprobs = torch.log_softmax(self._model(tokens)[0, :-1], dim=-1)
        own = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        top = logprobs.topk(k, dim=-1)
        return (
            cast("list[float]", own.tolist()),  # pyright: ignore[reportUnknownMemberType]
            cast("list[list[int]]", top.indices.tolist()),  # pyright: ignore[reportUnknownMemberType]
            cast("list[list[float]]", top.values.tolist()),  # pyright: ignore[reportUnknownMemberType]
        )

    def _forward(self, batch: Rows[Sequence], done: list[int], fresh: list[tuple[int, ...]]) -> Tensor:
        width = max(map(len, fresh))
        length = torch.tensor([len(f) for f in fresh])
        column = torch.arange(width)
        tokens = torch.zeros((len(batch), width), dtype=torch.int64)
        for i, row in enumerate(fresh):
            tokens[i, : len(row)] = torch.tensor(row)
        positions = torch.tensor(done)[:, None] + column
        used = -(-max(d + len(f) for d, f in zip(done, fresh, strict=True)) // self.block_size)
        table = torch.zeros((len(batch), used), dtype=torch.int64)
        for i, sequence in enumerate(batch):
            owned = sequence.blocks[:used]
            table[i, : len(owned)] = torch.tensor(owned)
        gather = (table[:, :, None] * self.block_size + torch.arange(self.block_size)).flatten(1)
        real = column < length[:, None]
        slots = torch.where(real, gather.gather(1, positions.clamp(max=gather.shape[1] - 1)), 0).flatten()
        mask = torch.arange(gather.shape[1]) <= positions[:, None, :, None]
        view = _PagedView(self._keys, self._values, slots, gather, mask)
        return self._model(tokens, positions, cache=view, logits_at=length - 1)

    def _stream(self, sequence: Sequence) -> np.random.Generator:
        stream = self._random.get(sequence)
        if stream is None:
            seed = sequence.params.seed
            stream = np.random.default_rng(secrets.randbits(64) if seed is None else seed % 2**64)
            self._random[sequence] = stream
        return stream
