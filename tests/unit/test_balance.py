"""Packing and spreading against their published bounds."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch.balance import EXCHANGE, QUADRATIC_KNEE, cost, fill, pack, small_ends, spread

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=120)


def first_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """The textbook algorithm, without a tree: number of bins."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for i, free in enumerate(room):
            if free >= length:
                room[i] -= length
                break
        else:
            room.append(capacity - length)
    return len(room)


@given(lengths=LENGTHS, capacity=st.integers(100, 300))
def test_pack_is_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    bins = pack(lengths, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in b) <= capacity for b in bins)
    assert len(bins) == first_fit_decreasing(lengths, capacity)


def test_pack_names_what_can_never_fit() -> None:
    with pytest.raises(ValueError, match="item 1 has 11 tokens; a micro-batch holds 1 to 10"):
        pack([3, 11], 10)


@given(lengths=st.lists(st.integers(1, 100), max_size=120), more=st.integers(0, 8))
def test_bins_fill_a_number_and_are_empty_only_where_nothing_can_be_divided(
    lengths: list[int], more: int
) -> None:
    bins = pack(lengths, 150)
    filled = fill(bins, lengths, len(bins) + more)
    assert len(filled) == len(bins) + more
    assert sorted(i for b in filled for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 150 for b in filled)
    assert all(filled) or max(map(len, filled)) <= 1


def test_the_largest_bin_is_divided_first_and_in_halves() -> None:
    lengths = [50, 40, 30, 20, 5, 5]
    filled = fill([[0, 1, 2, 3], [4, 5]], lengths, 3)
    assert sorted(sorted(lengths[i] for i in b) for b in filled) == [[5, 5], [20, 50], [30, 40]]


@given(costs=st.lists(st.integers(1, 10_000), min_size=1, max_size=20), ranks=st.integers(1, 8))
def test_spread_gives_each_rank_one_of_every_chunk_and_the_least_loaded_the_heaviest(
    costs: list[int], ranks: int
) -> None:
    whole = sorted(costs * ranks, reverse=True)
    chunks = [whole[at : at + ranks] for at in range(0, len(whole), ranks)]
    load = [0] * ranks
    for chunk, placed in zip(chunks, spread(chunks, ranks), strict=True):
        assert sorted(placed) == list(range(ranks))
        assert [load[rank] for rank in placed] == sorted(load)
        for rank, each in zip(placed, chunk, strict=True):
            load[rank] += each
    assert max(load) - min(load) <= max(costs)


@given(st.integers(0, 40))
def test_costs_of_an_order_with_small_ends_ascend_and_then_descend(count: int) -> None:
    order = small_ends(count)
    assert sorted(order) == list(range(count))
    # Chunk 0 is the heaviest.
    peak = order.index(0) if count else 0
    assert order[:peak] == sorted(order[:peak], reverse=True)
    assert order[peak:] == sorted(order[peak:])
    assert set(order[:1] + order[-1:]) == set(range(count)[-2:]), "the two smallest are at the ends"


def test_the_cost_of_a_context() -> None:
    assert cost(QUADRATIC_KNEE) == 2 * QUADRATIC_KNEE**2, "where attention costs as much as the rest"
    assert cost(10, 4) - cost(10) == 3 * EXCHANGE * 10


def test_a_large_batch_of_long_tailed_lengths_is_near_both_bounds() -> None:
    """25,088 contexts up to 1 Mi tokens over 32 ranks: what a synchronous step waits for is the sum of row maxima."""
    budget, ranks = 1 << 20, 32
    drawn = np.random.default_rng(0).lognormal(11.2, 0.95, 25_088)
    lengths = [int(n) for n in np.clip(drawn, 64, budget)]
    bins = pack(lengths, budget)
    assert len(bins) <= -(-sum(lengths) // budget) * 1.001
    whole = fill(bins, lengths, -(-len(bins) // ranks) * ranks)
    costs = sorted((sum(cost(lengths[i]) for i in b) for b in whole), reverse=True)
    chunks = [costs[at : at + ranks] for at in range(0, len(costs), ranks)]
    totals = [0] * ranks
    for chunk, placed in zip(chunks, spread(chunks, ranks), strict=True):
        for rank, each in zip(placed, chunk, strict=True):
            totals[rank] += each
    rows = [chunk[0] for chunk in chunks]
    # The step is no shorter than the mean, nor than the heaviest; two of the ranks + 1 heaviest share a rank.
    bound = max(sum(costs) / ranks, costs[0], costs[ranks - 1] + costs[ranks])
    assert max(totals) <= 1.002 * bound
    assert max(totals) * ranks / sum(costs) < 1.002
    assert sum(rows) * ranks / sum(costs) < 1.0215


def test_thousands_of_ranks_are_filled_in_no_time() -> None:
    """Each split looks at the bin that it splits, not at all of them: with those, 512 ranks took 4 s."""
    lengths = [1 + i % 997 for i in range(25_088)]
    bins = pack(lengths, 1 << 20)
    start = time.process_time()
    assert len(fill(bins, lengths, 4096)) == 4096
    assert time.process_time() - start < 1.0
