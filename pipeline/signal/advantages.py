"""Group-relative advantage estimators: rewards of one group in, one advantage per sequence out.

Promises (float64, n >= 1 finite rewards):
- permutation equivariance: permuting the rewards permutes the advantages;
- `grpo`, `dr_grpo` and `rloo` of a group have mean 0 for n > 1; all-equal rewards give zeros;
- NaN or infinite rewards are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.signal.hooks import Signal, Stage

Rewards = Sequence[float]
Advantages = npt.NDArray[np.float64]

GRPO_EPSILON = 1e-6


def _checked(rewards: Rewards) -> Advantages:
    array = np.asarray(rewards, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"rewards must be one non-empty row, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"rewards must be finite, got {array.tolist()}")
    return array


def _centred(array: Advantages) -> Advantages:
    # The rounding of the mean would make equal rewards unequal, and the division by their deviation would enlarge it.
    return np.zeros_like(array) if array.min() == array.max() else array - array.mean()


def grpo(rewards: Rewards) -> Advantages:
    """(R - mean) / (std + 1e-6) with the sample standard deviation (ddof 1), [n].

    DeepSeekMath, arXiv:2402.03300, eq. 21; ddof and epsilon as in verl's `compute_grpo_outcome_advantage`, also for a
    group of one, where mean 0 and std 1 are taken.
    """
    array = _checked(rewards)
    if array.size == 1:
        return array / (1.0 + GRPO_EPSILON)
    return _centred(array) / (array.std(ddof=1) + GRPO_EPSILON)


def dr_grpo(rewards: Rewards) -> Advantages:
    """R - mean, [n]. Dr. GRPO, arXiv:2503.20783, section 3."""
    return _centred(_checked(rewards))


def rloo(rewards: Rewards) -> Advantages:
    """R_i minus the mean of the others, n / (n - 1) * (R_i - mean), [n]. RLOO, arXiv:2402.14740, eq. 8.

    A group of one has no others: refused.
    """
    array = _checked(rewards)
    if array.size == 1:
        raise ValueError("rloo needs a group of at least 2, got 1; raise group_size or use another estimator")
    return _centred(array) * (array.size / (array.size - 1))


ESTIMATORS: dict[str, Callable[[Rewards], Advantages]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


class _Estimator:
    """A hook that makes advantages of rewards alone."""

    stage: Stage = "advantages"
    columns: tuple[str, ...] = ()
    estimate: Callable[[Rewards], Advantages]

    def __call__(self, signal: Signal) -> Signal:
        return replace(signal, advantages=type(self).estimate(signal.rewards.tolist()))


class Grpo(_Estimator):
    estimate = staticmethod(grpo)


class DrGrpo(_Estimator):
    estimate = staticmethod(dr_grpo)


class Rloo(_Estimator):
    estimate = staticmethod(rloo)
