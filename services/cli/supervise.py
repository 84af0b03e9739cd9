"""Processes that are kept alive, and that never outlive the launcher.

Promises:
- a unit's members live and die together: when one ends, the others are killed before all are started anew;
- a unit that dies `LIMIT` times within `WINDOW_S` is given up, with one `GaveUp` that names its log;
- every child gets SIGKILL from the kernel when the launcher dies, however it dies; what a child leaves in its own
  process group is killed with it;
- `stop` asks, waits at most its grace, then kills; after it no member runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 5
WINDOW_S = 30.0
_BACKOFF_S = (0.1, 0.2, 0.4, 0.8)
_QUIET_EXIT_S = 5.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class GaveUp(RuntimeError):
    """A unit that cannot be kept alive."""


@dataclass(frozen=True)
class Member:
    """One process. `argv` holds no secret; stdout and stderr are appended to `log`, or are ours when there is none."""

    name: str
    argv: tuple[str, ...]
    log: Path | None = None


@dataclass(frozen=True)
class Unit:
    """Members that are started and restarted together: one, or the ranks of a trainer. `ends`: it is over, and not started
    anew, when all have ended well."""

    name: str
    members: tuple[Member, ...]
    ends: bool = False


@dataclass
class Deaths:
    """When a unit died, and what follows from it."""

    limit: int = LIMIT
    window_s: float = WINDOW_S
    times: deque[float] = field(default_factory=deque)

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        self.times.append(now)
        while now - self.times[0] > self.window_s:
            self.times.popleft()
        if len(self.times) >= self.limit:
            return None
        return _BACKOFF_S[min(len(self.times), len(_BACKOFF_S)) - 1]


def last_line(log: Path) -> str:
    """The last line of a log file, or the message in it when it is one of our JSON lines; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    if not lines:
        return ""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(lines[-1])["message"])
    return lines[-1].strip()


class _Child:
    """A running member; `done` has its exit status once it is reaped."""

    def __init__(self, member: Member) -> None:
        self.member = member
        launcher = os.getpid()

        def die_with_launcher() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:  # it died between fork and prctl
                os._exit(1)

        with contextlib.nullcontext() if member.log is None else member.log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which stops the children in order.
            self._process = subprocess.Popen(
                member.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_launcher,  # no thread forks here; there is no other way to set it
            )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Not reaped yet, so the number of its group cannot be another's.
        self.signal(signal.SIGKILL)
        self.done.set_result(self._process.wait())

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group; nothing once it is gone."""
        if not self.done.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Supervisor:
    """Keeps units alive until they are stopped. `changed` is called on every start and death.

    `restarts` counts by unit, `causes` has how its newest death came; `ending` is set by the owner when members may end
    by themselves; `gave_up` gets the GaveUp of the first unit that cannot be kept alive.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.restarts: Counter[str] = Counter()
        self.causes: dict[str, str] = {}
        self.ending = asyncio.Event()
        self.gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = changed
        self._children: dict[str, dict[str, _Child]] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping: dict[str, _Child] = {}

    def keep(self, unit: Unit) -> asyncio.Task[None]:
        """Starts a unit and keeps it alive until the task is done: it is over, or given up, and `gave_up` has the GaveUp."""
        keeper = self._keepers[unit.name] = asyncio.create_task(self._keep(unit), name=f"keep {unit.name}")
        return keeper

    def units(self) -> list[str]:
        """Names of the units that are kept."""
        return list(self._keepers)

    def restarted(self, name: str, cause: str) -> None:
        """Counts a restart, also of a unit that others keep alive."""
        self.restarts[name] += 1
        self.causes[name] = cause
        self._changed()

    def give_up(self, error: GaveUp) -> None:
        """Tells the owner of the first unit that cannot be kept alive."""
        if not self.gave_up.done():
            self.gave_up.set_exception(error)

    async def ended_well(self) -> None:
        """What comes of a unit whose process ended well: returns when it was too early; else waits to be cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), _QUIET_EXIT_S)
            await asyncio.Event().wait()

    def restart(self, name: str) -> None:
        """Asks a unit's members to end; it is kept alive, so it starts anew."""
        for child in self._children.get(name, {}).values():
            child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every member, now; for a `stop` that is under way and shall not wait."""
        for children in (*self._children.values(), self._stopping):
            for child in children.values():
                child.signal(signal.SIGKILL)

    def pids(self) -> dict[str, int]:
        """The process of every running member, by its name."""
        return {
            name: child.pid
            for children in self._children.values()
            for name, child in children.items()
            if not child.done.done()
        }

    async def stop(self, names: Sequence[str] | None = None, grace_s: float = 10.0) -> None:
        """Stops the named units, or all; see the module's promises."""
        chosen = list(self._keepers) if names is None else [n for n in names if n in self._keepers]
        for name in chosen:
            self._keepers.pop(name).cancel()
        children = {n: child for name in chosen for n, child in self._children.pop(name, {}).items()}
        self._stopping.update(children)
        await _end(list(children.values()), grace_s)
        self._changed()

    async def _keep(self, unit: Unit) -> None:
        deaths = Deaths()
        try:
            while True:
                children = self._children[unit.name] = {}
                for member in unit.members:
                    children[member.name] = _Child(member)
                self._changed()
                ended = await self._first_death(list(children.values()), unit.ends)
                if ended is None:
                    return
                await _end([c for c in children.values() if c is not ended], 0.0)
                # One that ended well was told to, by somebody, or has no more to do: not a reason to give up.
                delay = deaths.died(time.monotonic()) if ended.done.result() else 0.0
                if delay is None:
                    raise GaveUp(_obituary(unit, ended, deaths))
                self.restarted(unit.name, f"{ended.member.name} ended with {_how(ended)}")
                await asyncio.sleep(delay)
        except Exception as error:
            # Whatever it is: the owner is to hear that nobody keeps the unit any more.
            self.give_up(
                error
                if isinstance(error, GaveUp)
                else GaveUp(f"{unit.name}: {error or type(error).__name__}")
            )

    async def _first_death(self, children: Sequence[_Child], ends: bool) -> _Child | None:
        """The first child to end badly, or to end at all when the run is not over soon after: `ending` would say so. None when
        all have ended well, if that `ends` them."""
        pending = {c.done for c in children}
        while pending:
            timeout = None if len(pending) == len(children) else _QUIET_EXIT_S
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            bad = next((c for c in children if c.done in done and c.done.result()), None)
            if bad is not None:
                return bad
            if not done:
                break
        if ends and not pending:
            return None
        await self.ended_well()
        return next(c for c in children if c.done.done())


async def _end(children: Sequence[_Child], grace_s: float) -> None:
    """SIGTERM, at most `grace_s`, SIGKILL; returns when all are reaped, also when it is cancelled."""
    alive = [child for child in children if not child.done.done()]
    if not alive:
        return
    try:
        if grace_s > 0:
            for child in alive:
                child.signal(signal.SIGTERM)
            await asyncio.wait([child.done for child in alive], timeout=grace_s)
    finally:
        for child in alive:
            child.signal(signal.SIGKILL)
        await asyncio.wait([child.done for child in alive])


def _how(child: _Child) -> str:
    code = child.done.result()
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _obituary(unit: Unit, ended: _Child, deaths: Deaths) -> str:
    log = ended.member.log
    told = f"{unit.name} died {len(deaths.times)} times within {deaths.window_s:.0f} s; {ended.member.name} ended with {_how(ended)}"
    if log is None:
        return told
    said = last_line(log)
    return f"{told}{': ' if said else ''}{said}; see {log}"
