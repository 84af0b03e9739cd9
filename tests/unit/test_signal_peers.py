"""Our formulas beside those of other trainers: numbers that verl and TRL gave, the packages themselves, and torch."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.signal import advantages
from pipeline.signal.hooks import Hook, Member, Signal
from pipeline.signal.rewards import Overlong
from tests import peers

GOLDEN = json.loads(peers.GOLDEN.read_text())


def _advantages(hook: Hook, rewards: list[float]) -> list[float]:
    members = tuple(Member(f"s{i}") for i in range(len(rewards)))
    return hook(Signal(members, np.array(rewards))).made().tolist()


def _overlong(rewards: list[float]) -> list[float]:
    hook = Overlong({"max_length": peers.MAX_LENGTH, "buffer": peers.BUFFER, "factor": peers.FACTOR})
    members = tuple(Member(f"s{i}", generated=n) for i, n in enumerate(peers.lengths(rewards)))
    return hook(Signal(members, np.array(rewards))).rewards.tolist()


def _each(hook: Hook) -> Callable[[peers.Groups], peers.Groups]:
    return lambda groups: [_advantages(hook, rewards) for rewards in groups]


def _whitened(groups: peers.Groups) -> peers.Groups:
    """What REINFORCE++-baseline makes of the group's part: whitened over all tokens of the batch."""
    hook = advantages.ReinforcePlusPlusBaseline()
    # The one difference within a group: verl leaves the reward of a group of one as it is.
    found = [_advantages(hook, rewards) if len(rewards) > 1 else rewards for rewards in groups]
    of_tokens = torch.tensor(
        [
            a
            for row, rewards in zip(found, groups, strict=True)
            for a, n in zip(row, peers.lengths(rewards), strict=True)
            for _ in range(n)
        ],
        dtype=torch.float64,
    )
    variance, mean = torch.var_mean(of_tokens, correction=1)
    return [[float((a - mean) / torch.sqrt(variance + 1e-8)) for a in row] for row in found]


OURS: dict[str, Callable[[peers.Groups], peers.Groups]] = {
    "verl_grpo": _each(advantages.Grpo()),
    "verl_dr_grpo": _each(advantages.DrGrpo()),
    "verl_rloo": _each(advantages.Rloo()),
    "verl_rloo_vectorized": _each(advantages.Rloo()),
    "verl_reinforce_pp_baseline": _whitened,
    "verl_overlong": lambda groups: [_overlong(rewards) for rewards in groups],
    "trl_group": _each(advantages.Grpo({"preset": "trl"})),
    "trl_none": _each(advantages.Grpo({"preset": "mimo"})),
}
ALONE = ("verl_grpo", "verl_reinforce_pp_baseline", "verl_overlong", "trl_group", "trl_none")
"""Which take a group of one as the peer does. The others: R - mean is 0 here and R in verl; rloo refuses it."""


def _equal(name: str, groups: peers.Groups, theirs: peers.Groups) -> None:
    kept = [(g, t) for g, t in zip(groups, theirs, strict=True) if len(g) > 1 or name in ALONE]
    found = OURS[name]([g for g, _ in kept])
    for (rewards, expected), row in zip(kept, found, strict=True):
        assert row == pytest.approx(expected, abs=1e-6), f"{name} of {rewards}"


@pytest.mark.parametrize("name", sorted(OURS))
def test_numbers_of_verl_and_trl(name: str) -> None:
    assert GOLDEN["of"] == [peers.VERL, peers.TRL]
    assert any(any(abs(a) > 1e-3 for a in row) for row in GOLDEN["results"][name])
    _equal(name, GOLDEN["groups"], GOLDEN["results"][name])


@pytest.mark.skipif(bool(peers.missing()), reason=peers.missing())
def test_functions_of_verl_and_trl() -> None:
    again = peers.results(GOLDEN["groups"])
    assert sorted(again) == sorted(GOLDEN["results"]) == sorted(OURS)
    for name, rows in again.items():
        for row, recorded in zip(rows, GOLDEN["results"][name], strict=True):
            assert row == pytest.approx(recorded, abs=1e-9), f"{name}: make tests/fixtures/peers.json anew"
    for seed in range(100, 103):
        groups = peers.groups(seed, count=24)
        for name, theirs in peers.results(groups).items():
            _equal(name, groups, theirs)


def _torch_scaled(epsilon: float, correction: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda r: (r - r.mean()) / (torch.std(r, correction=correction) + epsilon)


def _torch_leave_one_out(r: torch.Tensor) -> torch.Tensor:
    """NeMo-RL, one member at a time: mean and deviation of the rest of the group."""
    found: list[torch.Tensor] = []
    for i in range(len(r)):
        rest = torch.cat((r[:i], r[i + 1 :]))
        gap = r[i] - rest.mean()
        spread = torch.std(rest, correction=1) if len(rest) > 1 else torch.zeros(())
        found.append(gap / (spread + 1e-6) if spread > 1e-12 else gap)
    return torch.stack(found)


DERIVED: list[tuple[Hook, Callable[[torch.Tensor], torch.Tensor]]] = [
    (advantages.Grpo({"preset": "slime"}), _torch_scaled(1e-6, 1)),
    (advantages.Grpo({"preset": "trl"}), _torch_scaled(1e-4, 1)),
    (advantages.Grpo({"ddof": 0, "epsilon": 0.5}), _torch_scaled(0.5, 0)),
    (advantages.Rloo(), lambda r: r - (r.sum() - r) / (len(r) - 1)),
    (advantages.LeaveOneOut(), _torch_leave_one_out),
]


@pytest.mark.parametrize(("hook", "derived"), DERIVED)
def test_derived_in_torch(hook: Hook, derived: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for rewards in peers.groups(3, count=60)[1:]:
        expected = derived(torch.tensor(rewards, dtype=torch.float64)).tolist()
        assert _advantages(hook, rewards) == pytest.approx(expected, abs=1e-6), rewards
