"""Sums of small integers, from reasoning_gym's `chain_sum`, scored by its own `score_answer`.

Promise: two seeds never share a dataset item. reasoning_gym derives item i from `seed + i`, so neighbouring dataset
seeds are the same tasks shifted by one; each seed here owns a range of `SEED_STRIDE` dataset seeds. (The questions
themselves are few, about 20,000 with two terms of one or two digits, so two seeds do meet the same sum now and then.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.capture.messages import Tool
from pipeline.harnesses.environments.base import Outcome, Task, ToolUse

SEED_STRIDE = 1 << 32
SIZE = 1 << 31


class Options(BaseModel):
    """Options of the environment: the same names as reasoning_gym's ChainSumConfig."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_terms: int = Field(2, ge=1, le=64)
    max_terms: int = Field(2, ge=1, le=64)
    min_digits: int = Field(1, ge=1, le=18)
    max_digits: int = Field(2, ge=1, le=18)

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        for what in ("terms", "digits"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(f"min_{what} {low} is over max_{what} {high}")
        return self


class Arithmetic:
    """Answered by text alone: no tools."""

    tools: tuple[Tool, ...] = ()

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        chosen = Options.model_validate(dict(options))
        # 1.3 s of CPU to import: only hosts that run this environment pay for it.
        from reasoning_gym.arithmetic.chain_sum import (  # pyright: ignore[reportMissingTypeStubs]  # it ships none
            ChainSumConfig,
            ChainSumDataset,
        )

        self._data: Any = ChainSumDataset(
            ChainSumConfig(seed=dataset_seed(seed), size=SIZE, allow_negation=False, **chosen.model_dump())
        )

    def task(self, index: int) -> Task:
        if not 0 <= index < SIZE:
            raise IndexError(f"task index {index} is outside 0..{SIZE - 1}")
        item: dict[str, Any] = self._data[index]
        return Task(index, item["question"], item["answer"])

    def call(self, task: Task, name: str, arguments: str) -> ToolUse:
        return ToolUse(name, arguments, f"error: there is no tool {name!r}", ok=False)

    def verify(self, task: Task, outcome: Outcome) -> float:
        """1.0 for the right number; reasoning_gym gives a fraction to longer text that contains it."""
        return float(self._data.score_answer(outcome.answer.strip(), self._data[task.index]))


def dataset_seed(seed: int) -> int:
    """The reasoning_gym seed of a configured seed: a multiple of `SEED_STRIDE`, never a small integer."""
    return (seed + 1) * SEED_STRIDE
