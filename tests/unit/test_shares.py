"""Seats by shares: every promise of `schemas.shares`, of any shares."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.shares import largest_remainder

SHARES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=12)


@given(SHARES, st.integers(0, 5_000))
@example([0.1] * 3 + [0.7], 6)
@example([1e6, 1e-6, 1e-6], 3)
def test_the_promises_of_largest_remainder(values: list[float], more: int) -> None:
    shares = {f"p{i}": value for i, value in enumerate(values)}
    seats = len(shares) + more
    given = largest_remainder(seats, shares)
    assert list(given) == list(shares)
    assert sum(given.values()) == seats
    assert min(given.values()) >= 1

    # The most names, from the largest share down, whose quotas of what the others' one seat each leaves are one or more.
    exact = sorted((Fraction(str(value)) for value in values), reverse=True)
    dividing = max(
        (k for k in range(1, len(exact) + 1) if (seats - len(exact) + k) * exact[k - 1] >= sum(exact[:k])),
    )
    left, whole = seats - len(exact) + dividing, sum(exact[:dividing])
    for name, share in shares.items():
        quota = left * Fraction(str(share)) / whole
        if quota >= 1:
            assert math.floor(quota) <= given[name] <= math.ceil(quota)
        else:
            assert given[name] == 1
    names = list(shares)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert shares[first] < shares[second] or given[first] >= given[second]
            assert shares[first] >= shares[second] or given[first] <= given[second]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_whole_quotas_are_kept(seats: list[int]) -> None:
    """Shares that the seats divide exactly are the seats, in whatever unit they are given."""
    for unit in (1.0, 0.125, 1024.0):
        shares = {f"p{i}": count * unit for i, count in enumerate(seats)}
        assert list(largest_remainder(sum(seats), shares).values()) == seats


@pytest.mark.parametrize(
    ("seats", "shares", "expected"),
    [
        # Quotas 3.5, 2.1, 1.4: the seat that is left goes to the largest remainder.
        (7, {"a": 5, "b": 3, "c": 2}, {"a": 4, "b": 2, "c": 1}),
        # A tie goes to the name that is given first.
        (3, {"a": 1, "b": 1}, {"a": 2, "b": 1}),
        # The smallest has its one seat, and the others share what is left of ten.
        (10, {"big": 98, "small": 1, "least": 1}, {"big": 8, "small": 1, "least": 1}),
        # Equal remainders as they are written, which they are not in binary: the first that is given has the seat.
        (62, {"a": 2, "b": 0.3, "c": 0.1, "d": 3}, {"a": 23, "b": 4, "c": 1, "d": 34}),
        # With the small one's seat gone, another's quota falls below one.
        (3, {"a": 100, "b": 50, "c": 1}, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_known_divisions(seats: int, shares: dict[str, float], expected: dict[str, int]) -> None:
    assert largest_remainder(seats, shares) == expected


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="2 seats for 3 names"):
        largest_remainder(2, {"a": 1, "b": 1, "c": 1})
    for share in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"the share of 'b' is {share}"):
            largest_remainder(4, {"a": 1.0, "b": share})
