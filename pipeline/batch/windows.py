"""Windows: which rows one micro-batch reads, and the packed arrays that a rank trains on. Pure; context-parallel size 1.

Promises:
- a window holds every context that the plan gives to its (dp, microbatch), in plan order, unpadded, and no other row;
- payloads are in token space (row t describes token t); a window is in label space: row t predicts token t + 1 of its
  own context. A label-space column of the context at payload rows [a, b) is token rows [a + 1, b): one row of halo, and
  the last row of every context, which predicts nothing, is 0. Nothing is rolled over the pack;
- the loss mask equals the spans that the plan was made from, so the weights of a batch sum to what the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.payload import ContextMeta, PayloadHeader, Span
from schemas.plan import Plan

Array = NDArray[Any]

READ: tuple[str, ...] = ("tokens", "loss_mask", "logprobs", "policy_version")
"""Payload columns that a window is made from."""

PACKED: dict[str, str] = {
    "tokens": "int64",
    "labels": "int64",
    "position_ids": "int64",
    "loss_mask": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "loss_weights": "float32",
    "policy_version": "int32",
}
"""Arrays of one value a token, [T], and their dtypes. All but `tokens` and `position_ids` are in label space."""


@dataclass(frozen=True)
class Row:
    """One context of a window. `index` is its row in the plan; [start, end) are its rows in the window."""

    index: int
    sequence: str
    context: ContextMeta
    advantage: float
    loss_weight: float
    start: int
    end: int


@dataclass(frozen=True)
class Read:
    """One payload, read once: `spans[i]` are the payload rows of `rows[i]`, an index into the window's rows."""

    sequence: int
    header: PayloadHeader
    spans: tuple[Span, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """One micro-batch of one data-parallel coordinate, as metadata."""

    step: int
    dp: int
    microbatch: int
    rows: tuple[Row, ...]
    reads: tuple[Read, ...]

    @property
    def tokens(self) -> int:
        return self.rows[-1].end if self.rows else 0


def plan_window(plan: Plan, dp: int, microbatch: int) -> Window:
    """The rows and reads of one micro-batch. Raises ValueError on coordinates outside the plan or cp > 1."""
    if plan.cp != 1:
        raise ValueError(
            f"plan {plan.run}/{plan.step} has cp {plan.cp}; windows are built for cp 1 only: set cp to 1"
        )
    if not (0 <= dp < plan.dp and 0 <= microbatch < plan.microbatches):
        raise ValueError(
            f"plan {plan.run}/{plan.step} has {plan.dp} data-parallel ranks of {plan.microbatches} micro-batches; "
            f"there is no micro-batch {microbatch} of rank {dp}"
        )
    columns = plan.rows
    rows: list[Row] = []
    homes: dict[int, list[int]] = {}
    at = 0
    for i, home in enumerate(zip(columns.dp, columns.microbatch, strict=True)):
        if home != (dp, microbatch):
            continue
        sequence = plan.sequences[columns.sequence[i]]
        context = sequence.contexts[columns.context[i]]
        homes.setdefault(columns.sequence[i], []).append(len(rows))
        weight = columns.loss_weight[i]
        rows.append(Row(i, sequence.sequence, context, columns.advantage[i], weight, at, at + context.tokens))
        at += context.tokens
    reads = tuple(
        Read(
            sequence=sequence,
            header=plan.sequences[sequence].payload,
            spans=tuple(
                Span(start=rows[r].context.offset, end=rows[r].context.offset + rows[r].context.tokens)
                for r in members
            ),
            rows=tuple(members),
        )
        for sequence, members in homes.items()
    )
    return Window(plan.step, dp, microbatch, tuple(rows), reads)


def shapes(window: Window) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array that `pack` will return: what the shared copy's size is planned from."""
    each = {name: (dtype, (window.tokens,)) for name, dtype in PACKED.items()}
    return {**each, "cu_seqlens": ("int32", (len(window.rows) + 1,)), "max_seqlen": ("int32", ())}


def split(window: Window, columns: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Columns per read (the read's spans one after the other) to columns per row of the window, as views."""
    found: list[dict[str, Array]] = [{} for _ in window.rows]
    for read, got in zip(window.reads, columns, strict=True):
        at = 0
        for row, span in zip(read.rows, read.spans, strict=True):
            end = at + span.end - span.start
            found[row] = {name: column[at:end] for name, column in got.items()}
            at = end
    return found


def pack(window: Window, columns: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The packed micro-batch of a window.

    `columns[i]` has the `READ` columns of `window.rows[i]`, in token space, each [context tokens]. Returns, for T tokens
    of B contexts: the arrays of `PACKED`, each [T]; `cu_seqlens` int32 [B + 1]; `max_seqlen` int32 []. `advantages` and
    `loss_weights` are the row's on loss tokens and 0 elsewhere; `policy_version` is the version that sampled the label.
    Raises ValueError that names the sequence when columns and plan disagree.
    """
    if len(columns) != len(window.rows):
        raise ValueError(f"window of {len(window.rows)} rows was given columns of {len(columns)}")
    packed = {name: np.zeros(window.tokens, dtype) for name, dtype in PACKED.items()}
    for row, got in zip(window.rows, columns, strict=True):
        _check(row, got)
        whole, predicting = slice(row.start, row.end), slice(row.start, row.end - 1)
        packed["tokens"][whole] = got["tokens"]
        packed["position_ids"][whole] = np.arange(row.end - row.start)
        for name, source in (
            ("labels", "tokens"),
            ("loss_mask", "loss_mask"),
            ("logprobs", "logprobs"),
            ("policy_version", "policy_version"),
        ):
            packed[name][predicting] = got[source][1:]
        mask = packed["loss_mask"][whole]
        packed["advantages"][whole] = mask * np.float32(row.advantage)
        packed["loss_weights"][whole] = mask * np.float32(row.loss_weight)
    lengths = [row.end - row.start for row in window.rows]
    packed["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
    packed["max_seqlen"] = np.array(max(lengths, default=0), np.int32)
    return packed


def _check(row: Row, got: Mapping[str, Array]) -> None:
    """The plan's denominators were counted from the context's spans: a mask that differs would change the loss unseen."""
    for name in READ:
        if got[name].shape != (row.context.tokens,):
            raise ValueError(
                f"sequence {row.sequence}, context {row.context.label}: column {name} has shape {got[name].shape}, "
                f"the plan says ({row.context.tokens},)"
            )
    spans = row.context.loss_spans
    # Long dialogues have hundreds of spans: edges and a running sum, not a slice a span.
    edges = np.zeros(row.context.tokens + 1, np.int8)
    edges[np.fromiter((s.start for s in spans), np.int64, len(spans))] += 1
    edges[np.fromiter((s.end for s in spans), np.int64, len(spans))] -= 1
    mask = np.cumsum(edges[:-1], dtype=np.int8).view(np.uint8)
    if not np.array_equal(mask, got["loss_mask"]):
        raise ValueError(
            f"sequence {row.sequence}, context {row.context.label}: the payload's loss mask has {int(got['loss_mask'].sum())} tokens "
            f"that are not the {int(mask.sum())} of its loss spans"
        )
    if mask[0]:
        raise ValueError(
            f"sequence {row.sequence}, context {row.context.label}: its first token carries loss, but no token predicts it"
        )
