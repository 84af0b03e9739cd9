"""Counts by upper bound. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class Histogram:
    """Counts by upper bound; the last is for what is over all of them."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list[int])
    sum: float = 0.0

    def observe(self, value: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not over it)."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts or [0] * len(bounds))), strict=True))
