"""The tool-loop harness: the environment's tools are offered and run until the policy answers in text."""

from __future__ import annotations

from pipeline.harnesses.agent import Agent
from pipeline.harnesses.base import Trial, Verdict


class ToolHarness:
    def __init__(self) -> None:
        self._agent = Agent()

    async def run(self, trial: Trial) -> Verdict:
        return await self._agent.run(trial, trial.environment.tools)
