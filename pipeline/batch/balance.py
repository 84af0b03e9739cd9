"""Packing contexts into micro-batches and micro-batches onto data-parallel ranks. Pure, on lengths alone.

Promises:
- `pack`: every item is in exactly one bin, no bin is over capacity, and the bins are those of first-fit decreasing
  (at most 11/9 OPT + 6/9), found with a segment tree in O(n log n);
- `fill`: the same items in more bins, the largest divided first, empty ones only where no other has two items;
- `spread`: sorted chunks of one micro-batch a rank, the largest to the least loaded rank, so that both rank totals and the sum
  over chunks of the chunk's maximum stay near their bounds;
- `small_ends`: the chunks' order is one for all ranks, so that what is trained at the same time is of about one size: costs
  ascend, then descend.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

QUADRATIC_KNEE = 24_576
"""Cost of a context of l tokens is QUADRATIC_KNEE * l + l^2: attention overtakes the rest of the layer near this length."""
EXCHANGE = 2_048
"""Cost of a token whose keys and values a context-parallel rank is sent by another, as much as EXCHANGE / QUADRATIC_KNEE of what
a token costs outside attention: an estimate for grouped-query attention and a link of 400 Gb/s."""


def cost(tokens: int, size: int = 1) -> int:
    """Relative cost of one context of so many tokens over `size` context-parallel ranks, of all of them together: each is sent
    the keys and values of the others' tokens."""
    return (QUADRATIC_KNEE + EXCHANGE * (size - 1)) * tokens + tokens * tokens


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


def fill(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """The bins, with the largest divisible ones split until there are `count`, which is no fewer than there are.

    Empty bins make up the number when no bin can be divided any more.
    """
    missing = count - len(bins)
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


def spread(chunks: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Of each chunk, which has the costs of `ranks` micro-batches, heaviest first, the rank that each goes to.

    Chunks are taken as they come: the heaviest must come first.
    """
    load = [0] * ranks
    placed: list[list[int]] = []
    for chunk in chunks:
        free = sorted(range(ranks), key=lambda r: (load[r], r))
        for rank, each in zip(free, chunk, strict=True):
            load[rank] += each
        placed.append(free)
    return placed


def small_ends(count: int) -> list[int]:
    """An order of `count` chunks, given heaviest first, in which costs ascend and then descend: with small ones at both ends the
    stages of a pipeline fill and drain soon."""
    ascending = range(count - 1, -1, -1)
    return [*ascending[::2], *reversed(ascending[1::2])]
