"""The tool-loop harness: the environment's tools are offered and run until the policy answers in text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.harnesses.agent import Agent, NoOptions
from pipeline.harnesses.base import Trial, Verdict

Options = NoOptions


class ToolHarness:
    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        Options.model_validate(options or {})
        self._agent = Agent()

    async def run(self, trial: Trial) -> Verdict:
        return await self._agent.run(trial, trial.environment.tools)
