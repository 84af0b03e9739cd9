"""The rows of a pack and the parts of them that a rank has: which tokens a part reads, and where its loss tokens are. Pure.

Words: a context's tokens count from its own first (`skip` left-out ones included); a sequence's positions count from the first
kept one. A part is what a rank has of one sequence at a stretch, cut so that it is read and written in bounded memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.batch.layouts import Segment
from schemas.payload import GRANULE_ROWS, ContextMeta, PayloadHeader, Span
from schemas.plan import Plan

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Spans:
    """n loss spans of a context, ascending and disjoint: int64 [n], [n], and [n + 1] loss tokens before each."""

    start: Array
    end: Array
    before: Array

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        start = np.fromiter((span.start for span in spans), np.int64, len(spans))
        end = np.fromiter((span.end for span in spans), np.int64, len(spans))
        return cls(start, end, np.concatenate([[0], np.cumsum(end - start)]))

    def count(self, token: int) -> int:
        """Loss tokens before that token."""
        i = int(np.searchsorted(self.start, token))
        return int(self.before[i]) - (max(0, int(self.end[i - 1]) - token) if i else 0)

    def extent(self, lo: int, hi: int) -> tuple[int, int] | None:
        """[first, last + 1) of the loss tokens in [lo, hi); None where there are none."""
        i = int(np.searchsorted(self.end, lo, side="right"))
        j = int(np.searchsorted(self.start, hi)) - 1
        if i > j:
            return None
        return max(int(self.start[i]), lo), min(int(self.end[j]), hi)

    def mask(self, lo: int, hi: int) -> Array:
        """Which of the tokens [lo, hi) carry loss, bool [hi - lo]."""
        # Long dialogues have hundreds of spans: edges and a running sum, not a slice a span.
        i, j = np.searchsorted(self.end, lo, side="right"), np.searchsorted(self.start, hi)
        edges = np.zeros(hi - lo + 1, np.int8)
        edges[np.maximum(self.start[i:j], lo) - lo] += 1
        edges[np.minimum(self.end[i:j], hi) - lo] -= 1
        return np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)


@dataclass(frozen=True, eq=False)
class Changes:
    """What penalties change in one row, n spans ascending and disjoint, of a context's tokens: int64, float64 and bool, each
    [n]. On [start, end) the advantage A becomes multiply * A + add, and is trained where `keep` is."""

    start: Array
    end: Array
    multiply: Array
    add: Array
    keep: Array


@dataclass(frozen=True)
class Row:
    """One context of a pack. `index` is its row in the plan, `number` its place in its sequence; `before`: loss tokens of the
    sequence that lie before it, by which sidecars and candidates are found. `scale` multiplies the advantages of the tokens
    that `changes` leaves alone; with a sidecar these are by token, and `advantage` counts not. A blank row keeps its place,
    and nothing of it is read. `spans` None: still in the payload."""

    index: int
    sequence: str
    number: int
    context: ContextMeta
    payload: PayloadHeader
    sidecar: PayloadHeader | None
    before: int
    skip: int
    advantage: float
    loss_weight: float
    scale: float
    blank: bool
    changes: Changes | None = field(default=None, compare=False)
    spans: Spans | None = field(default=None, compare=False)

    @property
    def length(self) -> int:
        """Tokens that are packed."""
        return self.context.tokens - self.skip

    def loss(self) -> Spans:
        """Raises ValueError where they were not read yet."""
        if self.spans is None:
            raise ValueError(
                f"{self.name()}: its loss spans are in the payload's segments: give them first (with_segments)"
            )
        return self.spans

    def name(self) -> str:
        return f"sequence {self.sequence}, context {self.context.label}"


class Part(NamedTuple):
    """Positions [start, end) of pack row `row`, all of them real, lie at the rank's rows [dst, dst + end - start)."""

    row: int
    start: int
    end: int
    dst: int

    def tokens(self, row: Row) -> tuple[int, int]:
        """The context's tokens at these positions."""
        return self.start + row.skip, self.end + row.skip

    def labels(self, row: Row) -> tuple[int, int]:
        """The tokens that these positions predict, one later: a halo. The context's last token predicts nothing."""
        return self.start + row.skip + 1, min(self.end + 1, row.length) + row.skip

    def at(self, row: Row, label: int) -> int:
        """The rank's row that predicts that token."""
        return self.dst + label - row.skip - 1 - self.start


