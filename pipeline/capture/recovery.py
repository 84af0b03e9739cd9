"""What the journals of dead hosts hold.

Promises: nothing of a host that lives is read; a session comes back as the tree that it had after its last recorded turn;
a journal that is damaged gives the turns before the damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.capture.call import Finish
from pipeline.capture.journal import LOCK, SUFFIX
from pipeline.capture.records import Recorded, decode
from pipeline.capture.tree import ContextTree
from schemas.names import checked_name

_LOG = logging.getLogger("packtrain.capture.journal")


@dataclass(slots=True)
class Recovered:
    """A session of a dead host. `finish` and `malformed` are of the last turn of an agent's own dialogue; None without."""

    tree: ContextTree = field(default_factory=ContextTree)
    turns: int = 0
    finish: Finish | None = None
    malformed: int = 0


class Recovery:
    """The journals below one directory. Reads a host's once, when it is asked for first, and keeps what it found there
    until `forget`: a dead host writes no more. Safe to use from several threads."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._hosts: dict[str, dict[str, Recovered]] = {}
        self._reading = threading.Lock()

    def session(self, host: str, session: str) -> Recovered | None:
        """What was recorded; None when the host lives, is unknown here, or recorded nothing of it. Reads files."""
        with self._reading:
            return self._sessions(host).get(session)

    def forget(self, host: str, session: str) -> None:
        """The session's turns are needed no more; a dead host's files go with its last session. Reads and removes files."""
        with self._reading:
            sessions = self._sessions(host)
            if sessions.pop(session, None) is not None and not sessions:
                shutil.rmtree(self._directory / checked_name(host, "host"), ignore_errors=True)

    def _sessions(self, host: str) -> dict[str, Recovered]:
        found = self._hosts.get(host)
        if found is None:
            directory = self._directory / checked_name(host, "host")
            if not directory.is_dir() or not _dead(directory):
                return {}
            found = self._hosts[host] = _read(directory)
        return found


def _dead(directory: Path) -> bool:
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


def _read(directory: Path) -> dict[str, Recovered]:
    found: dict[str, Recovered] = {}
    broken: set[str] = set()
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):
            for turn in decode(path.read_bytes()):
                if turn.session in broken:
                    continue
                session = found.setdefault(turn.session, Recovered())
                try:
                    _take(session, turn)
                except (ValueError, IndexError) as error:
                    broken.add(turn.session)
                    _LOG.warning("journal %s: session %s ends early: %s", path, turn.session, error)
    return found


def _take(session: Recovered, turn: Recorded) -> None:
    tree = session.tree
    for node, parent in zip(turn.nodes, turn.parents, strict=True):
        tree.append(node.below(tree.nodes[parent]))
    session.turns += 1
    if turn.main:
        session.finish, session.malformed = turn.finish, turn.malformed
