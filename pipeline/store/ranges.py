"""Byte ranges: which GETs serve a list of wanted ranges. Pure.

Promises: every wanted range lies within exactly one GET; GETs are ascending and disjoint; two wanted ranges are in one
GET whenever at most `gap` bytes lie between them.
"""

from __future__ import annotations

from collections.abc import Sequence

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
