"""Tasks that are folders of Harbor's format, worked on in a workspace each.

Promises:
- task `index` is a pure function of (seed, options, index) and the folders' content: every epoch goes through all the
  folders once, in an order of its own;
- folders are read and checked when the environment is made, all faults told at once, so that a broken task stops a run
  before it starts and not in its tenth hour;
- nothing of `tests/` or `solution/` is in the workspace's definition.

The reward is the verifier's, in the workspace, so such tasks need a harness that works in one: `shell` or `harbor`.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipeline.capture.messages import Tool
from pipeline.harnesses.environments.base import EnvironmentBroken, Outcome, Task, ToolUse
from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.environments.task_folder import TaskFolder, read
from pipeline.harnesses.workspaces import dockerfile
from pipeline.harnesses.workspaces.base import Limits, Mount, Spec, Workspaces
from pipeline.harnesses.workspaces.choose import workspaces

_SHOWN = 20
_MIB = 1 << 20


class BrokenTasks(ValueError):
    """Folders that are no tasks; the message has each fault, `faults` all of them."""

    def __init__(self, faults: list[str]) -> None:
        more = f"\n- and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        super().__init__("the tasks cannot be used:" + "".join(f"\n- {f}" for f in faults[:_SHOWN]) + more)
        self.faults = faults


class Options(BaseModel):
    """Which folders, and where they are worked on. A limit that is given takes the place of the tasks' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: Path = Field(description="folder whose folders are the tasks; relative: to the working directory")
    names: tuple[str, ...] = Field(
        default=(), description="patterns of the folders' names to take; none: all of them"
    )
    workspaces: str = Field(
        default="overlay", description="overlay, or harbor:docker, harbor:daytona, ... of Harbor's own"
    )
    workspace_options: dict[str, Any] = Field(default_factory=dict)
    memory_mb: int | None = Field(default=None, gt=0)
    disk_mb: int | None = Field(default=None, gt=0)
    processes: int | None = Field(default=None, gt=0)
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    hide_git: bool = Field(default=True, description="take repositories' history away while the agent works")
    keep_processes: bool = Field(
        default=False,
        description="what the agent started lives on for the verifier: tasks that start servers",
    )
    ignore_network: bool = Field(
        default=False, description="take tasks that ask for a network, which they will not have"
    )


class HarborTasks:
    """Raises `BrokenTasks`, and ValueError for a kind of workspaces that is not to be had."""

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        self._seed = seed
        self._options = Options.model_validate(dict(options))
        self._tasks = _tasks(self._options)
        self._workspaces = workspaces(self._options.workspaces, self._options.workspace_options)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return ()

    @property
    def workspaces(self) -> Workspaces:
        return self._workspaces

    def task(self, index: int) -> FolderTask:
        if index < 0:
            raise IndexError(f"task index {index} is negative")
        epoch, place = divmod(index, len(self._tasks))
        return replace(self._tasks[_order(self._seed, epoch, len(self._tasks))[place]], index=index)

    def spec(
        self, task: FolderTask, name: str, peer: tuple[str, int] | None, mounts: tuple[Mount, ...]
    ) -> Spec:
        spec = Spec(
            name=name,
            definition=task.folder / "environment",
            peer=peer,
            mounts=mounts,
            env=task.env,
            limits=task.limits,
        )
        return replace(spec, start_s=task.start_s) if task.start_s else spec

    def call(self, task: Task, name: str, arguments: str) -> ToolUse:
        raise EnvironmentBroken(_NEEDS)

    def verify(self, task: Task, outcome: Outcome) -> float:
        raise EnvironmentBroken(_NEEDS)


_NEEDS = (
    "tasks in folders are worked on and verified in a workspace: give their source a pool whose harness is shell or "
    "harbor, or an adapter that calls pipeline.harnesses.lifecycle"
)


@lru_cache(maxsize=16)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    # A string seeds Random by its SHA-512, so that no two (seed, epoch) pairs are neighbours.
    random.Random(f"harbor/{seed}/{epoch}").shuffle(order)  # noqa: S311  # to be repeatable, not secret
    return tuple(order)


def _tasks(options: Options) -> list[FolderTask]:
    """The chosen tasks by name. A folder whose name begins with a dot or an underscore is none."""
    where = options.tasks.expanduser().resolve()
    if not where.is_dir():
        raise BrokenTasks([f"{where} is no folder: options.tasks names the folder that has the tasks"])
    # By name: the order of a file system is not the same on two machines.
    found = sorted(path for path in where.iterdir() if path.is_dir() and path.name[0] not in "._")
    faults = [
        f"no folder of {where} is called {pattern!r}: it has {[path.name for path in found][:_SHOWN]}"
        for pattern in options.names
        if not fnmatch.filter([path.name for path in found], pattern)
    ]
    if options.names:
        found = [path for path in found if any(fnmatch.fnmatchcase(path.name, p) for p in options.names)]
    elif not found:
        faults.append(f"{where} has no folder: each task is a folder in it")
    tasks: list[FolderTask] = []
    for path in found:
        task, wrong = read(path.resolve(), ignore_network=options.ignore_network)
        faults += wrong
        if task is not None:
            faults += _definition(task, options)
            tasks.append(_task(path.name, task, options))
    if faults:
        raise BrokenTasks(faults)
    return tasks


def _definition(task: TaskFolder, options: Options) -> list[str]:
    """What is wrong with what the workspace is made from. An engine reads more of it than is read here."""
    folder = task.folder / "environment"
    file, services = folder / "Dockerfile", folder / "docker-compose.yaml"
    if options.workspaces != "overlay":
        if file.is_file() or services.is_file() or task.config.environment.docker_image:
            return []
        return [
            f"{file} is missing, and there is no {services.name} and no environment.docker_image: write one"
        ]
    if not file.is_file():
        return [f"{file} is missing: write one, if only with FROM and WORKDIR"]
    if services.exists():
        return [f"{services} needs an engine: set the environment's workspaces to harbor:docker"]
    try:
        dockerfile.read(folder)
    except ValueError as error:
        return [str(error)]
    return []


def _task(name: str, read: TaskFolder, options: Options) -> FolderTask:
    config = read.config
    default = Limits()
    memory, disk = options.memory_mb or read.memory_mb, options.disk_mb or read.storage_mb
    return FolderTask(
        index=0,
        prompt=read.instruction,
        expected="",
        name=name,
        folder=read.folder,
        start_s=config.environment.build_timeout_sec or 0.0,
        agent_s=config.agent.timeout_sec or 0.0,
        verify_s=config.verifier.timeout_sec or 0.0,
        limits=Limits(
            memory_bytes=memory * _MIB if memory else default.memory_bytes,
            disk_bytes=disk * _MIB if disk else default.disk_bytes,
            processes=options.processes or default.processes,
            cpus=options.cpus or config.environment.cpus or default.cpus,
        ),
        env=read.env,
        verifier_env=read.verifier_env,
        solution_env=read.solution_env,
        agent_user=_user(config.agent.user),
        verifier_user=_user(config.verifier.user),
        hide_git=options.hide_git,
        keep_processes=options.keep_processes,
    )


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)
