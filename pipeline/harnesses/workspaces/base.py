"""What a workspace is: the sandbox of one trial, in which an agent, and then a verifier, run programs.

Promises, which every provider keeps:
- a program in it reaches nothing but the workspace and, at `reach(url)`, the one address in `Spec.peer`;
- `open` gives a started workspace or raises `WorkspaceFailed`; when its context is left, for whatever reason, every process
  that was started in it is dead, and nothing of it is left on the host;
- a provider serves any number of workspaces at once and blocks nobody's event loop;
- what a program does to itself (time, memory, output, exit status) is told by `Ended`, never raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Stopped = Literal["", "time", "output"]


class WorkspaceFailed(Exception):
    """The sandbox itself failed or cannot be had, which says nothing about the policy; the message names the step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one workspace, all its programs together. `disk_bytes` is what it may write, `memory_bytes` includes that where
    the disk is in memory; `cpus` is how many cores' time it gets, 0 for no limit."""

    memory_bytes: int = 2 << 30
    disk_bytes: int = 1 << 30
    processes: int = 512
    cpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host that is shown at `target`, read-only."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What a workspace is made from. `name` is a legal name that no other workspace has at the time: an attempt's id.

    `definition` is the folder with the task's Dockerfile and what it copies. `peer` is (host, port) of the one address that
    programs may reach: the agent-loop host's; None for no network at all. `env` is what every program gets.
    """

    name: str
    definition: Path
    peer: tuple[str, int] | None = None
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    limits: Limits = field(default_factory=Limits)
    start_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. `returncode` is 128 + n when signal n killed it; `stopped` is the limit for which the workspace
    killed it; outputs are cut at the limit that was given, the end is kept. `oom`: the kernel killed something in the
    workspace for its memory while it ran."""

    returncode: int
    stdout: bytes
    stderr: bytes
    stopped: Stopped = ""
    seconds: float = 0.0
    oom: bool = False

    def describe(self) -> str:
        """One line for an error message."""
        how = f"was stopped at its {self.stopped} limit" if self.stopped else f"exited with {self.returncode}"
        memory = ", out of memory" if self.oom else ""
        return f"{how}{memory} after {self.seconds:.2f} s; stderr ends: {self.stderr[-200:]!r}"


class Workspace(Protocol):
    """A started workspace. Any method may raise `WorkspaceFailed` once the sandbox is gone."""

    @property
    def workdir(self) -> str:
        """Absolute path that programs start in: the Dockerfile's WORKDIR."""
        ...

    def reach(self, url: str) -> str:
        """`url`, whose address is `Spec.peer`, as a program inside writes it."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> Ended:
        """Runs a program to its end, or kills it and all that it started at `timeout_s`, or when the caller is cancelled.

        `user` is a name or number in the workspace; empty: the definition's. Programs may run at the same time.
        """
        ...

    async def put(self, source: Path, target: str) -> None:
        """Copies a file, into `target` when that is a folder, or a folder's content into the folder `target`; makes parents."""
        ...

    async def write(self, target: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file; makes parents."""
        ...

    async def get(self, source: str, most: int) -> bytes:
        """A file's bytes. Raises FileNotFoundError when it is none, ValueError when it is over `most` bytes."""
        ...

    async def peak_bytes(self) -> int:
        """Most memory that it used so far; 0 where that is not measured."""
        ...


@runtime_checkable
class EndsProcesses(Protocol):
    """A workspace in which processes run that are not its programs', so that it must end the programs' itself."""

    async def end_processes(self, grace_s: float) -> None:
        """SIGTERM to every process that a program left, and SIGKILL to what lives on after `grace_s`."""
        ...


class Workspaces(Protocol):
    """A provider. Made once a host."""

    def open(self, spec: Spec) -> AbstractAsyncContextManager[Workspace]:
        """Raises `WorkspaceFailed`, also when it is not started within `spec.start_s`."""
        ...

    async def sweep(self) -> int:
        """Removes what killed hosts of this machine left behind; how many workspaces that was. Called before the first trial."""
        ...
