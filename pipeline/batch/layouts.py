"""Layouts: how the sequences of a pack are padded, and which of its rows each context-parallel rank has. Pure.

Words: a pack has B sequences (contexts), one after the other, each padded; positions count through the padded pack. Some
layouts add one sequence more, the dummy, which is nothing but padding.

Promises, for every layout, with cp ranks:
- every position of the pack is on exactly one rank, and every rank has the same number of them;
- a rank's rows ascend with their position, so that its segments are dense: each begins where the one before it ends;
- a sequence is padded by less than one multiple; where the pack has a multiple of its own, its tail is less than that.

| layout | each sequence to a multiple of | the pack to a multiple of | tail goes to | cut |
|---|---|---|---|---|
| megatron, verl | 2·cp·tp (tp at cp 1) | | | zigzag of each sequence |
| the same, fp8 | lcm(16, that) | 128 times that | the last sequence | |
| slime | 2·cp (1 at cp 1) | cp·tp·128 | a dummy | zigzag of each sequence |
| contiguous | cp·tp | | | one interval of the pack a rank |
| ulysses | 1 | cp | a dummy | one interval of the pack a rank |
| slime_allgather | 1 | cp·tp·128 | a dummy | one interval of the pack a rank |
| zigzag_pack | 1 | 2·cp·tp (tp at cp 1) | a dummy | zigzag of the pack |

Zigzag of n rows: 2·cp chunks of c = n / (2·cp); rank r has chunks r and 2·cp - 1 - r (TransformerEngine,
`get_batch_on_this_cp_rank`). At cp 1 all of them, whatever n.

Where the projects differ: verl (`verl/models/mcore/util.py`, 0.9) and Megatron pad and cut alike; verl sets position ids of
padding to 0 where Megatron and TransformerEngine (`generate_positional_ids_for_cp`), and windows here, go on counting.
NeMo-RL (`_get_pack_sequence_parameters_for_megatron`) has the factor tp only with sequence parallelism, and pads packs further
for FP8 recipes and pipeline stages. verl's `cp_layout="contiguous"` is `contiguous`; its Ulysses (`ulysses_pad`) numbers the
tail from 0, which makes it a sequence of its own. slime (`megatron_utils/data.py`, `get_batch`) pads a rank's rows to tp·128,
and writes cp times the local lengths in cu_seqlens: a dummy of cp times the local tail; `--allgather-cp` is `slime_allgather`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.parallel import LayoutName

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Interval = tuple[int, int]
Cut = Callable[[Sequence[int], int, int], Iterator[Interval]]
"""Cumulative padded lengths, cp, rank -> intervals of pack positions, ascending and disjoint."""


class Segment(NamedTuple):
    """Padded positions [start, end) of sequence `row` lie at a rank's rows [dst, dst + end - start)."""

    row: int
    start: int
    end: int
    dst: int


