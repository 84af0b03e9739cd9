"""Windows: which rows one micro-batch reads, and the packed arrays that a rank trains on. Pure; context-parallel size 1.

Promises:
- a window holds every context that the plan gives to its (dp, microbatch), in plan order, unpadded, and no other row;
- payloads are in token space (row t describes token t); a window is in label space: row t predicts token t + 1 of its
  own context. A label-space column of the context at payload rows [a, b) is token rows [a + 1, b): one row of halo, and
  the last row of every context, which predicts nothing, is 0. Nothing is rolled over the pack;
- the loss mask equals the spans that the plan was made from, so the weights of a batch sum to what the plan says;
- of a sequence with a sidecar, a row reads the advantages of its own context's loss tokens and no others;
- what the plan changes is changed after that, on the tokens that it names: however contexts are cut into micro-batches,
  a token has the advantage and weight that the plan gives it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.payload import ContextMeta, PayloadHeader, Span
from schemas.plan import Plan

Array = NDArray[Any]

READ: tuple[str, ...] = ("tokens", "loss_mask", "logprobs", "policy_version")
"""Payload columns that a window is made from."""
READ_SIDECAR: tuple[str, ...] = ("advantages",)
"""Column of a sidecar, which has a row for each loss token of its sequence."""

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
class Changes:
    """What penalties change in one row, n spans ascending and disjoint, in token space from the context's row 0: int64,
    float64 and bool, each [n]. On [start, end) the advantage A becomes multiply * A + add, and is trained where `keep` is."""

    start: Array
    end: Array
    multiply: Array
    add: Array
    keep: Array


@dataclass(frozen=True)
class Row:
    """One context of a window. `index` is its row in the plan; [start, end) are its rows in the window. `scale` multiplies
    the advantages of the tokens that `changes` leaves alone; with a sidecar these are by token, and `advantage` counts not."""

    index: int
    sequence: str
    context: ContextMeta
    advantage: float
    loss_weight: float
    start: int
    end: int
    sidecar: bool = False
    scale: float = 1.0
    changes: Changes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Read:
    """`columns` of one object, read once: `spans[i]` are the object's rows for `rows[i]`, an index into the window's rows."""

    sequence: int
    header: PayloadHeader
    spans: tuple[Span, ...]
    rows: tuple[int, ...]
    columns: tuple[str, ...] = READ


@dataclass(frozen=True)
class Window:
    """One micro-batch of one data-parallel coordinate, as metadata. `reads`: its payloads, then their sidecars."""

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
        rows.append(
            Row(
                index=i,
                sequence=sequence.sequence,
                context=context,
                advantage=columns.advantage[i],
                loss_weight=columns.loss_weight[i],
                start=at,
                end=at + context.tokens,
                sidecar=sequence.advantages is not None,
                scale=columns.scale[i] if columns.scale else 1.0,
                changes=_changes(plan, i),
            )
        )
        at += context.tokens
    reads = [
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
    ]
    for sequence, members in homes.items():
        header = plan.sequences[sequence].advantages
        if header is not None:
            places = _sidecar_rows(plan.sequences[sequence].contexts)
            spans = tuple(places[columns.context[rows[r].index]] for r in members)
            reads.append(Read(sequence, header, spans, tuple(members), READ_SIDECAR))
    return Window(plan.step, dp, microbatch, tuple(rows), tuple(reads))


def _sidecar_rows(contexts: Sequence[ContextMeta]) -> dict[int, Span]:
    """Of each context its rows of the sidecar, which has the loss tokens in payload order."""
    order = sorted(range(len(contexts)), key=lambda c: contexts[c].offset)
    bounds = accumulate((contexts[c].loss_tokens() for c in order), initial=0)
    return {c: Span(start=a, end=b) for c, (a, b) in zip(order, pairwise(bounds), strict=True)}


def _changes(plan: Plan, row: int) -> Changes | None:
    """The plan's changes of one row; its columns are ascending by row."""
    every = plan.changes
    if every is None:
        return None
    mine = slice(bisect_left(every.row, row), bisect_right(every.row, row))
    if mine.start == mine.stop:
        return None
    return Changes(
        start=np.array(every.start[mine], np.int64),
        end=np.array(every.end[mine], np.int64),
        multiply=np.array(every.multiply[mine], np.float64),
        add=np.array(every.add[mine], np.float64),
        keep=np.array(every.keep[mine], np.bool_),
    )


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
            found[row] |= {name: column[at:end] for name, column in got.items()}
            at = end
    return found


def pack(window: Window, columns: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The packed micro-batch of a window.

    `columns[i]` has the `READ` columns of `window.rows[i]`, in token space, each [context tokens], and of a sequence with a
    sidecar `advantages`, [its loss tokens]. Returns, for T tokens of B contexts: the arrays of `PACKED`, each [T];
    `cu_seqlens` int32 [B + 1]; `max_seqlen` int32 []. `loss_mask`, `advantages` and `loss_weights` are of the trained tokens
    and 0 elsewhere; `policy_version` is the version that sampled the label. Raises ValueError that names the sequence when
    columns and plan disagree.
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
        if row.sidecar or row.changes is not None:
            at, advantages, kept = _by_token(row, got)
            packed["advantages"][row.start - 1 + at] = np.where(kept, advantages, 0)
            mask[at[~kept] - 1] = 0
        else:
            packed["advantages"][whole] = mask * np.float32(row.advantage * row.scale)
        packed["loss_weights"][whole] = mask * np.float32(row.loss_weight)
    lengths = [row.end - row.start for row in window.rows]
    packed["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
    packed["max_seqlen"] = np.array(max(lengths, default=0), np.int32)
    return packed


def _by_token(row: Row, got: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """The row's n loss tokens from the context's row 0, int64 [n], the advantage of each, float64 [n], and whether it is
    trained, bool [n]."""
    at = np.flatnonzero(got["loss_mask"])
    plain = got["advantages"].astype(np.float64) if row.sidecar else np.full(len(at), row.advantage)
    advantages, kept = plain * row.scale, np.ones(len(at), np.bool_)
    if (changes := row.changes) is not None:
        # The first span that ends after a token is the one that it may be in.
        span = np.searchsorted(changes.end, at, side="right")
        changed = np.append(changes.start, row.context.tokens)[span] <= at
        span = span[changed]
        advantages[changed] = changes.multiply[span] * plain[changed] + changes.add[span]
        kept[changed] = changes.keep[span]
    return at, advantages, kept


def _check(row: Row, got: Mapping[str, Array]) -> None:
    """The plan's denominators were counted from the context's spans: a mask that differs would change the loss unseen."""
    lengths = dict.fromkeys(READ, row.context.tokens)
    if row.sidecar:
        lengths |= dict.fromkeys(READ_SIDECAR, row.context.loss_tokens())
    for name, length in lengths.items():
        if got[name].shape != (length,):
            raise ValueError(
                f"sequence {row.sequence}, context {row.context.label}: column {name} has shape {got[name].shape}, "
                f"the plan says ({length},)"
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
