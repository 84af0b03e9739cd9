"""Byte ranges: which GETs serve a list of wanted ranges. Pure.

Promises: every wanted range lies within exactly one GET; GETs are ascending and disjoint. Of `coalesce`: two wanted ranges are in
one GET whenever at most `gap` bytes lie between them. Of `thrifty`: what the GETs fetch beyond the wanted ranges is at most
`budget`, unless there would be more than `most` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

COALESCE_GAP = 1 << 20
"""Bytes that it is cheaper to fetch and drop than to spare with a second request."""

Range = tuple[int, int]
"""[start, end) in bytes."""


def coalesce(wanted: Sequence[Range], gap: int = COALESCE_GAP) -> list[Range]:
    """The GETs for `wanted`, in any order, overlapping or not. Raises ValueError on an empty or negative range."""
    merged: list[Range] = []
    for start, end in sorted(wanted):
        if not 0 <= start < end:
            raise ValueError(f"byte range [{start}, {end}) is empty or negative")
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def thrifty(wanted: Sequence[Range], budget: int, most: int, gap: int = COALESCE_GAP) -> list[Range]:
    """The GETs for `wanted`: the smallest gaps are fetched as well, none over `gap` bytes, while that costs at most `budget` bytes
    in all; and then, whatever it costs, until there are at most `most` GETs. Raises ValueError on an empty or negative range."""
    apart = coalesce(wanted, 0)
    gaps = sorted((after[0] - before[1], at) for at, (before, after) in enumerate(pairwise(apart)))
    spent = accumulate(size for size, _ in gaps)
    within = sum(total <= budget and size <= gap for total, (size, _) in zip(spent, gaps, strict=True))
    closed = {at for _, at in gaps[: max(within, len(apart) - most)]}
    merged: list[Range] = []
    for at, (start, end) in enumerate(apart):
        if at - 1 in closed:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
