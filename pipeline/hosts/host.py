"""The host class: many tenants on one event loop, taken from a work consumer. Every rollout host is one of these.

Promises, beside those of `pipeline.log.serving.serve_work`, which it wraps:
- it holds at most `capacity` tenants and pulls only into free slots; of the hosts that wait the one with the smaller part of its
  slots taken is given the next tenant first;
- told to stop it takes no more. Tenants may end within `drain_s`; what has not ended then, or when `hurry` is set, is handed
  back;
- whatever a tenant's code raises, in its own task or in one that it started, costs its own delivery and nobody else's;
- a tenant that blocks the loop is named in the log with its stack; its log lines carry its name (`pipeline.hosts.tenant`);
- what it waits for is measured, and reported every other second (`pipeline.hosts.report`), that it drains or has ended at once;
  the report costs no tenant anything, whatever the broker does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from nats.errors import Error as NatsError

from pipeline.harnesses.blocking import THREADS, Threads
from pipeline.hosts import tenant, usage
from pipeline.hosts.metrics import Measures
from pipeline.hosts.report import EVERY_S, HostReport, Reporter, State
from pipeline.hosts.tenant import Tenant
from pipeline.hosts.waits import OF_TENANT, SLOTS, Recent, Window
from pipeline.hosts.watchdog import LIMIT_S, Watchdog
from pipeline.log import Delivery, Log, Work, end_tasks, serve_work
from pipeline.log.serving import LastWord

FILES = 4
"""Open files of a tenant, about: its connections, and the sockets and pipes of its workspace."""
_PENDING_S = 1.0
_LAST_S = 3.0
"""For the last report, which is what is known of the host from then on."""
_LOG = logging.getLogger("packtrain.host")


@dataclass(frozen=True, slots=True)
class Place:
    """Which host this is: its name in logs and reports, its service, and its pool, if it has one."""

    name: str
    service: str
    pool: str = ""


class Host:
    """See the module. `threads`: blocking calls at once, 0 for no limit; `limit_s`: how long a tenant may block the loop."""

    def __init__(
        self,
        log: Log,
        place: Place,
        capacity: int,
        measures: Measures,
        *,
        threads: int = 0,
        limit_s: float = LIMIT_S,
        every_s: float = EVERY_S,
        logger: logging.Logger = _LOG,
    ) -> None:
        self.place = place
        self._logger = logger
        self.capacity = capacity
        self.measures = measures
        self.watchdog = Watchdog(limit_s, logger)
        self.threads = Threads(threads, measures.waits) if threads else None
        self.state: State = "serving"
        self.done = 0
        self.pending = 0
        self._reporter = Reporter(log)
        self._every_s = every_s
        self._began = self._changed = time.monotonic()
        self._running: dict[int, tuple[float, Tenant]] = {}
        self._lived_s = self._full_s = 0.0
        self._recent = Recent()
        self._window = Window(0.0, 0.0, {})
        self._seen = (0.0, usage.memory_stalled_s(), 0.0)
        self._cpu = (self._began, usage.cpu_s(), 0.0)

    @property
    def tenants(self) -> int:
        return len(self._running)

    async def serve(
        self,
        work: Work,
        handler: Callable[[Delivery], Awaitable[None]],
        stop: asyncio.Event,
        last_word: LastWord | None = None,
        *,
        drain_s: float = 0.0,
        hurry: asyncio.Event | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Until `stop`, and then the end of the drain. Raises what `serve_work` does.

        over: called once no tenant is left, before anything that may take long.
        """
        tenant.install(asyncio.get_running_loop())
        THREADS.set(self.threads)
        OF_TENANT.set(self.measures.waits)
        if (files := usage.allow_files()) < (wanted := FILES * self.capacity):
            self._logger.warning(
                "%d tenants may need %d open files, and the process may have %d: raise the hard limit (ulimit -Hn), or give the "
                "host fewer tenants", self.capacity, wanted, files,
            )  # fmt: skip
        self.watchdog.start()
        self.measures.hosts.append(self.status)
        tasks = [asyncio.create_task(self._report(work)), asyncio.create_task(self._note_stop(stop))]

        async def handled(delivery: Delivery) -> None:
            await self._tenant(delivery, handler)

        try:
            await serve_work(work, self.capacity, handled, stop, last_word, drain_s=drain_s, hurry=hurry)
        finally:
            over()
            await end_tasks(tasks)
            self.measures.hosts.remove(self.status)
            self.watchdog.stop()
            if self.threads is not None:
                self.threads.close()
            self.state = "stopped"
            await self._reporter.put(self.status(), _LAST_S)

    async def _tenant(self, delivery: Delivery, handler: Callable[[Delivery], Awaitable[None]]) -> None:
        fact = delivery.event.fact
        who = Tenant(fact.id(), getattr(fact, "source", fact.scope()))
        tenant.enter(who)
        self._count()
        self._running[id(delivery)] = (time.monotonic(), who)
        try:
            await handler(delivery)
        finally:
            self._count()
            del self._running[id(delivery)]
            self.done += 1

    def _count(self) -> None:
        """Adds up what has been since the number of tenants last changed."""
        now = time.monotonic()
        self._lived_s += self.tenants * (now - self._changed)
        if self.tenants >= self.capacity:
            self._full_s += now - self._changed
        self._changed = now

    async def _note_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.state = "draining"
        await self._reporter.put(self.status())

    async def _report(self, work: Work) -> None:
        while True:
            await self._measure(work)
            await self._reporter.put(self.status())
            await asyncio.sleep(self._every_s)

    async def _measure(self, work: Work) -> None:
        """Turns what was measured since the last time into waits."""
        try:
            async with asyncio.timeout(_PENDING_S):
                self.pending = await work.pending()
        except (NatsError, OSError, TimeoutError):
            pass  # the broker is away, and pending what it was
        self._count()
        waits, (late, stalled, full) = self.measures.waits, self._seen
        self._seen = (self.watchdog.late_s, usage.memory_stalled_s(), self._full_s)
        waits.add("cpu", self._seen[0] - late)
        waits.add("memory", self._seen[1] - stalled)
        if self.pending:
            waits.add(SLOTS, self._full_s - full)
        now, cpu = time.monotonic(), usage.cpu_s()
        then, before, _ = self._cpu
        self._cpu = (now, cpu, (cpu - before) / max(now - then, 1e-3))
        self._window = self._recent.mark(now, self._lived_s, waits.totals(now))

    def status(self) -> HostReport:
        """As of now; waits and CPU as of the last report."""
        now = time.monotonic()
        oldest = min(self._running.values(), key=lambda r: r[0], default=None)
        return HostReport(
            host=self.place.name,
            service=self.place.service,
            pool=self.place.pool,
            machine=socket.gethostname(),
            pid=os.getpid(),
            time=datetime.now(UTC),
            up_s=now - self._began,
            state=self.state,
            tenants=self.tenants,
            capacity=self.capacity,
            done=self.done,
            pending=self.pending,
            oldest=oldest[1].name if oldest else "",
            oldest_s=now - oldest[0] if oldest else 0.0,
            lag_p50_s=self.watchdog.lag_s(0.5),
            lag_p99_s=self.watchdog.lag_s(0.99),
            blocks=dict(self.watchdog.blocks),
            threads=self.threads.limit if self.threads else 0,
            busy_threads=self.threads.busy if self.threads else 0,
            cpu=self._cpu[2],
            rss_bytes=usage.rss_bytes(),
            metrics=self.measures.address,
            wall_s=self._window.wall_s,
            tenant_s=self._window.tenant_s,
            waits=dict(self._window.seconds),
        )
