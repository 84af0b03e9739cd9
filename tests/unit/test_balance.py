"""Packing and spreading against their published bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch.balance import cost, pack, split_to_multiple, spread

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


@given(lengths=LENGTHS, multiple=st.integers(1, 8))
def test_split_reaches_a_multiple_or_says_why_not(lengths: list[int], multiple: int) -> None:
    bins = pack(lengths, 150)
    needed = -(-len(bins) // multiple) * multiple
    if len(lengths) < needed:
        with pytest.raises(ValueError, match="cannot fill a multiple"):
            split_to_multiple(bins, lengths, multiple)
        return
    split = split_to_multiple(bins, lengths, multiple)
    assert len(split) == needed
    assert sorted(i for b in split for i in b) == list(range(len(lengths)))
    assert all(b and sum(lengths[i] for i in b) <= 150 for b in split)


@given(costs=st.lists(st.integers(1, 10_000), min_size=1, max_size=20), ranks=st.integers(1, 8))
def test_spread_is_equal_in_number_and_heaviest_first(costs: list[int], ranks: int) -> None:
    whole = costs * ranks
    placed = spread(whole, ranks)
    assert {len(mine) for mine in placed} == {len(costs)}
    assert sorted(i for mine in placed for i in mine) == list(range(len(whole)))
    for mine in placed:
        assert [whole[i] for i in mine] == sorted((whole[i] for i in mine), reverse=True)


def test_a_large_batch_of_long_tailed_lengths_is_near_both_bounds() -> None:
    """25,088 contexts up to 1 Mi tokens over 32 ranks: what a synchronous step waits for is the sum of row maxima."""
    budget, ranks = 1 << 20, 32
    drawn = np.random.default_rng(0).lognormal(11.2, 0.95, 25_088)
    lengths = [int(n) for n in np.clip(drawn, 64, budget)]
    bins = pack(lengths, budget)
    assert len(bins) <= -(-sum(lengths) // budget) * 1.001
    whole = split_to_multiple(bins, lengths, ranks)
    costs = [sum(cost(lengths[i]) for i in b) for b in whole]
    placed = spread(costs, ranks)
    totals = [sum(costs[i] for i in mine) for mine in placed]
    rows = [max(costs[i] for i in row) for row in zip(*placed, strict=True)]
    assert max(totals) * ranks / sum(costs) < 1.002
    assert sum(rows) * ranks / sum(costs) < 1.03
