"""Control groups of workspaces: their limits, what they used, and a hold on all of a program's descendants.

Promises:
- a workspace's groups lie below the group of the process that makes them, in cgroup v2 or in v1's hierarchies, wherever
  the machine has its memory and pids controllers; where they cannot be had, `WorkspaceFailed` names step and remedy;
- whoever was started in a group can be killed whole: no process leaves its group by a new session or a double fork;
- names carry the maker's pid and start time, so that the groups of a dead process are told from those of a living one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.harnesses.workspaces.base import Limits, WorkspaceFailed

PREFIX = "packtrain-"
LEAF = "packtrain.hosts"
"""Where v2's processes go that are in the group itself: a group with controllers for others has none of its own."""

REMEDY = (
    "run as root, or in a group that is delegated to you (systemd-run --user --scope -p Delegate=yes, or Delegate=yes in the "
    "unit), with the memory and pids controllers; in a container, with a writable /sys/fs/cgroup"
)
_NAME = re.compile(rf"{re.escape(PREFIX)}(\d+)-(\d+)-")
_GONE = (FileNotFoundError, ProcessLookupError, OSError)
_PERIOD_US = 100_000


def started(pid: int) -> int:
    """A process's start, in ticks since boot; 0 when there is none, or when it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except _GONE:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where a process may make groups: a folder for each controller. In v2 all are the same."""

    memory: Path
    pids: Path
    cpu: Path | None
    unified: bool

    def folders(self) -> list[Path]:
        """Each once; the last is the one in which descendants are followed."""
        own = [self.memory, *([self.cpu] if self.cpu else []), self.pids]
        return [self.pids] if self.unified else [*dict.fromkeys(own)]


def find() -> Hierarchies:
    """Those of the calling process; raises `WorkspaceFailed`."""
    paths = {
        controller: path
        for _, controllers, path in (
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        )
        for controller in (controllers.split(",") if controllers else ["unified"])
    }
    places = {
        name: _place(name, path)
        for name, path in paths.items()
        if name in ("memory", "pids", "cpu", "unified")
    }
    unified = places.get("unified")
    if unified and "memory" not in places:
        _enable(unified)
        controllers = (unified / "cgroup.controllers").read_text().split()
        if {"memory", "pids"} <= set(controllers):
            return Hierarchies(unified, unified, unified if "cpu" in controllers else None, True)
    memory, pids = places.get("memory"), places.get("pids")
    if memory is None or pids is None:
        missing = [name for name in ("memory", "pids") if not places.get(name)]
        raise WorkspaceFailed(
            f"control groups: no {' and no '.join(missing)} controller for this process; {REMEDY}"
        )
    return Hierarchies(memory, pids, places.get("cpu"), False)


