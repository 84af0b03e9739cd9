"""Megatron-LM: what `get_batch` of a pretraining script returns, from a window of the layout "megatron".

In the forward step, in place of a data iterator's batch:

    assert micro_batch.meta["layout"] == "megatron"      # another one would be taken without a word, and attention be wrong
    batch = get_batch(micro_batch.torch(), micro_batch.meta["cp_size"] if adaptive_cp else None)
    logprobs = -model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"],
                      packed_seq_params=batch["packed_seq_params"])          # Megatron's per-token loss is -log p(label)

Labels are shifted already, as Megatron wants them: labels[t] is the token after tokens[t]. Pipeline stages in the middle have no
tokens, the others no labels: those are None, as Megatron's own.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from examples.feeds.packs import Params, Window, packed_seq_params


class Batch(TypedDict):
    """Tensors are [1, T], T rows of this context-parallel rank. The first five are Megatron's; the last four are what a policy
    loss needs beside them, row by row like `labels`."""

    tokens: Tensor | None
    """int64"""
    labels: Tensor | None
    """int64; 0 where nothing is predicted, and there loss_mask is 0"""
    loss_mask: Tensor | None
    """float32"""
    attention_mask: None
    """None: the kernels go by packed_seq_params"""
    position_ids: Tensor
    """int64, from 0 in each context"""
    packed_seq_params: Params
    logprobs: Tensor | None
    advantages: Tensor | None
    loss_weights: Tensor | None
    """float32; their sum over the batch is 1: ranks and micro-batches add their losses up, with no mean over anything"""
    routed_experts: Tensor | None
    """[1, T, layers of this stage, k], for routing replay; row t is of tokens[t]"""


def get_batch(window: Window, local_cp_size: int | None = None) -> Batch:
    """`window`: MicroBatch.torch(). See `packs.packed_seq_params` about local_cp_size."""

    def row(name: str) -> Tensor | None:
        return window[name].unsqueeze(0) if name in window else None

    return Batch(
        tokens=row("tokens"),
        labels=row("labels"),
        loss_mask=row("loss_mask"),
        attention_mask=None,
        position_ids=window["position_ids"].unsqueeze(0),
        packed_seq_params=packed_seq_params(window, local_cp_size),
        logprobs=row("logprobs"),
        advantages=row("advantages"),
        loss_weights=row("loss_weights"),
        routed_experts=row("routed_experts"),
    )
