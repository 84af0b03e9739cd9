"""Packing contexts into micro-batches and micro-batches onto data-parallel ranks. Pure, on lengths alone.

Promises:
- `pack`: every item is in exactly one bin, no bin is over capacity, and the bins are those of first-fit decreasing
  (at most 11/9 OPT + 6/9), found with a segment tree in O(n log n);
- `fill_to_multiple`: the same items in a number of bins that divides over the ranks, empty ones only where no other
  has two items;
- `spread`: every rank gets the same number of bins; sorted chunks of `ranks` with the largest to the least loaded rank,
  so that both rank totals and the sum over rows of the row maximum stay near their bounds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

QUADRATIC_KNEE = 24_576
"""Cost of a context of l tokens is QUADRATIC_KNEE * l + l^2: attention overtakes the rest of the layer near this length."""


def cost(tokens: int) -> int:
    """Relative cost of one context of so many tokens."""
    return QUADRATIC_KNEE * tokens + tokens * tokens


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity` tokens, by first-fit decreasing.

    Raises ValueError that names the first item which fits no bin.
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"item {index} has {length} tokens; a micro-batch holds 1 to {capacity}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    leaves = 1
    while leaves < max(len(lengths), 1):
        leaves *= 2
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index in order:
        length, node = lengths[index], 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        node //= 2
        while node:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return bins


def fill_to_multiple(bins: list[list[int]], lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """The bins, with the largest divisible ones split until their number is a multiple of `multiple`, at least one.

    Empty bins make up the number when no bin can be divided any more.
    """
    missing = -len(bins) % multiple if bins else multiple
    whole = [list(b) for b in bins if len(b) < 2]
    # A heap of the divisible ones, the largest first; the counter keeps equal ones in order.
    counter = itertools.count()
    heap = [(-sum(lengths[i] for i in b), next(counter), list(b)) for b in bins if len(b) > 1]
    heapq.heapify(heap)
    while missing and heap:
        missing -= 1
        *_, largest = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for index in sorted(largest, key=lambda i: -lengths[i]):
            lighter = int(sums[1] < sums[0])
            halves[lighter].append(index)
            sums[lighter] += lengths[index]
        for half, tokens in zip(halves, sums, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-tokens, next(counter), half))
            else:
                whole.append(half)
    empty: list[list[int]] = [[] for _ in range(missing)]
    return [*(b for *_, b in sorted(heap)), *whole, *empty]


def spread(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank its bins, heaviest first; `len(costs)` must be a multiple of `ranks`."""
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} micro-batches do not divide over {ranks} ranks")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    placed: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for start in range(0, len(order), ranks):
        free = sorted(range(ranks), key=lambda r: (load[r], r))
        for rank, index in zip(free, order[start : start + ranks], strict=True):
            placed[rank].append(index)
            load[rank] += costs[index]
    return placed
