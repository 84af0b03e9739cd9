"""verl (0.9): the fields of a micro-batch of its model engines, in their form without padding, from windows at batch.cp 1.

    data = TensorDict(fields(micro_batch.torch()), batch_size=[contexts])
    tu.assign_non_tensor_data(data, "temperature", 1.0)                   # the engine's log-probabilities are of the sampled distribution
    engine.forward_backward_batch(data, loss_function=partial(ppo_loss, config=config))       # config.loss_agg_mode = "token-sum"

verl cuts contexts over its own context- or sequence-parallel ranks, so each of them is given the same whole pack: all take windows
of their data-parallel rank's packer. Whoever replaces that cut takes `megatron.get_batch` of a window of the layout "verl": its
tokens and packed_seq_params are those of verl's `preprocess_thd_engine`.

Each token's weight is in `rollout_is_weights`, by which verl multiplies a token's loss; with "token-sum" nothing else divides it.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from examples.feeds.packs import Window, of_tokens, response, rows


class Fields(TypedDict):
    """Nested tensors (layout jagged) of B contexts: the first three of a context's j tokens, the others of its `responses`, the
    tokens from the first that is trained on; tokens of the environment among them have response_mask 0."""

    input_ids: Tensor
    """int64 [B, j]"""
    position_ids: Tensor
    """int64 [B, j]"""
    loss_mask: Tensor
    """float32 [B, j]: row t is of token t; verl shifts"""
    prompts: Tensor
    """int64"""
    responses: Tensor
    """int64"""
    response_mask: Tensor
    """float32"""
    old_log_probs: Tensor
    """float32, the rollout engine's"""
    advantages: Tensor
    """float32"""
    rollout_is_weights: Tensor
    """float32, sums to 1 over the batch"""


def fields(window: Window) -> Fields:
    """`window`: MicroBatch.torch(). Raises ValueError for a part of a pack, or an empty one."""
    found = rows(window)
    if not found:
        raise ValueError("an empty micro-batch: the batch has fewer contexts than micro-batches; skip it")

    def nested(parts: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def responses(name: str) -> Tensor:
        return nested([response(window, name, row) for row in found])

    tokens = window["tokens"]
    return Fields(
        input_ids=nested([tokens[row.start : row.end] for row in found]),
        position_ids=nested([window["position_ids"][row.start : row.end] for row in found]),
        loss_mask=nested([of_tokens(window["loss_mask"][row.start : row.end]) for row in found]),
        prompts=nested([tokens[row.start : row.start + row.prompt] for row in found]),
        responses=nested([tokens[row.start + row.prompt : row.end] for row in found]),
        response_mask=responses("loss_mask"),
        old_log_probs=responses("logprobs"),
        advantages=responses("advantages"),
        rollout_is_weights=responses("loss_weights"),
    )