def rows_of(plan: Plan, dp: int, microbatch: int, group: int, without: frozenset[str]) -> Iterator[Row]:
    """The rows of one pack, in plan order. Raises ValueError on a loss token that nothing predicts."""
    columns = plan.rows
    befores: dict[int, dict[int, int]] = {}
    for i, home in enumerate(zip(columns.dp, columns.microbatch, strict=True)):
        if home != (dp, microbatch) or (columns.group[i] if columns.group else 0) != group:
            continue
        place, number = columns.sequence[i], columns.context[i]
        sequence = plan.sequences[place]
        context = sequence.contexts[number]
        if place not in befores:
            befores[place] = _before(sequence.contexts)
        row = Row(
            index=i,
            sequence=sequence.sequence,
            number=number,
            context=context,
            payload=sequence.payload,
            sidecar=sequence.advantages,
            before=befores[place][number],
            skip=columns.skip[i] if columns.skip else 0,
            advantage=columns.advantage[i],
            loss_weight=columns.loss_weight[i],
            scale=columns.scale[i] if columns.scale else 1.0,
            blank=sequence.sequence in without,
            changes=_changes(plan, i),
            spans=None if context.spilled else Spans.of(context.loss_spans),
        )
        check_spans(row)
        yield row


def check_spans(row: Row) -> None:
    """The plan's denominators were counted from them: what differs would change the loss unseen. Raises ValueError."""
    spans = row.spans
    if spans is None or not len(spans.start):
        return
    edges = np.stack([spans.start, spans.end], 1).reshape(-1)
    if (
        edges[0] < 0
        or edges[-1] > row.context.tokens
        or (np.diff(edges) < np.arange(1, len(edges)) % 2).any()
    ):
        raise ValueError(f"{row.name()}: its loss spans are not ascending in its {row.context.tokens} tokens")
    if spans.before[-1] != row.context.loss_tokens():
        raise ValueError(
            f"{row.name()}: its spans are of {spans.before[-1]} loss tokens, the plan says {row.context.loss_tokens()}"
        )
    # After a cut the first kept token may carry loss: the plan counts it not, as nothing that is kept predicts it.
    if not row.skip and spans.start[0] == 0:
        raise ValueError(f"{row.name()}: its first token carries loss, but no token predicts it")


def parts_of(row: Row, segment: Segment, size: int) -> Iterator[Part]:
    """What is to be read of a rank's segment, ascending, at most about `size` rows each: no padding, and nothing of a blank row."""
    at, end = segment.start, 0 if row.blank else min(segment.end, row.length)
    # Cut where the payload's checksums are, so that no part of a column is fetched twice to be verified.
    shift = row.context.offset + row.skip
    step = max(1, size // GRANULE_ROWS) * GRANULE_ROWS
    while at < end:
        stop = min(end, (at + shift) // GRANULE_ROWS * GRANULE_ROWS + step - shift)
        yield Part(segment.row, at, stop, segment.dst + at - segment.start)
        at = stop


def _before(contexts: Sequence[ContextMeta]) -> dict[int, int]:
    """Of each context the loss tokens of those that lie before it in the payload."""
    order = sorted(range(len(contexts)), key=lambda c: contexts[c].offset)
    bounds = accumulate((contexts[c].loss_tokens() for c in order), initial=0)
    return {c: before for c, (before, _) in zip(order, pairwise(bounds), strict=True)}


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
