"""What the kernel says of this process and its memory; zeros where it says nothing."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int:
    """Resident memory of this process."""
    fields = _read(Path("/proc/self/statm")).split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def cpu_s() -> float:
    """Processor time of this process."""
    times = os.times()
    return times.user + times.system


def memory_stalled_s() -> float:
    """Seconds that something was stalled for memory: in this cgroup, or on this machine where the cgroup does not say."""
    for file in (_own_cgroup() / "memory.pressure", Path("/proc/pressure/memory")):
        for line in _read(file).splitlines():
            if line.startswith("some "):
                return int(line.rpartition("total=")[2]) / 1e6
    return 0.0


def _own_cgroup() -> Path:
    """This process's in the unified hierarchy."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            return _CGROUP / line[3:].lstrip("/")
    return _CGROUP


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def allow_files() -> int:
    """Lets this process open as many files as its hard limit says, which is returned. A tenant has some open, its connection
    at least, and the limit that a process is usually given, 1,024, is there for old programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
