"""What the journals of dead hosts hold.

Promises:
- nothing of a host that lives is read; a session comes back as the tree that it had after its last recorded turn;
- a journal that is damaged gives the turns before the damage, and no session of it as whole: nobody knows whose turns
  are missing;
- several processes may share what a dead host left. A session that one of them, or its host before it died, has
  forgotten is gone for all; the files go with the last one;
- memory holds where the turns are, not the turns.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.capture.call import Finish
from pipeline.capture.journal import LOCK, SUFFIX, ended, mark_ended
from pipeline.capture.records import Recorded, places, recorded
from pipeline.capture.tree import ContextTree
from schemas.names import checked_name

_LOG = logging.getLogger("packtrain.capture.journal")
_Place = tuple[Path, int, int]
"""A segment, and the first and the last byte (not included) of a turn in it."""


@dataclass(slots=True)
class Recovered:
    """A session of a dead host. `finish` and `malformed` are of the last turn of the main agent's own dialogue; None
    without. `whole`: no recorded turn is missing."""

    tree: ContextTree = field(default_factory=ContextTree)
    turns: int = 0
    finish: Finish | None = None
    malformed: int = 0
    whole: bool = True


@dataclass(slots=True)
class _Dead:
    """What a dead host left: its sessions' turns in order, and the sessions of each segment."""

    sessions: dict[str, list[_Place]] = field(default_factory=dict[str, "list[_Place]"])
    segments: dict[Path, set[str]] = field(default_factory=dict[Path, "set[str]"])
    whole: bool = True


class Recovery:
    """The journals below one directory. Reads a host's once, when it is asked for first: a dead host writes no more. Safe
    to use from several threads."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._hosts: dict[str, _Dead] = {}
        self._reading = threading.Lock()

    def dead(self, host: str) -> bool:
        """Whether the host is known here, and lives no more. Reads files."""
        try:
            with self._reading:
                return self._dead(host) is not None
        except OSError:
            return False

    def session(self, host: str, session: str) -> Recovered | None:
        """What was recorded; None when the host lives, is unknown here, or has nothing of it that is needed. Reads files."""
        try:
            with self._reading:
                dead = self._dead(host)
                found = None if dead is None else dead.sessions.get(session)
            if dead is None or found is None or session in ended(found[0][0]):
                return None
            return _recovered(session, found, dead.whole)
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.error("the journal of %s in %s cannot be read: %s", host, self._directory, error)
            return None

    def forget(self, host: str, session: str) -> None:
        """The session's turns are needed no more; a dead host's files go with its last session. Reads and removes files."""
        try:
            with self._reading:
                self._forget(host, session)
        except OSError as error:
            # The files stay, and nothing else.
            _LOG.warning("the journal of %s in %s cannot be put away: %s", host, self._directory, error)

    def _forget(self, host: str, session: str) -> None:
        dead = self._dead(host)
        if dead is None or dead.sessions.pop(session, None) is None:
            return
        for segment, sessions in dead.segments.items():
            if session in sessions and segment.exists():
                mark_ended(segment, session)
        if all(not path.exists() or sessions <= ended(path) for path, sessions in dead.segments.items()):
            del self._hosts[host]
            shutil.rmtree(self._home(host), ignore_errors=True)

    def _dead(self, host: str) -> _Dead | None:
        found = self._hosts.get(host)
        if found is None:
            directory = self._home(host)
            if not directory.is_dir() or not _unlocked(directory):
                return None
            found = self._hosts[host] = _read(directory)
        return found

    def _home(self, host: str) -> Path:
        return self._directory / checked_name(host, "host")


def _unlocked(directory: Path) -> bool:
    """Whether nobody holds the host's lock."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def _read(directory: Path) -> _Dead:
    dead = _Dead()
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            data, forgotten = path.read_bytes(), ended(path)
        except FileNotFoundError:
            continue
        found, read = places(data)
        if read < len(data):
            dead.whole = False
            _LOG.warning(
                "journal %s is damaged at byte %d of %d: what follows is lost", path, read, len(data)
            )
        dead.segments[path] = {session for session, _, _ in found} - forgotten
        for session, start, end in found:
            if session not in forgotten:
                dead.sessions.setdefault(session, []).append((path, start, end))
    return dead


def _recovered(name: str, found: Sequence[_Place], whole: bool) -> Recovered:
    session = Recovered(whole=whole)
    for path, start, end in found:
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(end - start)
        try:
            _take(session, recorded(body))
        except (ValueError, IndexError) as error:
            _LOG.warning("journal %s: session %s ends early: %s", path, name, error)
            session.whole = False
            break
    return session


def _take(session: Recovered, turn: Recorded) -> None:
    tree = session.tree
    for node, parent in zip(turn.nodes, turn.parents, strict=True):
        tree.append(node.below(tree.nodes[parent]))
    if turn.flags:
        tree.flag(turn.flagged, turn.flags)
    if turn.nodes:
        session.turns += 1
    if turn.main:
        session.finish, session.malformed = turn.finish, turn.malformed