@dataclass(frozen=True)
class Bounds:
    """Lengths of a pack's sequences, the dummy's included, where there is one: it is 0 long and all padding."""

    padded: tuple[int, ...]
    real: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Cumulative padded lengths, from 0."""
        return tuple(accumulate(self.padded, initial=0))

    @property
    def total(self) -> int:
        """Rows of the pack, over all of its ranks."""
        return self.ends[-1]

    @property
    def cu_padded(self) -> Int32:
        """int32 [sequences + 1], in pack positions."""
        return np.array(self.ends, np.int32)

    @property
    def cu(self) -> Int32:
        """int32 [sequences + 1]: cumulative real lengths."""
        return np.array(tuple(accumulate(self.real, initial=0)), np.int32)

    @property
    def max_seqlen(self) -> int:
        """Of the padded lengths, as THD attention wants it."""
        return max(self.padded, default=0)


@dataclass(frozen=True)
class Layout:
    """A plug-in: multiples by (cp, tp), and the cut."""

    each: Callable[[int, int], int]
    pack: Callable[[int, int], int]
    cut: Cut
    fp8: bool = False
    """Whether it has a rule for FP8."""


def _intervals(ends: Sequence[int], cp: int, rank: int) -> Iterator[Interval]:
    """One interval of the whole pack a rank."""
    total = ends[-1]
    if total % cp:
        raise ValueError(f"a pack of {total} rows cannot be cut in {cp} equal parts")
    yield total // cp * rank, total // cp * (rank + 1)


def _zigzag(first: int, end: int, cp: int, rank: int) -> Iterator[Interval]:
    if cp == 1:
        yield first, end
        return
    chunk, rest = divmod(end - first, 2 * cp)
    if rest:
        raise ValueError(
            f"rows [{first}, {end}) of a pack are {end - first}, no multiple of 2 * cp = {2 * cp}: zigzag cannot cut them"
        )
    yield first + rank * chunk, first + (rank + 1) * chunk
    yield first + (2 * cp - 1 - rank) * chunk, first + (2 * cp - rank) * chunk


def _zigzag_each(ends: Sequence[int], cp: int, rank: int) -> Iterator[Interval]:
    for i in range(len(ends) - 1):
        yield from _zigzag(ends[i], ends[i + 1], cp, rank)


def _zigzag_pack(ends: Sequence[int], cp: int, rank: int) -> Iterator[Interval]:
    yield from _zigzag(0, ends[-1], cp, rank)


def _one(cp: int, tp: int) -> int:
    return 1


def _halves(cp: int, tp: int) -> int:
    return 2 * cp * tp if cp > 1 else tp


LAYOUTS: dict[LayoutName, Layout] = {
    "contiguous": Layout(lambda cp, tp: cp * tp, _one, _intervals),
    "megatron": Layout(_halves, _one, _zigzag_each, fp8=True),
    "verl": Layout(_halves, _one, _zigzag_each, fp8=True),
    "slime": Layout(lambda cp, tp: _halves(cp, 1), lambda cp, tp: 128 * cp * tp, _zigzag_each),
    "ulysses": Layout(_one, lambda cp, tp: cp, _intervals),
    "zigzag_pack": Layout(_one, _halves, _zigzag_pack),
    "slime_allgather": Layout(_one, lambda cp, tp: 128 * cp * tp, _intervals),
}


def padded_length(layout: LayoutName, tokens: int, cp: int, tp: int, fp8: bool = False) -> int:
    """Rows that a sequence of so many tokens takes in a pack, over all ranks, the pack's tail left aside. Raises ValueError on
    fp8 with a layout that has no rule for it."""
    multiple = LAYOUTS[layout].each(cp, tp)
    return _up(tokens, lcm(16, multiple) if _with_fp8(layout, fp8) else multiple)


def pack_bounds(layout: LayoutName, lengths: Sequence[int], cp: int, tp: int, fp8: bool = False) -> Bounds:
    """The padded pack of sequences of so many tokens; of none, an empty one. Raises ValueError as `padded_length`."""
    padded = [padded_length(layout, tokens, cp, tp, fp8) for tokens in lengths]
    rule = LAYOUTS[layout]
    total = sum(padded)
    if _with_fp8(layout, fp8):
        if padded:
            padded[-1] += _up(total, 128 * rule.each(cp, tp)) - total
        return Bounds(tuple(padded), tuple(lengths))
    if tail := _up(total, rule.pack(cp, tp)) - total:
        return Bounds((*padded, tail), (*lengths, 0))
    return Bounds(tuple(padded), tuple(lengths))


def segments(layout: LayoutName, bounds: Bounds, cp: int, rank: int) -> list[Segment]:
    """What a rank has of a pack, ascending by dst and dense; of one sequence, what lies together is one segment."""
    found: list[Segment] = []
    dst = 0
    for first, end in LAYOUTS[layout].cut(bounds.ends, cp, _rank(cp, rank)):
        while first < end:
            row = bisect_right(bounds.ends, first) - 1
            base, stop = bounds.ends[row], min(end, bounds.ends[row + 1])
            last = found[-1] if found else None
            if last is not None and (last.row, last.end) == (row, first - base):
                found[-1] = last._replace(end=stop - base)
            else:
                found.append(Segment(row, first - base, stop - base, dst))
            dst += stop - first
            first = stop
    return found


def local_rows(
    layout: LayoutName, bounds: Bounds | NDArray[Any] | Sequence[int], cp: int, rank: int
) -> Int64:
    """Pack positions of a rank's rows, in their order, int64 [rows of the rank]. `bounds`: of the pack, or its cu_seqlens_padded."""
    ends = bounds.ends if isinstance(bounds, Bounds) else [int(end) for end in bounds]
    cuts = LAYOUTS[layout].cut(ends, cp, _rank(cp, rank))
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b, dtype=np.int64) for a, b in cuts)])


def _rank(cp: int, rank: int) -> int:
    if not 0 <= rank < cp:
        raise ValueError(f"there is no context-parallel rank {rank} of {cp}")
    return rank


def _with_fp8(layout: LayoutName, fp8: bool) -> bool:
    if fp8 and not LAYOUTS[layout].fp8:
        having = sorted(name for name, rule in LAYOUTS.items() if rule.fp8)
        raise ValueError(f"layout {layout!r} has no padding for FP8; {' and '.join(having)} have")
    return fp8


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
