"""Estimators against published values and their invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.signal.advantages import ESTIMATORS, dr_grpo, grpo, rloo

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_golden_values() -> None:
    std = math.sqrt(1 / 3)
    assert grpo([1, 1, 0, 0]) == pytest.approx(np.array([0.5, 0.5, -0.5, -0.5]) / (std + 1e-6), abs=1e-12)
    assert dr_grpo([1, 0, 0, 0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert rloo([1, 0, 0, 0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert grpo([0.7]) == pytest.approx([0.7 / (1 + 1e-6)])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(rewards=REWARDS, data=st.data())
def test_zero_mean_and_equivariance(name: str, rewards: list[float], data: st.DataObject) -> None:
    estimator = ESTIMATORS[name]
    found = estimator(rewards)
    assert abs(found.mean()) < 1e-6 * max(1.0, np.abs(found).max())
    order = data.draw(st.permutations(range(len(rewards))))
    assert estimator([rewards[i] for i in order]) == pytest.approx(found[list(order)], abs=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_rewards_give_zeros_and_nan_is_refused(name: str) -> None:
    # The mean of three 0.1 is not 0.1: a group without a signal must not pass for one with a tiny one.
    for equal in (0.3, 0.1, -0.7, 1e9):
        assert not ESTIMATORS[name]([equal] * 3).any()
    with pytest.raises(ValueError, match="finite"):
        ESTIMATORS[name]([1.0, math.nan])
    with pytest.raises(ValueError, match="non-empty"):
        ESTIMATORS[name]([])


def test_leave_one_out_needs_others() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        rloo([1.0])
