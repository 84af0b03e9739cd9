"""Parts for tests of trials in workspaces: a task folder of a few lines, a trial at it, and what is left on the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.harnesses.base import Phases, Trial
from pipeline.harnesses.environments.harbor import HarborTasks
from schemas.config import Behaviour

INF = float("inf")
PASS = "echo 1 > /logs/verifier/reward.txt"


@dataclass
class Kept:
    """Artefacts in memory."""

    kept: dict[str, bytes] = field(default_factory=dict)

    async def save(self, name: str, data: bytes) -> None:
        assert name not in self.kept
        self.kept[name] = data


def tasks(
    folder: Path,
    test: str,
    dockerfile: str = "",
    toml: str = "",
    files: Mapping[str, str] | None = None,
    **options: Any,
) -> HarborTasks:
    """One task, in a folder of its own below `folder`, whose verifier is `test`."""
    task = folder / "tasks" / "task"
    for name, text in {
        "instruction.md": "Do the task.",
        "task.toml": f'version = "1.0"\n{toml}',
        "environment/Dockerfile": f"FROM debian:bookworm-slim\nWORKDIR /app\n{dockerfile}\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        **(files or {}),
    }.items():
        file = task / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return HarborTasks(0, {"tasks": str(folder / "tasks"), **options})


def trial(
    environment: HarborTasks,
    name: str,
    *,
    budget_s: float = 120.0,
    start_s: float = INF,
    agent_s: float = INF,
    verify_s: float = INF,
    url: str = "http://127.0.0.1:9/s/x/secret/v1",
    behaviour: Behaviour | None = None,
) -> Trial:
    return Trial(
        session_url=url,
        behaviour=behaviour or Behaviour(max_tokens=400),
        environment=environment,
        task=environment.task(0),
        agent_s=budget_s,
        name=name,
        deadline=time.monotonic() + budget_s,
        phases=Phases(start_s, agent_s, verify_s),
        artefacts=Kept(),
    )


def running(mark: str) -> list[int]:
    """Processes of this machine, in any sandbox, whose command line has the text."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found
