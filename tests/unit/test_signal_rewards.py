"""Length penalties: golden numbers, what they leave alone, and that they know successes however rewards have been changed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.signal.hooks import Hook, Member, Signal, chain
from pipeline.signal.rewards import LengthPenalty, Overlong
from schemas.sources import Source

GROUP = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 5000)), min_size=1, max_size=16)
HOOKS: dict[str, Callable[[], Hook]] = {
    "length_penalty": LengthPenalty,
    "lenient": lambda: LengthPenalty({"min_pass_rate": 0.0, "quantile": 0.9, "slack": 0.5, "span": 2.0}),
    "overlong": lambda: Overlong({"max_length": 2000, "buffer": 500, "factor": 0.5}),
    "bounded": lambda: Overlong({"max_length": 2000, "buffer": 500, "bounded": True}),
}


def _signal(rewards: list[float], lengths: list[int]) -> Signal:
    members = tuple(Member(f"s{i}", generated=n) for i, n in enumerate(lengths))
    return Signal(members, np.array(rewards, np.float64))


def _penalized(hook: Hook, rewards: list[float], lengths: list[int]) -> list[float]:
    return hook(_signal(rewards, lengths)).rewards.tolist()


def test_golden_length_penalty() -> None:
    options = {
        "min_pass_rate": 0.5, "quantile": 0.3, "penalty": 0.2, "slack": 0.0, "span": 1.0, "power": 1.5,
    }  # fmt: skip
    found = _penalized(LengthPenalty(options), [1, 1, 1, 0], [100, 150, 300, 50])
    # The reference is 130 tokens, linearly between 100 and 150: 1 - 0.2 * (20 / 130) ** 1.5.
    assert found == pytest.approx([1.0, 1 - 0.2 * (20 / 130) ** 1.5, 0.8, 0.0], abs=1e-12)
    assert found == pytest.approx([1.0, 0.98793, 0.8, 0.0], abs=1e-5)
    assert found == _penalized(LengthPenalty(), [1, 1, 1, 0], [100, 150, 300, 50])


def test_slack_and_span() -> None:
    hook = LengthPenalty({"quantile": 0.0, "penalty": 1.0, "slack": 0.5, "span": 2.5, "power": 1.0})
    found = _penalized(hook, [1] * 5, [100, 150, 175, 250, 900])
    assert found == pytest.approx([1.0, 1.0, 0.875, 0.5, 0.0])


def test_groups_that_are_left_alone() -> None:
    lengths = [10, 1000, 10, 10]
    # A pass rate of just the limit is not over it; without a success there is nothing to be longer than.
    assert _penalized(LengthPenalty(), [1, 1, 0, 0], lengths) == [1, 1, 0, 0]
    assert _penalized(LengthPenalty({"min_pass_rate": 0.0}), [0, 0, 0, 0], lengths) == [0, 0, 0, 0]
    # Successes that sampled nothing: no length is a multiple of theirs.
    assert _penalized(LengthPenalty(), [1, 1, 1, 0], [0, 0, 50, 10]) == [1, 1, 1, 0]
    # Failures are never penalized, however long.
    assert _penalized(LengthPenalty(), [1, 1, 1, 0], [10, 10, 10, 9999]) == [1, 1, 1, 0]


def test_golden_overlong() -> None:
    hook = Overlong({"max_length": 200, "buffer": 50, "factor": 0.5})
    assert _penalized(hook, [1, 1, 1, 0], [10, 150, 175, 200]) == pytest.approx([1.0, 1.0, 0.75, -0.5])
    # Past max_length it falls on, as verl's formula does; bounded, it stops, as DAPO's.
    assert _penalized(hook, [1], [250]) == pytest.approx([0.0])
    bounded = Overlong({"max_length": 200, "buffer": 50, "factor": 0.5, "bounded": True})
    assert _penalized(bounded, [1], [250]) == pytest.approx([0.5])


@pytest.mark.parametrize("name", sorted(HOOKS))
@settings(max_examples=50)
@given(group=GROUP, data=st.data())
def test_rewards_never_rise_and_the_order_is_nothing(
    name: str, group: list[tuple[float, int]], data: st.DataObject
) -> None:
    hook = HOOKS[name]()
    before = _signal([reward for reward, _ in group], [length for _, length in group])
    found = hook(before).rewards
    assert (found <= before.rewards).all()
    assert np.isfinite(found).all()
    if isinstance(hook, LengthPenalty):
        assert (before.rewards - found <= hook.options.penalty + 1e-12).all()
        assert (found[~before.passes()] == before.rewards[~before.passes()]).all()
    order = list(data.draw(st.permutations(range(len(group)))))
    again = _penalized(hook, before.rewards[order].tolist(), [group[i][1] for i in order])
    assert again == pytest.approx(found[order].tolist(), abs=1e-9)


def _chained(*hooks: dict[str, object]) -> Source:
    return Source.model_validate(
        {"name": "s", "pool": "p", "groups": 1, "environment": {"kind": "arithmetic"}, "hooks": hooks}
    )


def test_a_success_that_lost_a_part_of_its_reward_still_is_one() -> None:
    source = _chained(
        {"kind": "overlong", "options": {"max_length": 400, "buffer": 400, "factor": 0.1}},
        {"kind": "length_penalty"},
        {"kind": "dr_grpo"},
        {"kind": "redistribute"},
    )
    before = _signal([1, 1, 1, 0], [100, 150, 300, 50])
    found = chain(source).run(before)
    # Each lost something to the first hook, so that no reward is 1 any more; the second and the last know who passed.
    after_overlong = np.array([0.975, 0.9625, 0.925, -0.0125])
    expected = after_overlong - [0, 0.2 * (20 / 130) ** 1.5, 0.2, 0]
    assert found.rewards == pytest.approx(expected, abs=1e-12)
    assert found.made() == pytest.approx(expected - expected.mean(), abs=1e-12)
    assert chain(source).pure


@pytest.mark.parametrize(
    ("hook", "options", "match"),
    [
        (LengthPenalty, {"slack": 1.0}, "not above slack"),
        (LengthPenalty, {"quantile": 30}, "quantile"),
        (LengthPenalty, {"penalty": -0.1}, "penalty"),
        (LengthPenalty, {"power": 0}, "power"),
        (LengthPenalty, {"span": math.inf}, "span"),
        (LengthPenalty, {"percentile": 30}, "percentile"),
        (Overlong, {}, "max_length"),
        (Overlong, {"max_length": 10, "buffer": 0}, "buffer"),
        (Overlong, {"max_length": 10, "buffer": 11}, "over max_length"),
        (Overlong, {"max_length": 10, "buffer": 5, "factor": -1}, "factor"),
    ],
)
def test_bad_options(
    hook: Callable[[dict[str, object]], Hook], options: dict[str, object], match: str
) -> None:
    with pytest.raises(ValidationError, match=match):
        hook(options)
