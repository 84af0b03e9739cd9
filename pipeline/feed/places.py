"""The places of packers in a directory of sockets: one process a place, whoever comes first.

Promises:
- a place is its holder's until the process ends, however it ends: the kernel frees it at once, also from a container that is
  killed, where the directory is a volume of one machine;
- of many that ask for one at the same time, one gets it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Place:
    """A packer's number, held until it is closed or the process ends."""

    def __init__(self, number: int, handle: int) -> None:
        self.number = number
        self._handle = handle

    def close(self) -> None:
        """Leaves the place. The lock file stays: one that is removed could be held by two, each by a file of its own."""
        os.close(self._handle)


def claim(directory: Path, number: int) -> Place | None:
    """The place of that number, if it is free. Raises OSError that names `packer.socket_dir`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(directory / f"packer-{number}.lock", flags, 0o600)
    except OSError as error:
        raise OSError(
            f"packer.socket_dir {directory}: {error.strerror or error}; name a local directory that this process may write"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return Place(number, handle)
