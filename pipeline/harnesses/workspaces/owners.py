"""Names that tell whose a thing outside this process is, so that what a killed process left can be told from the rest.

A name starts with the process's number, its start time in the clock ticks of /proc, and a word for where those numbers
count: another machine, or a container with its own numbers, that uses the same engine.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from functools import lru_cache

from pipeline.harnesses.workspaces.cgroups import started

_NAME = re.compile(r"packtrain-(\d+)-(\d+)-([0-9a-f]{8})-.")


def owned(name: str) -> str:
    """A name of this process's, in lower case."""
    pid = os.getpid()
    return f"packtrain-{pid}-{started(pid)}-{_place()}-{name.lower()}"


def orphaned(name: str) -> bool:
    """Whether the name is of a process that was here and is no more. False for names that no process of ours gave."""
    found = _NAME.match(name)
    return found is not None and found[3] == _place() and started(int(found[1])) != int(found[2])


@lru_cache(maxsize=1)
def _place() -> str:
    where = f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116  # a name of /proc, not a file
    return hashlib.sha256(where.encode()).hexdigest()[:8]
