"""Group-relative advantage estimators: rewards of one group in, one advantage per sequence out.

Promises (float64, n >= 1 finite rewards):
- permutation equivariance: permuting the rewards permutes the advantages;
- all-equal rewards give zeros, for n > 1, in all of them; advantages of `grpo`, `dr_grpo` and `rloo` then have mean 0, those of
  `leave_one_out` have not: it divides each by its own deviation;
- NaN or infinite rewards, and groups that the formula has no value for, are refused with BadHook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from pipeline.signal.hooks import Array, BadHook, Signal, Stage
from schemas.section import Section

Rewards = Sequence[float] | Array

GRPO_EPSILON = 1e-6
TRL_EPSILON = 1e-4


def _checked(rewards: Rewards) -> Array:
    array = np.asarray(rewards, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise BadHook(f"rewards must be one non-empty row, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise BadHook(f"rewards must be finite, got {array.tolist()}")
    return array


def _centred(array: Array) -> Array:
    # The rounding of the mean would make equal rewards unequal, and the division by their deviation would enlarge it.
    return np.zeros_like(array) if array.min() == array.max() else array - array.mean()


def grpo(rewards: Rewards, ddof: int = 1, epsilon: float = GRPO_EPSILON) -> Array:
    """(R - mean) / (std + epsilon), the standard deviation with n - ddof, [n].

    DeepSeekMath, arXiv:2402.03300, eq. 21; ddof and epsilon by default as in verl's `compute_grpo_outcome_advantage`, also for
    a group of one, where mean 0 and std 1 are taken.
    """
    array = _checked(rewards)
    if array.size == 1:
        return array / (1.0 + epsilon)
    return _centred(array) / (array.std(ddof=ddof) + epsilon)


def dr_grpo(rewards: Rewards) -> Array:
    """R - mean, [n]. Dr. GRPO, arXiv:2503.20783, section 3."""
    return _centred(_checked(rewards))


def rloo(rewards: Rewards) -> Array:
    """R_i minus the mean of the others, n / (n - 1) * (R_i - mean), [n]. RLOO, arXiv:2402.14740, eq. 8.

    A group of one has no others: refused. (verl leaves its reward as it is.)
    """
    array = _checked(rewards)
    if array.size == 1:
        raise BadHook("rloo needs a group of at least 2, got 1; raise group_size or use another estimator")
    return _centred(array) * (array.size / (array.size - 1))


def leave_one_out(rewards: Rewards) -> Array:
    """(R_i - mean of the others) / (std of the others, ddof 1, + 1e-6), [n]: NeMo-RL's default.

    As in NeMo-RL's `calculate_baseline_and_std_per_prompt` and `GRPOAdvantageEstimator`: where the others are equal, or only
    one, the difference is not divided, and a group of one has advantage 0. NeMo-RL takes the variance in float32 as a difference
    of squares, which of equal others may leave a rest to be divided by; here it is of the centred values, and exactly 0.
    """
    array = _checked(rewards)
    n = array.size
    if n == 1:
        return np.zeros(1)
    others = np.tile(array, (n, 1))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    equal = others.min(axis=1) == others.max(axis=1)
    gap = array - np.where(equal, others[:, 0], others.mean(axis=1))
    if not equal.all():
        gap[~equal] /= others[~equal].std(axis=1, ddof=1) + GRPO_EPSILON
    return gap


ESTIMATORS: dict[str, Callable[[Rewards], Array]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""What a source can name as its `estimator`."""


class GrpoOptions(Section):
    """Options of the hook `grpo`."""

    preset: Literal["verl", "slime", "trl", "mimo"] = Field(
        default="verl",
        description="whose constants: verl and slime ddof 1, epsilon 1e-6; trl ddof 1, epsilon 1e-4; mimo does not divide",
    )
    ddof: Literal[0, 1] | None = Field(
        default=None, description="in place of the preset's: 1 divides the squares by n - 1, 0 by n"
    )
    epsilon: float | None = Field(
        default=None, gt=0, le=1, description="in place of the preset's: added to the standard deviation"
    )

    @model_validator(mode="after")
    def _used(self) -> GrpoOptions:
        if self.preset == "mimo" and not (self.ddof is None and self.epsilon is None):
            raise ValueError(
                "grpo: preset 'mimo' does not divide, so ddof and epsilon have no meaning; leave them out"
            )
        return self


class Estimator:
    """A hook that makes advantages of rewards alone. It takes the place of advantages that were made before it."""

    stage: Stage = "advantages"
    columns: tuple[str, ...] = ()

    def estimate(self, rewards: Array) -> Array:
        """[n] to [n]."""
        raise NotImplementedError

    def __call__(self, signal: Signal) -> Signal:
        return replace(signal, advantages=self.estimate(signal.rewards), tokens=())


class Grpo(Estimator):
    """GRPO with the constants of a framework, as in verl 0.9.1 (`compute_grpo_outcome_advantage`), slime
    (`RolloutManager._post_process_rewards`: torch's std has ddof 1), TRL 1.16.0 (`GRPOTrainer`, scale_rewards "group": its
    `nanstd` has ddof 1) or MiMo (R - mean).

    A group of one: verl R / (1 + epsilon), the others 0.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = GrpoOptions.model_validate(options or {})

    def estimate(self, rewards: Array) -> Array:
        given = self.options
        if given.preset == "mimo" or (given.preset != "verl" and rewards.size == 1):
            return dr_grpo(rewards)
        epsilon = given.epsilon or (TRL_EPSILON if given.preset == "trl" else GRPO_EPSILON)
        return grpo(rewards, 1 if given.ddof is None else given.ddof, epsilon)


class DrGrpo(Estimator):
    """See `dr_grpo`."""

    def estimate(self, rewards: Array) -> Array:
        return dr_grpo(rewards)


class Rloo(Estimator):
    """See `rloo`."""

    def estimate(self, rewards: Array) -> Array:
        return rloo(rewards)


class LeaveOneOut(Estimator):
    """See `leave_one_out`."""

    def estimate(self, rewards: Array) -> Array:
        return leave_one_out(rewards)


class ReinforcePlusPlusBaseline(Estimator):
    """R - mean: the group's part of REINFORCE++-baseline, arXiv:2501.03262.

    The published method then whitens the advantages over all tokens of the batch: less their mean, by their standard deviation.
    That part is not done here, since no group knows its batch before it yields: a trainer that wants it whitens the
    packed advantages. verl's `compute_reinforce_plus_plus_baseline_outcome_advantage` does both, and leaves the reward of a group
    of one as it is, which has advantage 0 here.
    """

    def estimate(self, rewards: Array) -> Array:
        return dr_grpo(rewards)
