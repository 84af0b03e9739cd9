"""Which micro-batch, rank and context-parallel size each context gets. Pure, on lengths alone.

Promises:
- every context is in exactly one pack, (dp, microbatch, group), and the padded lengths of a pack sum to no more than the
  capacity of its context-parallel size: `token_budget * size / cp`, less what the layout's tail of a pack may need;
- every data-parallel rank has the same number of micro-batches, a multiple of vpp; those of one number have one
  context-parallel size on all ranks, and cp / size packs;
- sizes are chosen so that it pays: all micro-batches are of size cp, unless contexts that fit a smaller one make the step
  shorter there by the cost model (`balance.cost`). Smaller ones are tried in descending order, until one does not pay;
- a context goes to the smallest size that it fits, of those that are used: a long one is never in a small one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from pipeline.batch.balance import cost, fill, pack, small_ends, spread
from pipeline.batch.layouts import pack_bounds, padded_length
from pipeline.signal.overlong import Fit
from schemas.config import Batch
from schemas.parallel import LayoutName


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Of each context its place, and of each micro-batch number the context-parallel size."""

    dp: list[int]
    microbatch: list[int]
    group: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Micro-batches of one size, one for each data-parallel rank, heaviest first: of each its cost to a rank, in 1 / cp, and
    its packs of contexts."""

    size: int
    costs: list[int]
    packs: list[list[list[int]]]


def capacity(batch: Batch, size: int) -> int:
    """Padded tokens that a pack of that context-parallel size may have before its tail. The tail makes it a multiple of what a
    pack of one token has: what the budget has above the largest such multiple cannot be used."""
    budget = batch.token_budget * size // batch.cp
    return budget - budget % pack_bounds(batch.layout, [1], size, batch.tp, batch.fp8).total


def longest(batch: Batch, size: int) -> int:
    """Tokens of the longest context that fits a pack of that context-parallel size; 0: none does."""
    return _longest(capacity(batch, size), batch.layout, size, batch.tp, batch.fp8)


@lru_cache(maxsize=256)
def _longest(room: int, layout: LayoutName, size: int, tp: int, fp8: bool) -> int:
    # Padding grows with length, and never shortens.
    return bisect_left(range(1, room + 1), True, key=lambda n: padded_length(layout, n, size, tp, fp8) > room)


def arrange(lengths: Sequence[int], batch: Batch) -> Arrangement:
    """The places of contexts of so many tokens, each at most `longest(batch, batch.cp)`; else ValueError."""
    sizes = [s for s in range(batch.cp, 0, -1) if batch.cp % s == 0] if batch.adaptive_cp else [batch.cp]
    packed: dict[tuple[int, int], list[list[int]]] = {}
    best: list[_Chunk] = []
    for lowest in sizes:
        chunks = _chunks(lengths, batch, [s for s in reversed(sizes) if s >= lowest], packed)
        if best and _seconds(chunks) >= _seconds(best):
            break
        best = chunks
    return _places(len(lengths), batch, best)


def _padded(batch: Batch, tokens: int, size: int) -> int:
    return padded_length(batch.layout, tokens, size, batch.tp, batch.fp8)


def _seconds(chunks: Sequence[_Chunk]) -> int:
    """What the step takes, since ranks wait for each other at each micro-batch."""
    return sum(chunk.costs[0] for chunk in chunks)


def _chunks(
    lengths: Sequence[int], batch: Batch, sizes: Sequence[int], packed: dict[tuple[int, int], list[list[int]]]
) -> list[_Chunk]:
    """The chunks of micro-batches of these sizes, ascending, heaviest first.

    packed: the bins of each size and number of contexts, for lowest sizes that descend: the contexts of a size become fewer
    then, so that as many are the same ones.
    """
    limits = list(accumulate((longest(batch, size) for size in sizes), max))
    of: list[list[int]] = [[] for _ in sizes]
    for i, tokens in enumerate(lengths):
        # One that is too long for all is refused where it is packed.
        of[min(bisect_left(limits, tokens), len(sizes) - 1)].append(i)
    bins: list[list[list[int]]] = []
    padded: list[list[int]] = []
    for k, size in enumerate(sizes):
        padded.append([_padded(batch, lengths[i], size) for i in of[k]])
        key = (size, len(of[k]))
        if key not in packed:
            packed[key] = pack(padded[k], capacity(batch, size))
        bins.append(packed[key])
    counts = [
        -(-len(each) // (batch.dp * (batch.cp // size))) for size, each in zip(sizes, bins, strict=True)
    ]
    missing = -sum(counts) % batch.vpp if any(counts) else batch.vpp
    if missing:
        tokens = [sum(each) for each in padded]
        counts[tokens.index(max(tokens))] += missing
    chunks: list[_Chunk] = []
    for k, size in enumerate(sizes):
        packs = batch.cp // size
        # Costs of a rank: a pack's are shared by the ranks of its size.
        costs = [cost(tokens, size) * packs for tokens in padded[k]]
        filled = fill(bins[k], padded[k], counts[k] * batch.dp * packs)
        totals = [sum(costs[i] for i in b) for b in filled]
        order = sorted(range(len(filled)), key=lambda b: (-totals[b], b))
        # A micro-batch takes as long as the heaviest of its packs, so that packs of about one cost are together.
        microbatches = [order[at : at + packs] for at in range(0, len(order), packs)]
        for at in range(0, len(microbatches), batch.dp):
            mine = microbatches[at : at + batch.dp]
            chunks.append(
                _Chunk(
                    size,
                    [totals[each[0]] for each in mine],
                    [[[of[k][i] for i in filled[b]] for b in each] for each in mine],
                )
            )
    return sorted(chunks, key=lambda chunk: -chunk.costs[0])


def _places(count: int, batch: Batch, chunks: Sequence[_Chunk]) -> Arrangement:
    ranks = spread([chunk.costs for chunk in chunks], batch.dp)
    order = small_ends(len(chunks)) if batch.order == "small_ends" else range(len(chunks))
    found = Arrangement([0] * count, [0] * count, [0] * count, [chunks[c].size for c in order])
    for number, c in enumerate(order):
        for rank, packs in zip(ranks[c], chunks[c].packs, strict=True):
            for group, contexts in enumerate(packs):
                for i in contexts:
                    found.dp[i], found.microbatch[i], found.group[i] = rank, number, group
    return found


def fit(batch: Batch) -> Fit:
    """What becomes of contexts that are longer than a micro-batch."""
    return Fit(longest(batch, batch.cp), batch.overlong)


def budget_fault(batch: Batch, max_context: int) -> str | None:
    """Why a context of `max_context` tokens would fit no micro-batch for its padding, where that is nothing that
    `batch.overlong` takes care of; None: it fits, or is taken care of."""
    limit = longest(batch, batch.cp)
    if limit >= max_context or (limit and batch.overlong != "reject"):
        return None
    needed = pack_bounds(batch.layout, [max_context], batch.cp, batch.tp, batch.fp8).total
    return (
        f"token_budget {batch.token_budget} holds a context of {limit} tokens at most as layout {batch.layout!r} pads it (cp {batch.cp}, "
        f"tp {batch.tp}), and engine.max_context is {max_context}: raise it to {needed}"
        + (", or set batch.overlong to drop or truncate" if limit else "")
    )