def _place(controller: str, path: str) -> Path | None:
    """The folder of this process's group in a hierarchy; None where that is not mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, where = before.split(" ")[3:5]
        found = (
            kind == "cgroup2"
            if controller == "unified"
            else kind == "cgroup" and controller in options.split(",")
        )
        if found and (path == root or path.startswith(root.rstrip("/") + "/")):
            group = Path(where, path[len(root.rstrip("/")) :].lstrip("/"))
            return group.parent if group.name == LEAF else group
    return None


def _enable(group: Path) -> None:
    """Gives the controllers to the groups below a v2 group."""
    wanted = {"memory", "pids", "cpu"} & set((group / "cgroup.controllers").read_text().split())
    missing = wanted - set((group / "cgroup.subtree_control").read_text().split())
    if not missing:
        return
    text = " ".join(f"+{name}" for name in sorted(missing))
    try:
        try:
            (group / "cgroup.subtree_control").write_text(text)
        except OSError:
            leaf = group / LEAF
            leaf.mkdir(exist_ok=True)
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (leaf / "cgroup.procs").write_text(pid)
            (group / "cgroup.subtree_control").write_text(text)
    except OSError as error:
        raise WorkspaceFailed(f"control groups: {text} for {group}: {error.strerror}; {REMEDY}") from error


@dataclass(slots=True)
class Group:
    """The groups of one workspace, one in each hierarchy, of the same name."""

    hierarchies: Hierarchies
    name: str
    _runs: int = field(default=0, init=False)

    def _in(self, folder: Path) -> Path:
        return folder / self.name

    @property
    def followed(self) -> Path:
        """The group whose subgroups hold the programs."""
        return self._in(self.hierarchies.pids)

    def procs(self) -> list[int]:
        """Descriptors of the cgroup.procs of all but `followed`: a program is moved there once, for ever."""
        return [_procs(self._in(folder)) for folder in self.hierarchies.folders()[:-1]]

    def run(self) -> Run:
        """A group for one program and all its descendants."""
        self._runs += 1
        folder = self.followed / f"run-{self._runs}"
        folder.mkdir()
        return Run(folder)

    def ooms(self) -> int:
        """How many of its processes the kernel killed for their memory."""
        name = "memory.events" if self.hierarchies.unified else "memory.oom_control"
        return _named(self._in(self.hierarchies.memory) / name, "oom_kill")

    def peak_bytes(self) -> int:
        """0 where the kernel does not say (v2 before Linux 5.19)."""
        name = "memory.peak" if self.hierarchies.unified else "memory.max_usage_in_bytes"
        try:
            return int((self._in(self.hierarchies.memory) / name).read_text())
        except FileNotFoundError:
            return 0

    def kill(self) -> bool:
        """Sends SIGKILL to all in it; whether there was none."""
        runs = [Run(folder) for folder in self.followed.glob("run-*")]
        return all([Run(self.followed).kill(), *(run.kill() for run in runs)])

    def remove(self) -> bool:
        """Removes what can be removed, which is all once no process is left; whether it is all gone."""
        left = False
        for folder in self.hierarchies.folders():
            own = self._in(folder)
            for part in (*own.glob("run-*"), own):
                try:
                    part.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    left = True
        return not left


@dataclass(frozen=True, slots=True)
class Run:
    """The group of one program."""

    folder: Path

    def procs(self) -> int:
        return _procs(self.folder)

    def kill(self) -> bool:
        """Sends SIGKILL to all in it; whether there was none. To be called until it says so: a process may be forking."""
        whole = self.folder / "cgroup.kill"
        if whole.exists():
            with contextlib.suppress(FileNotFoundError):
                whole.write_text("1")
            return not _pids(self.folder)
        with contextlib.suppress(OSError):
            # Who cannot fork cannot outrun the killing.
            (self.folder / "pids.max").write_text("0")
        pids = _pids(self.folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    def remove(self) -> bool:
        """Whether it is gone; it stays while something in it lives."""
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def make(hierarchies: Hierarchies, name: str, limits: Limits) -> Group:
    """The groups of a new workspace, with its limits; raises `WorkspaceFailed`."""
    group = Group(hierarchies, f"{PREFIX}{os.getpid()}-{started(os.getpid())}-{name}")
    if limits.cpus and hierarchies.cpu is None:
        raise WorkspaceFailed(
            f"control groups: no cpu controller to limit a workspace to {limits.cpus} cores; {REMEDY}"
        )
    try:
        for folder in hierarchies.folders():
            (folder / group.name).mkdir()
        for path, text in _limits(hierarchies, group.name, limits):
            path.write_text(text)
    except OSError as error:
        group.remove()
        raise WorkspaceFailed(f"control groups: {error.filename}: {error.strerror}; {REMEDY}") from error
    return group


def _limits(hierarchies: Hierarchies, name: str, limits: Limits) -> Iterator[tuple[Path, str]]:
    memory, pids = hierarchies.memory / name, hierarchies.pids / name
    yield pids / "pids.max", str(limits.processes)
    bytes_ = str(limits.memory_bytes)
    if hierarchies.unified:
        yield memory / "memory.max", bytes_
        swap, swap_text = memory / "memory.swap.max", "0"
    else:
        yield memory / "memory.limit_in_bytes", bytes_
        swap, swap_text = memory / "memory.memsw.limit_in_bytes", bytes_
    if swap.exists():
        yield swap, swap_text
    if limits.cpus and hierarchies.cpu:
        quota = int(limits.cpus * _PERIOD_US)
        cpu = hierarchies.cpu / name
        if hierarchies.unified:
            yield cpu / "cpu.max", f"{quota} {_PERIOD_US}"
        else:
            yield cpu / "cpu.cfs_period_us", str(_PERIOD_US)
            yield cpu / "cpu.cfs_quota_us", str(quota)


def abandoned(hierarchies: Hierarchies) -> list[Group]:
    """Groups of workspaces whose makers are dead."""
    names = {entry.name for folder in hierarchies.folders() for entry in folder.glob(f"{PREFIX}*-*-*")}
    found = ((name, _NAME.match(name)) for name in sorted(names))
    return [
        Group(hierarchies, name) for name, match in found if match and started(int(match[1])) != int(match[2])
    ]


def clear(group: Group, within_s: float) -> bool:
    """Kills what is in a group and removes it; blocks for `within_s` at most. Whether it is gone."""
    deadline = time.monotonic() + within_s
    while not (group.kill() and group.remove()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _procs(folder: Path) -> int:
    return os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)


def _pids(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except _GONE:
        return []


def _named(path: Path, name: str) -> int:
    """The number beside `name` in a file of such lines; 0 where the file or the line is not."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
