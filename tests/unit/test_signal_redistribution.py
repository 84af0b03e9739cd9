"""Advantage redistribution: golden numbers, what is conserved, and groups in which there is nothing to give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.signal.advantages import dr_grpo, leave_one_out
from pipeline.signal.hooks import BadHook, Member, Signal
from pipeline.signal.redistribution import Redistribute, redistribute

QUALITY = st.floats(0.01, 1.0)
GROUP = st.lists(st.tuples(st.booleans(), QUALITY), min_size=1, max_size=16)


def _hook(rewards: list[float], quality: list[float], **options: float) -> list[float]:
    members = tuple(Member(f"s{i}", quality=q) for i, q in enumerate(quality))
    signal = Signal(members, np.array(rewards, np.float64), advantages=dr_grpo(rewards))
    return Redistribute(options)(signal).made().tolist()


def test_golden_values() -> None:
    rewards, quality = [1.0, 1.0, 1.0, 0.0], [1.0, 0.5, 0.5, 1.0]
    assert _hook(rewards, quality) == pytest.approx([0.375, 0.1875, 0.1875, -0.75], abs=1e-12)
    capped = [0.34375, 0.1875, 0.1875, -0.71875]
    assert _hook(rewards, quality, cap=1.25) == pytest.approx(capped, abs=1e-12)
    assert _hook(rewards, quality, cap=1.5) == _hook(rewards, quality)


@given(group=GROUP, cap=st.none() | st.floats(1, 5), data=st.data())
def test_mass_stays_and_the_order_is_nothing(
    group: list[tuple[bool, float]], cap: float | None, data: st.DataObject
) -> None:
    passes = np.array([passed for passed, _ in group])
    quality = np.array([q for _, q in group])
    before = dr_grpo(passes.astype(np.float64))
    found = redistribute(before, quality, passes, cap)
    assert abs(found.sum()) < 1e-9
    if not 0 < passes.sum() < len(group):
        assert found.tolist() == before.tolist()
        return
    factor = before[passes].sum() / (quality * before)[passes].sum()
    if cap is None or factor <= cap:
        assert found[passes].sum() == pytest.approx(before[passes].sum())
        assert found[~passes] == pytest.approx(before[~passes])
    else:
        # What is not given to the passes is spread over the whole group.
        lost = before[passes].sum() - cap * (quality * before)[passes].sum()
        assert found[~passes] == pytest.approx(before[~passes] + lost / len(group))
    # A better one never gets less.
    ranked = np.argsort(quality[passes])
    assert (np.diff(found[passes][ranked]) >= -1e-12).all()
    order = list(data.draw(st.permutations(range(len(group)))))
    assert redistribute(before[order], quality[order], passes[order], cap) == pytest.approx(found[order])


def test_equal_qualities_change_nothing() -> None:
    for q in (1.0, 0.5, 0.1):
        assert _hook([1, 1, 0, 0], [q] * 4) == pytest.approx([0.5, 0.5, -0.5, -0.5], abs=1e-12)
    # But the mean, which this estimator does not promise to be 0.
    before = leave_one_out([1, 1, 1, 0])
    found = redistribute(before, np.ones(4), np.array([True, True, True, False]))
    assert found == pytest.approx(before - before.mean(), abs=1e-12)
    assert abs(before.mean()) > 0.01


@pytest.mark.parametrize(
    ("advantages", "quality", "passes"),
    [
        ([0.5, -0.5], [1.0, 1.0], [False, False]),
        ([0.0, 0.0], [1.0, 0.5], [True, True]),  # all equal
        # All pass, with penalized rewards: their sum is what rounding left, here 5.6e-17.
        ([0.1, 0.2, -0.3], [1.0, 1.0, 0.5], [True, True, True]),
        ([-0.5, 0.5], [1.0, 1.0], [True, False]),  # the passes have less than nothing to give
        ([1.0, -0.5, -0.5], [0.1, 1.0, 1.0], [True, True, False]),  # by quality they have
    ],
)
def test_nothing_to_give(advantages: list[float], quality: list[float], passes: list[bool]) -> None:
    before = np.array(advantages)
    found = redistribute(before, np.array(quality), np.array(passes))
    assert found.tolist() == advantages


@pytest.mark.parametrize("quality", [0.0, -0.1, 1.1, math.nan])
def test_bad_qualities(quality: float) -> None:
    with pytest.raises(BadHook, match=r"in \(0, 1\]"):
        _hook([1, 0], [quality, 1.0])
    # Of a failure it is not read: graders give none.
    assert _hook([1, 0], [1.0, quality]) == [0.5, -0.5]


@pytest.mark.parametrize("options", [{"cap": 0.9}, {"cap": math.inf}, {"limit": 2.0}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Redistribute(options)


def test_advantages_must_have_been_made() -> None:
    with pytest.raises(BadHook, match="before one that makes them"):
        Redistribute()(Signal((Member("a"),), np.ones(1)))
