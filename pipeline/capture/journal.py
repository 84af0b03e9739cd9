"""The journal of a host: recorded turns on local disk, so that a host that is killed loses none.

Promises:
- a turn is in the page cache before its answer goes out, so it outlives the process; many turns at once are committed to
  the disk together, within moments, so it outlives the machine's fall in most cases (`lag` says how many are not yet);
- a segment file goes once no session that is in it is needed any more: the disk holds what is under way. Which of its
  sessions are not is said beside it, for whoever collects the others;
- a host's directory is locked while it lives, so nobody collects the sessions of a living host;
- a full disk costs the protection, never a turn: the sessions under way leave the journal whole, for one with a turn
  missing would be taken for an agent's whole work. It is counted in `lost` and said in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.capture.call import Answer
from pipeline.capture.records import encode, encode_flags
from pipeline.capture.tree import Node
from schemas.names import checked_name

LOCK = "lock"
SUFFIX, ENDED = ".wal", ".ended"
SEGMENT_BYTES = 64 << 20
_LOG = logging.getLogger("packtrain.capture.journal")


class HostJournal:
    """Not safe to use from several threads. Raises OSError when its directory cannot be made."""

    def __init__(self, directory: str | Path, host: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = Path(directory) / checked_name(host, "host")
        self._directory.mkdir(mode=0o700, parents=True)
        self._lock = os.open(self._directory / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._segment_bytes = segment_bytes
        self._number = 0
        self._file: int | None = None
        self._full: list[int] = []
        self._size = 0
        self._sessions: dict[int, set[str]] = {}
        self._unkept: set[str] = set()
        self._dirty = asyncio.Event()
        self.lag = 0
        self.lost = 0

    def record(self, session: str, nodes: Sequence[Node], answer: Answer, flags: int = 0) -> None:
        """See `pipeline.capture.judging.Journal`."""
        self._keep(session, encode(session, nodes, answer, flags))

    def flag(self, session: str, number: int, flags: int) -> None:
        """See `pipeline.capture.judging.Journal`."""
        self._keep(session, encode_flags(session, number, flags))

    def _keep(self, session: str, data: bytes) -> None:
        if session in self._unkept:
            return
        try:
            self._write(data)
        except OSError as error:
            self._give_up(session, error)
            return
        self._sessions[self._number].add(session)
        self.lag += 1
        self._dirty.set()

    def _give_up(self, session: str, error: OSError) -> None:
        under_way = {session}.union(*self._sessions.values())
        self._unkept |= under_way
        self.lost += len(under_way)
        _LOG.error(
            "the journal in %s cannot be written: %s; %d sessions would be lost with this host: free disk space",
            self._directory, error.strerror or error, len(under_way),
        )  # fmt: skip
        for number, sessions in list(self._sessions.items()):
            sessions.clear()
            self._remove(number)

    def forget(self, session: str) -> None:
        """The session's turns are needed no more."""
        self._unkept.discard(session)
        for number, sessions in list(self._sessions.items()):
            if session not in sessions:
                continue
            sessions.remove(session)
            if not sessions:
                self._remove(number)
                continue
            # Without it, the segment stays when its host has died; no more.
            with contextlib.suppress(OSError):
                mark_ended(self._path(number), session)

    async def commit(self) -> None:
        """Commits to the disk what was written, for ever: all that came during one commit goes into the next."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            written, files, self._full = self.lag, self._full, []
            try:
                if self._file is not None:
                    files.append(os.dup(self._file))
                await asyncio.to_thread(_sync, files)
            except OSError as error:
                _LOG.error("the journal in %s is not on the disk: %s", self._directory, error)
            finally:
                for file in files:
                    os.close(file)
            self.lag -= written

    def close(self) -> None:
        """Leaves the sessions that are needed still to whoever collects them."""
        self._end_segment()
        for file in self._full:
            os.close(file)
        if not self._sessions:
            (self._directory / LOCK).unlink(missing_ok=True)
            self._directory.rmdir()
        os.close(self._lock)

    def _write(self, data: bytes) -> None:
        if self._file is None or self._size >= self._segment_bytes:
            self._begin_segment()
        assert self._file is not None
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, memoryview(data)[written:])
        except OSError:
            # A record that is cut off would hide those after it.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _begin_segment(self) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._path(self._number + 1), flags, 0o600)
        self._end_segment()
        self._number += 1
        self._sessions[self._number] = set()
        self._file, self._size = file, 0

    def _end_segment(self) -> None:
        if self._file is None:
            return
        # Committed, then closed, with what is written next.
        self._full.append(self._file)
        self._file = None
        if not self._sessions[self._number]:
            self._remove(self._number)

    def _remove(self, number: int) -> None:
        if number == self._number and self._file is not None:
            # The one that is written to stays, emptied: nobody needs what is in it.
            os.ftruncate(self._file, 0)
            self._size = 0
        else:
            self._sessions.pop(number, None)
            self._path(number).unlink(missing_ok=True)
        self._path(number).with_suffix(ENDED).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08d}{SUFFIX}"


def mark_ended(segment: Path, session: str) -> None:
    """Says beside a segment that a session in it is needed no more. Raises OSError."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    file = os.open(segment.with_suffix(ENDED), flags, 0o600)
    try:
        os.write(file, f"{session}\n".encode())
    finally:
        os.close(file)


def ended(segment: Path) -> set[str]:
    """The sessions in a segment that are needed no more. Raises OSError."""
    try:
        return set(segment.with_suffix(ENDED).read_text().split())
    except FileNotFoundError:
        return set()


def _sync(files: Sequence[int]) -> None:
    for file in files:
        os.fdatasync(file)
