"""What the adapters here share: the rows of a pack, columns in token space, and Megatron's description of packed sequences.

A window is in label space: row t describes the prediction of its context's token t + 1, and a context's last row predicts
nothing. Trainers that shift by themselves want columns in token space instead, row t describing token t; only a window that
has the whole pack (context-parallel size 1) can be told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Window = Mapping[str, Tensor]
"""`MicroBatch.torch()`: arrays of T local rows; cu_seqlens and cu_seqlens_padded of the whole pack."""


@dataclass
class Params:
    """The fields of `megatron.core.packed_seq_params.PackedSeqParams` that are set here, where Megatron is not installed."""

    qkv_format: str
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor
    cu_seqlens_kv_padded: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    local_cp_size: int | None = None


def packed_seq_params(window: Window, local_cp_size: int | None = None) -> Params:
    """Megatron's own class where it is installed. The padded bounds are given as the bounds too, as Megatron
    (`core/datasets/data_schedule.py`) and verl do: kernels then attend over padding, which no real token sees.

    `local_cp_size`: of a micro-batch whose context-parallel size is below the trainer's (`batch.adaptive_cp`); the trainer then
    sets `cp_group` to its own group of that size.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams as Made  # pyright: ignore[reportMissingImports]
    except ImportError:
        Made = Params
    padded, longest = window["cu_seqlens_padded"], int(window["max_seqlen"])
    # Versions of before adaptive sizes have no such field.
    adaptive = {} if local_cp_size is None else {"local_cp_size": local_cp_size}
    return Made(
        qkv_format="thd",
        cu_seqlens_q=padded,
        cu_seqlens_kv=padded,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **adaptive,
    )


class Row(NamedTuple):
    """A context of a whole pack: its tokens are at rows [start, end); the first `prompt` of them come before the first that is
    trained (all but the last where none is)."""

    start: int
    end: int
    prompt: int


def rows(window: Window) -> list[Row]:
    """The contexts of a pack, without a dummy. Raises ValueError for a window that has a part of its pack."""
    starts, ends = window["cu_seqlens_padded"].tolist(), window["cu_seqlens"].tolist()
    if len(window["tokens"]) != starts[-1]:
        raise ValueError(
            f"a window of {len(window['tokens'])} rows of a pack of {starts[-1]}: context parallelism has cut its contexts, and this "
            "form has them whole; set batch.cp to 1, or use the form for windows"
        )
    found: list[Row] = []
    for i, start in enumerate(starts[:-1]):
        length = ends[i + 1] - ends[i]
        if length:
            trained = window["loss_mask"][start : start + length].nonzero()
            # Row t predicts token t + 1.
            prompt = int(trained[0]) + 1 if len(trained) else max(1, length - 1)
            found.append(Row(start, start + length, prompt))
    return found


def of_tokens(column: Tensor) -> Tensor:
    """A context's label-space column in token space. Its first token, which none predicts, has 0."""
    return torch.cat([column.new_zeros(1), column[:-1]])


def response(window: Window, name: str, row: Row) -> Tensor:
    """A label-space column of the tokens after the row's prompt, in token space."""
    return window[name][row.start + row.prompt - 1 : row.end - 1]
