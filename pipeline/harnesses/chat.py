"""The single-turn harness: the prompt, one answer, a reward."""

from __future__ import annotations

from pipeline.harnesses.agent import Agent
from pipeline.harnesses.base import Trial, Verdict


class ChatHarness:
    def __init__(self) -> None:
        self._agent = Agent()

    async def run(self, trial: Trial) -> Verdict:
        return await self._agent.run(trial, ())
