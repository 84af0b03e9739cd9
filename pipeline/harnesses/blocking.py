"""Where an environment blocks: on a thread that nobody has to wait for.

Promises:
- a host has at most so many threads as its `Threads` says, and whoever finds them all taken waits his turn, in order;
- a call that never returns costs its own trial, and one thread of the host's: its caller may be cancelled all the same, and the
  process ends under it (a pool's threads are joined at the end, a daemon is not);
- while nobody gets a thread, a log line says since when, and what the oldest call is.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from pipeline.hosts import tenant
from pipeline.hosts.waits import Waits

P = ParamSpec("P")
T = TypeVar("T")
_LOG = logging.getLogger("packtrain.host")
TELL_S = 10.0


class Threads:
    """The threads of one host, at most `limit` at a time; what calls wait for them counts as `threads` in `waits`."""

    def __init__(self, limit: int, waits: Waits, tell_s: float = TELL_S) -> None:
        self.limit = limit
        self._waits = waits
        self._tell_s = tell_s
        self._free = asyncio.Semaphore(limit)
        self._calls: dict[object, tuple[float, str]] = {}
        self._told = 0.0
        # Kept: to start a thread, the event loop waits for it, which is a quarter of a second where all of them compute.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = 0

    @property
    def busy(self) -> int:
        return len(self._calls)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, as of `on_thread`."""
        name = f"{_name(call)} of {_who()}"
        await self._turn()
        key = object()
        self._calls[key] = (time.monotonic(), name)
        loop = asyncio.get_running_loop()

        def over() -> None:
            self._calls.pop(key, None)
            self._free.release()

        def ended() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over)

        # Whoever has a turn has a thread: one that waits for a job, or a new one.
        if self._started < len(self._calls):
            self._started += 1
            _daemon(self._work)
        result, job = _job(call, ended)
        self._jobs.put(job)
        return await result

    def close(self) -> None:
        """Ends the threads that are idle, and the others when their calls return."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    async def _turn(self) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        with self._waits.waiting("threads"):
            waiting = asyncio.ensure_future(self._free.acquire())
            try:
                while not (await asyncio.wait([waiting], timeout=self._tell_s))[0]:
                    self._tell()
            except asyncio.CancelledError:
                # Cancelled when it had its turn already, it would keep a thread from all others for ever.
                if not waiting.cancel():
                    self._free.release()
                raise

    def _tell(self) -> None:
        now = time.monotonic()
        # There is none for a moment where whoever has the turn has not begun yet.
        if self._calls and now - self._told >= self._tell_s:
            self._told = now
            since, name = min(self._calls.values())
            _LOG.warning(
                "all %d threads for blocking calls are taken, the oldest for %.0f s by %s; raise the pool's threads, or give the "
                "call a time limit", self.limit, now - since, name,
            )  # fmt: skip


THREADS: ContextVar[Threads | None] = ContextVar("threads", default=None)
"""Of the host that the caller is a tenant of; None: an adapter by hand, without a limit."""


async def on_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`; adapters of harnesses use it for whatever may block."""
    context = contextvars.copy_context()

    def within() -> T:
        return context.run(call, *args, **kwargs)

    within.__qualname__ = getattr(call, "__qualname__", repr(call))
    threads = THREADS.get()
    if threads is not None:
        return await threads.run(within)
    result, job = _job(within, lambda: None)
    _daemon(job)
    return await result


def _daemon(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="environment", daemon=True).start()


def _job(call: Callable[[], T], ended: Callable[[], None]) -> tuple[asyncio.Future[T], Callable[[], None]]:
    """What a thread is to run, and what becomes of it."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            found = call()
        except StopIteration as error:
            # An asyncio future cannot hold it: whoever waits would wait for ever.
            tell = functools.partial(result.set_exception, RuntimeError(f"the call raised {error!r}"))
        except BaseException as error:
            tell = functools.partial(result.set_exception, error)
        else:
            tell = functools.partial(result.set_result, found)
        # First: who is told may call again at once, and shall find this thread free.
        ended()
        tell()

    # Running, as a pool would mark it: a caller that is cancelled does not take the result's place away.
    result.set_running_or_notify_cancel()
    return asyncio.wrap_future(result), run


def _name(call: Callable[[], object]) -> str:
    return getattr(call, "__qualname__", repr(call))


def _who() -> str:
    at_work = tenant.current()
    return at_work.name if at_work is not None else "no tenant"
