"""Estimators against published values and their invariants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.signal.advantages import (
    ESTIMATORS,
    DrGrpo,
    Estimator,
    Grpo,
    LeaveOneOut,
    ReinforcePlusPlusBaseline,
    Rloo,
    dr_grpo,
    grpo,
    leave_one_out,
    rloo,
)
from pipeline.signal.hooks import Member, Signal

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)
HOOKS: dict[str, Callable[[], Estimator]] = {
    "grpo": Grpo,
    "grpo slime": lambda: Grpo({"preset": "slime"}),
    "grpo trl": lambda: Grpo({"preset": "trl"}),
    "grpo mimo": lambda: Grpo({"preset": "mimo"}),
    "grpo ddof 0": lambda: Grpo({"ddof": 0, "epsilon": 1e-3}),
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "leave_one_out": LeaveOneOut,
    "reinforce_pp_baseline": ReinforcePlusPlusBaseline,
}


def _made(hook: Estimator, rewards: list[float]) -> np.ndarray:
    members = tuple(Member(f"s{i}") for i in range(len(rewards)))
    return hook(Signal(members, np.array(rewards, np.float64))).made()


def test_golden_values() -> None:
    std = math.sqrt(1 / 3)
    assert grpo([1, 1, 0, 0]) == pytest.approx(np.array([0.5, 0.5, -0.5, -0.5]) / (std + 1e-6), abs=1e-12)
    assert dr_grpo([1, 0, 0, 0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert rloo([1, 0, 0, 0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert grpo([0.7]) == pytest.approx([0.7 / (1 + 1e-6)])
    # The others of the first are equal: its difference is not divided.
    rest = -1 / 3 / (std + 1e-6)
    assert leave_one_out([1, 0, 0, 0]) == pytest.approx([1.0, rest, rest, rest], abs=1e-12)
    assert leave_one_out([1, 0]).tolist() == [1.0, -1.0]


def test_presets_differ_as_the_frameworks_do() -> None:
    rewards, centred = [1.0, 1.0, 0.0, 0.0], np.array([0.5, 0.5, -0.5, -0.5])
    std = math.sqrt(1 / 3)
    for options, divisor in (
        ({}, std + 1e-6),
        ({"preset": "verl"}, std + 1e-6),
        ({"preset": "slime"}, std + 1e-6),
        ({"preset": "trl"}, std + 1e-4),
        ({"preset": "mimo"}, 1.0),
        ({"preset": "trl", "ddof": 0}, 0.5 + 1e-4),
        ({"preset": "slime", "epsilon": 0.25}, std + 0.25),
    ):
        assert _made(Grpo(options), rewards) == pytest.approx(centred / divisor, abs=1e-12), options


def test_groups_of_one() -> None:
    alone = {name: make for name, make in HOOKS.items() if name != "rloo"}
    found = {name: _made(make(), [0.7]).tolist() for name, make in alone.items()}
    of_verl = {"grpo": [0.7 / (1 + 1e-6)], "grpo ddof 0": [0.7 / (1 + 1e-3)]}
    assert found == {name: of_verl.get(name, [0.0]) for name in alone}
    with pytest.raises(ValueError, match="at least 2"):
        _made(Rloo(), [1.0])


@given(rewards=REWARDS)
def test_runs_that_are_recorded_keep_their_bits(rewards: list[float]) -> None:
    array = np.array(rewards)
    centred = np.zeros(len(rewards)) if array.min() == array.max() else array - array.mean()
    n = len(rewards)
    assert grpo(rewards).tobytes() == (centred / (array.std(ddof=1) + 1e-6)).tobytes()
    assert dr_grpo(rewards).tobytes() == centred.tobytes()
    assert rloo(rewards).tobytes() == (centred * (n / (n - 1))).tobytes()
    for name in ESTIMATORS:
        assert _made(HOOKS[name](), rewards).tobytes() == ESTIMATORS[name](rewards).tobytes()


@pytest.mark.parametrize("name", sorted(HOOKS))
@settings(max_examples=50)
@given(rewards=REWARDS, data=st.data())
def test_zero_mean_and_equivariance(name: str, rewards: list[float], data: st.DataObject) -> None:
    hook = HOOKS[name]()
    found = _made(hook, rewards)
    if name != "leave_one_out":
        assert abs(found.mean()) < 1e-6 * max(1.0, np.abs(found).max())
    order = data.draw(st.permutations(range(len(rewards))))
    again = _made(hook, [rewards[i] for i in order])
    assert again == pytest.approx(found[list(order)], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_equal_rewards_give_zeros_and_nan_is_refused(name: str) -> None:
    # The mean of three 0.1 is not 0.1: a group without a signal must not pass for one with a tiny one.
    for equal in (0.3, 0.1, -0.7, 1e9):
        assert not _made(HOOKS[name](), [equal] * 3).any()
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            _made(HOOKS[name](), [1.0, bad])
    with pytest.raises(ValueError, match="non-empty"):
        _made(HOOKS[name](), [])


def test_others_that_are_nearly_equal_are_not_divided_by_a_rest() -> None:
    # Seven of 0.35: their mean of squares less the square of their mean is not 0, in float32 above 1e-6.
    found = leave_one_out([0.35] * 7 + [0.0])
    assert found[7] == -0.35
    assert np.abs(found).max() < 1.0


def test_rloo_needs_others() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        rloo([1.0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"preset": "other"}, "preset"),
        ({"ddof": 2}, "ddof"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"eps": 1e-6}, "eps"),
        ({"preset": "mimo", "epsilon": 1e-6}, "does not divide"),
        ({"preset": "mimo", "ddof": 1}, "does not divide"),
    ],
)
def test_bad_options(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Grpo(options)


def test_a_later_maker_takes_the_place_of_what_was_made() -> None:
    members = (Member("a", loss_tokens=1), Member("b", loss_tokens=1))
    by_token = (np.ones(1, np.float32), np.ones(1, np.float32))
    before = Signal(members, np.array([1.0, 0.0]), advantages=np.array([5.0, 5.0]), tokens=by_token)
    found = DrGrpo()(before)
    assert (found.made().tolist(), found.tokens) == ([0.5, -0.5], ())
