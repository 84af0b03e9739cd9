"""The launcher that runs in a directory, found by what only it can have: the directory's lock.

Promises: a process is only taken for the launcher, and only sent a signal, when it holds the lock at that moment; a
number in a file is never enough, as it may be another process's by now.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

import orjson

from schemas.names import BadName, checked_name
from services.cli.embedded import LaunchError


@dataclass(frozen=True)
class Launcher:
    """A process that launched a run and holds the lock of its directory."""

    pid: int
    run: str


def find_launcher(directory: Path) -> Launcher | None:
    """Who runs in the directory, None when no launcher does (a reading command may hold the lock too)."""
    pid = holder(directory)
    if pid is None:
        return None
    for record in sorted(directory.glob("runs/*/processes.json"), key=_changed, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, BadName):
            run = checked_name(record.parent.name, "run")
            # The record of an earlier launcher, whose number another process has now, is older than that process.
            if orjson.loads(record.read_bytes())["launcher"] == pid and _changed(record) >= _began(pid) - 1:
                return Launcher(pid, run)
    return None


def stop(directory: Path, launcher: Launcher, timeout_s: float) -> None:
    """Asks the launcher to stop and waits until it is gone. Raises LaunchError when it is not in time."""
    try:
        handle = os.pidfd_open(launcher.pid)
    except ProcessLookupError:
        return
    try:
        # From here on the handle is this very process; only now its right to the lock says that it is the launcher.
        if find_launcher(directory) != launcher:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not wait(handle, timeout_s):
            raise LaunchError(
                f"the launcher of run {launcher.run}, process {launcher.pid}, has not stopped in {timeout_s:.0f} s; see "
                f"{directory / 'launcher.log'}, and kill it if need be: its run can be resumed"
            )
    finally:
        os.close(handle)


def wait_for(launcher: Launcher, timeout_s: float) -> bool:
    """Whether the launcher is gone within the time."""
    try:
        handle = os.pidfd_open(launcher.pid)
    except ProcessLookupError:
        return True
    try:
        return wait(handle, timeout_s)
    finally:
        os.close(handle)


def wait(handle: int, timeout_s: float) -> bool:
    """Whether the process of a pidfd ends within the time."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def holder(directory: Path) -> int | None:
    """The process that holds the directory's lock: only a holder writes its number, and it keeps the file open."""
    lock = directory / "lock"
    try:
        place = lock.stat()
        pid = int(lock.read_text().strip())
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):
        return None
    for file in files:
        with contextlib.suppress(OSError):
            if os.path.samestat(file.stat(), place):
                return pid
    return None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _began(pid: int) -> float:
    """When the process began, seconds since the epoch, to a hundredth; raises OSError when there is none."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
