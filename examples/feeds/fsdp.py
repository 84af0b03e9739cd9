"""FSDP with a Hugging Face model: keyword arguments of its forward for packed sequences without an attention mask.

    inputs = forward_inputs(micro_batch.torch())
    loss = model(**inputs, use_cache=False).loss              # cross entropy over the trained tokens, or the policy loss of
    logits = model(**{k: v for k, v in inputs.items() if "labels" not in k}).logits      # your own, row by row on `labels` of the window

Attention must be one that reads cu_seq_lens (FlashAttention), or derives contexts from position_ids. With Ulysses sequence
parallelism (layouts "ulysses" and "contiguous") each rank gives its own rows; the bounds are of the whole pack, as attention after
the all-to-all sees it.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from examples.feeds.packs import Window, of_tokens, rows

IGNORED = -100
"""The label that transformers' losses pass over."""


class Inputs(TypedDict):
    """Of `model.forward`, with transformers' FlashAttentionKwargs. B contexts (and a dummy, where the layout adds one)."""

    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]"""
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    """int32 [B + 1], padding included"""
    max_length_q: int
    max_length_k: int
    shift_labels: Tensor
    """int64 [1, T]: the label of each row, IGNORED where no loss is; for losses that are not to shift"""
    labels: NotRequired[Tensor]
    """int64 [1, T]: row t is token t itself, IGNORED where it is not trained; transformers shifts it. Only of whole packs."""


def forward_inputs(window: Window) -> Inputs:
    """`window`: MicroBatch.torch()."""
    padded, longest = window["cu_seqlens_padded"], int(window["max_seqlen"])
    shifted = torch.where(window["loss_mask"] > 0, window["labels"], IGNORED)
    inputs = Inputs(
        input_ids=window["tokens"].unsqueeze(0),
        position_ids=window["position_ids"].unsqueeze(0),
        cu_seq_lens_q=padded,
        cu_seq_lens_k=padded,
        max_length_q=longest,
        max_length_k=longest,
        shift_labels=shifted.unsqueeze(0),
    )
    if len(window["tokens"]) == int(padded[-1]):
        labels = torch.full_like(window["tokens"], IGNORED)
        for row in rows(window):
            own = slice(row.start, row.end)
            trained = of_tokens(window["loss_mask"][own]) > 0
            labels[own] = torch.where(trained, window["tokens"][own], IGNORED)
        inputs["labels"] = labels.unsqueeze(0)
    return inputs
