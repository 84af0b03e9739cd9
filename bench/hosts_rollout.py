"""The task of the benchmark of tenants; and, as a program, one rollout of it in a process of its own.

    python bench/hosts_rollout.py SESSION_URL

prints the process's proportional memory at its end, in KiB: pages that it shares with n others count as 1 / n.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.capture.messages import Tool
from pipeline.harnesses.environments.base import Outcome, Task, ToolUse

CALLS = 3
"""Of the model, in one rollout."""
_OUTPUT = "def take(self):  # 1 KiB of a file\n" * 30


class Steps:
    """An environment whose tool costs nothing but the thread that it runs on."""

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        pass

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (
            Tool("step", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
        )

    def task(self, index: int) -> Task:
        return Task(index, "Find out why the lock is taken too late, and mend it.", "done")

    def call(self, task: Task, name: str, arguments: str) -> ToolUse:
        return ToolUse(name, arguments, _OUTPUT, ok=True)

    def verify(self, task: Task, outcome: Outcome) -> float:
        return float(outcome.answer == task.expected and len(outcome.uses) == CALLS - 1)


async def rollout(url: str) -> None:
    from pipeline.harnesses.base import Trial
    from pipeline.harnesses.tool import ToolHarness
    from schemas.config import Behaviour

    steps = Steps(0, {})
    verdict = await ToolHarness().run(Trial(url, Behaviour(), steps, steps.task(0), agent_s=600.0))
    if verdict.reward != 1.0:
        raise SystemExit(f"the rollout got {verdict}")


if __name__ == "__main__":
    asyncio.run(rollout(sys.argv[1]))
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("Pss:")))
