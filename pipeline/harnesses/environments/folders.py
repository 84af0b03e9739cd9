"""What an environment of task folders gives to the harnesses that run in a workspace: `shell`, `harbor`, and anybody's.

A task folder is Harbor's: `instruction.md`, `task.toml`, `environment/` (Dockerfile and what it copies), `tests/` (the
verifier), `solution/` (the oracle's). Agents see the instruction and the workspace; `tests/` and `solution/` stay outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipeline.harnesses.environments.base import Environment, Task
from pipeline.harnesses.workspaces.base import Limits, Mount, Spec, Workspaces


@dataclass(frozen=True, slots=True)
class FolderTask(Task):
    """A task in a folder. Seconds are the task's own limits; 0 where it gives none. `prompt` is the instruction."""

    name: str = ""
    folder: Path = Path()
    start_s: float = 0.0
    agent_s: float = 0.0
    verify_s: float = 0.0
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """What programs in the workspace get, by the task's own configuration."""
    verifier_env: Mapping[str, str] = field(default_factory=dict[str, str])
    solution_env: Mapping[str, str] = field(default_factory=dict[str, str])
    agent_user: str = ""
    verifier_user: str = ""
    hide_git: bool = True
    """Take the history of repositories out of the workspace while the agent works."""
    keep_processes: bool = False
    """What the agent left running runs on while its work is verified: for a task that asks for a server."""


@runtime_checkable
class FolderEnvironment(Environment, Protocol):
    """An environment whose tasks are folders, and where their workspaces come from."""

    @property
    def workspaces(self) -> Workspaces: ...

    def task(self, index: int) -> FolderTask: ...

    def spec(
        self, task: FolderTask, name: str, peer: tuple[str, int] | None, mounts: tuple[Mount, ...]
    ) -> Spec:
        """What the workspace of one trial is made from."""
        ...
