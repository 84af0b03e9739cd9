"""Hooks that change rewards by how much was generated, before advantages are made of them.

Promises: rewards never rise; each is a function of the group as a set (permuting members permutes rewards). Which members
passed stays what it was before (`Signal.passes`). Lengths are `Member.generated`: the tokens that the policy sampled, not what
tools answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from pipeline.signal.hooks import Array, Signal, Stage
from schemas.section import Section


def _lengths(signal: Signal) -> Array:
    return np.array([member.generated for member in signal.members], dtype=np.float64)


class LengthPenaltyOptions(Section):
    """Options of the hook `length_penalty`; in brackets, their letters in MiMo's Eq. 4."""

    min_pass_rate: float = Field(
        default=0.5, ge=0, le=1, description="[A] groups with a pass rate over this are penalized"
    )
    quantile: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="[B/100] the successes' length that costs nothing, as a part of them: 0 the shortest, 1 the longest",
    )
    penalty: float = Field(default=0.2, ge=0, le=1e6, description="[X] what a success loses, at most")
    slack: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="[delta] excess over that length that costs nothing, as a part of it",
    )
    span: float = Field(
        default=1.0, gt=0, le=1e6, description="[s] excess that costs the whole penalty; above slack"
    )
    power: float = Field(
        default=1.5,
        gt=0,
        le=100,
        description="[gamma] of the excess between slack and span, scaled to [0, 1]",
    )

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltyOptions:
        if self.span <= self.slack:
            raise ValueError(f"length_penalty: span {self.span:g} is not above slack {self.slack:g}")
        return self


class LengthPenalty:
    """The group-relative length penalty, MiMo's Eq. 4: in groups that pass often enough, a success loses

        penalty * clip((l / l* - 1 - slack) / (span - slack), 0, 1) ** power

    where l* is the quantile of the successes' lengths, interpolated linearly. Failures keep their rewards. A group whose l* is 0
    keeps its own too: nothing is longer than nothing by a part of it.
    """

    stage: Stage = "rewards"
    columns: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = LengthPenaltyOptions.model_validate(options or {})

    def __call__(self, signal: Signal) -> Signal:
        given, lengths, passes = self.options, _lengths(signal), signal.passes()
        # A pass rate of 0 is over no limit, so that there are successes to take the quantile of.
        if passes.mean() <= given.min_pass_rate:
            return signal
        reference = np.quantile(lengths[passes], given.quantile)
        if reference == 0:
            return signal
        excess = (lengths / reference - 1.0 - given.slack) / (given.span - given.slack)
        loss = given.penalty * np.clip(excess, 0.0, 1.0) ** given.power
        return replace(signal, rewards=np.where(passes, signal.rewards - loss, signal.rewards))


class OverlongOptions(Section):
    """Options of the hook `overlong`."""

    max_length: int = Field(ge=1, description="sampled tokens at which a sequence loses the whole factor")
    buffer: int = Field(ge=1, description="tokens before max_length over which the loss grows from 0")
    factor: float = Field(default=1.0, gt=0, le=1e6, description="what a sequence of max_length loses")
    bounded: bool = Field(
        default=False,
        description="whether a sequence over max_length loses no more than factor (DAPO's eq. 13), or as much again for each further buffer (verl)",
    )

    @model_validator(mode="after")
    def _ordered(self) -> OverlongOptions:
        if self.buffer > self.max_length:
            raise ValueError(f"overlong: buffer {self.buffer} is over max_length {self.max_length}")
        return self


class Overlong:
    """The soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13, in the form of verl's `DAPORewardManager`:

        R += min(-(l - (max_length - buffer)) / buffer * factor, 0)

    verl's l counts all tokens after the first prompt, and none is over max_length; here l are the sampled tokens of all turns.
    """

    stage: Stage = "rewards"
    columns: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = OverlongOptions.model_validate(options or {})

    def __call__(self, signal: Signal) -> Signal:
        given = self.options
        excess = (_lengths(signal) - (given.max_length - given.buffer)) / given.buffer
        highest = 1.0 if given.bounded else np.inf
        return replace(signal, rewards=signal.rewards - given.factor * np.clip(excess, 0.0, highest))
