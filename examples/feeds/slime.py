"""slime: a rollout batch for its Megatron actor, and a batch as its `get_batch` makes one.

`rollout_data` has whole contexts (batch.cp 1) and goes where slime's actor has its own: into `DataIterator(rollout_data,
micro_batch_indices)`, one entry of micro_batch_indices a micro-batch; slime then pads, cuts and shifts by itself, on all of its
context-parallel ranks. Set `--use-rollout-logprobs`, and give no reward post-processing: advantages are there.

`get_batch` is for context parallelism done by the packers (layout "slime", or "slime_allgather" with `--allgather-cp`): its tokens,
full_loss_masks and packed_seq_params are those that slime's function makes of the same contexts. slime's own losses go by whole
contexts, so that a custom loss (`--loss-type custom_loss`) reads the other columns, row by row.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from examples.feeds.packs import Params, Window, packed_seq_params, response, rows


class RolloutData(TypedDict):
    """One entry for each context; a response is its tokens from the first that is trained on."""

    tokens: list[Tensor]
    """int64 [total length]"""
    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: list[Tensor]
    """int32 [response length]: entry j is of response token j; slime shifts"""
    rollout_log_probs: list[Tensor]
    """float32 [response length]"""
    advantages: list[Tensor]
    """float32 [response length]"""
    returns: list[Tensor]
    """the same: there is no critic"""
    rollout_mask_sums: Tensor
    """float32 [contexts]: what slime divides a context's summed loss by, before it divides by the step's rollouts"""


class Batch(TypedDict):
    """Tensors are [1, T], T rows of this context-parallel rank, row t describing the prediction of the token after tokens[t]."""

    tokens: Tensor
    """int64"""
    full_loss_masks: Tensor
    """int32"""
    packed_seq_params: Params
    labels: Tensor
    """int64"""
    rollout_log_probs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    """float32"""


def rollout_data(window: Window, rollouts: int) -> RolloutData:
    """`window`: MicroBatch.torch(); `rollouts`: slime's global batch size of the step, by which it divides. Its loss is then the
    plan's: a token counts with 1 / (rollout_mask_sums * rollouts) = its loss weight. Raises ValueError for a part of a pack."""
    found = rows(window)
    advantages = [response(window, "advantages", row) for row in found]
    weights = [window["loss_weights"][row.start : row.end].max() for row in found]
    return RolloutData(
        tokens=[window["tokens"][row.start : row.end] for row in found],
        total_lengths=[row.end - row.start for row in found],
        response_lengths=[row.end - row.start - row.prompt for row in found],
        loss_masks=[response(window, "loss_mask", row).int() for row in found],
        rollout_log_probs=[response(window, "logprobs", row) for row in found],
        advantages=advantages,
        returns=advantages,
        # A context without loss may have any.
        rollout_mask_sums=torch.tensor(
            [1 / (float(weight) * rollouts) if weight > 0 else 1.0 for weight in weights]
        ),
    )


def get_batch(window: Window, local_cp_size: int | None = None) -> Batch:
    """`window`: MicroBatch.torch()."""
    return Batch(
        tokens=window["tokens"].unsqueeze(0),
        full_loss_masks=window["loss_mask"].int().unsqueeze(0),
        packed_seq_params=packed_seq_params(window, local_cp_size),
        labels=window["labels"].unsqueeze(0),
        rollout_log_probs=window["logprobs"].unsqueeze(0),
        advantages=window["advantages"].unsqueeze(0),
        loss_weights=window["loss_weights"].unsqueeze(0),
    )
