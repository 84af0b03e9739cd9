"""Advantage redistribution: among the sequences of a group that passed, advantage goes to those of better quality.

Promises: where no cap is met, the passes' advantages add up to what they did before (and the group's mean, which is subtracted
at the end, is 0 if it was 0); equal qualities change nothing but that mean; permuting the members permutes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipeline.signal.hooks import Array, BadHook, Signal, Stage
from schemas.section import Section

_ROUNDING = 1e-12
"""Sums under this part of the group's whole |A| are what rounding left of 0."""


class RedistributeOptions(Section):
    """Options of the hook `redistribute`."""

    cap: float | None = Field(
        default=None,
        ge=1,
        le=1e6,
        description="what the advantage of a pass of quality 1 is multiplied by, at most; left out: no limit",
    )


def redistribute(
    advantages: Array, quality: Array, passes: npt.NDArray[np.bool_], cap: float | None = None
) -> Array:
    """MiMo's Eq. 3: A' = lambda * f * A on the passes P, lambda = min(cap, sum_P A / sum_P f A), then A' less the group's mean.

    All [n]; quality f in (0, 1], of passes; it is not read of others. The advantages stay as they are where there is nothing to
    give: no member passes, or sum_P A or sum_P f A is not positive. So does a group in which all pass: its sum_P A is 0.
    Raises BadHook on a quality outside (0, 1].
    """
    taken = quality[passes]
    if not ((taken > 0) & (taken <= 1)).all():
        raise BadHook(f"qualities of sequences that pass must be in (0, 1], got {taken.tolist()}")
    mass, weighed = advantages[passes].sum(), (taken * advantages[passes]).sum()
    if min(mass, weighed) <= _ROUNDING * np.abs(advantages).sum():
        return advantages
    factor = mass / weighed if cap is None else min(cap, mass / weighed)
    found = advantages.copy()
    found[passes] *= factor * taken
    return found - found.mean()


class Redistribute:
    """See `redistribute`. Qualities are the grader's; without one they are 1 and little changes. That the reward of a confirmed
    hack is 0, so that it is no pass, is the grader's doing as well."""

    stage: Stage = "after"
    columns: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = RedistributeOptions.model_validate(options or {})

    def __call__(self, signal: Signal) -> Signal:
        quality = np.array([member.quality for member in signal.members], dtype=np.float64)
        found = redistribute(signal.made(), quality, signal.passes(), self.options.cap)
        return replace(signal, advantages=found)
