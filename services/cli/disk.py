"""The disk under an embedded broker: said when it gets full, and mended when there is room again.

nats-server stores nothing in a stream after a write that failed, until it is restarted. Publishers wait meanwhile
(`pipeline.log.patience`); somebody has to restart it.

Promises:
- each stage is told once: nearly full, full, room again;
- a broker whose writes fail is restarted once there is room, and not before. It says so in its own log, which lies on the
  same disk: the line that counts is the one that it can write again, when a waiting publisher has tried once more.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

LOW_BYTES = 64 * 1024 * 1024
ROOM_BYTES = 4 * 1024 * 1024
"""Enough for the events of a while: it is worth starting the broker again."""
_NO_SPACE = b"no space left on device"


@dataclass(frozen=True)
class Look:
    """What the disk looks like: bytes free, and whether a write of the broker failed since the last look."""

    free: int
    failed: bool


@dataclass
class Watch:
    """See the module's promises."""

    directory: str
    low: bool = False
    full: bool = False
    broken: bool = False
    settling: bool = False

    def see(self, look: Look) -> tuple[list[str], bool]:
        """(what to tell, whether to restart the broker now)."""
        told: list[str] = []
        room, mib = look.free >= ROOM_BYTES, f"{look.free / (1 << 20):.0f} MiB"
        # What the broker said before it was restarted is read after it.
        self.broken = self.broken or (look.failed and not self.settling)
        self.settling = False
        if not room and not self.full:
            told.append(
                f"ALERT: the disk of {self.directory} is full: the broker stores no events, and the run waits. Free some space: the run "
                "then goes on by itself, and nothing is lost"
            )
            self.full = self.low = True
        elif look.free < LOW_BYTES and not self.low:
            told.append(
                f"ALERT: the disk of {self.directory} is nearly full, {mib} are free; the run will wait when it is full"
            )
            self.low = True
        elif look.free >= 2 * LOW_BYTES:
            self.low = False
        if room and self.broken:
            told.append(f"the disk of {self.directory} has room again, {mib}: the broker is restarted")
            self.broken, self.settling = False, True
        elif room and self.full:
            told.append(f"the disk of {self.directory} has room again, {mib}")
        restart, self.full = self.settling, self.full and not room
        return told, restart


class BrokerLog:
    """The broker's own log file, read on from where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def failed(self) -> bool:
        """Whether it says of a full disk since the last call."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
            self._at = file.tell()
        return _NO_SPACE in text


def look(directory: Path, log: BrokerLog) -> Look:
    return Look(shutil.disk_usage(directory).free, log.failed())
