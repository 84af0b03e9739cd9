"""The process around a service: configuration, log, store, signals, measures and one log-line format.

A service that is told to stop ends within its own drain time and `_STOP_S`; told a second time, or when the run is over, it does
not drain.

A service is `services/<module>.py` with `async def serve(ctx: Context) -> None`. This module knows no service.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson

from pipeline.hosts import tenant
from pipeline.hosts.health import Health
from pipeline.hosts.metrics import MeasuredPool, Measures, serving
from pipeline.log import Log, end_tasks
from pipeline.store import ObjectStore
from schemas.config import RunConfig

SERVICES: dict[str, str] = {
    "dispatcher": "services.dispatcher",
    "agent-loop": "services.agent_loop",
    "harness": "services.harness",
    "grader": "services.grader",
    "teacher": "services.teacher",
    "sampler": "services.sampler",
    "hook": "services.hook",
    "packer": "services.packer",
    "trainer": "services.trainer",
    "engine": "services.engine",
    "collector": "services.collector",
}
"""Deployable services: their names on the command line and their modules, imported only in their own process."""

_CONNECT_S = 30.0
_STOP_S = 5.0
"""Less than whoever stops a process waits until he kills it."""


@dataclass(frozen=True)
class Context:
    """What a service is given. `stop` is set by SIGTERM, SIGINT, or the end of the run; `hurry` by a second signal or the
    end of the run, after which a host does not wait for its tenants. `drain_s` is how long it else may. The service says
    `health.ready()` when it does its work."""

    config: RunConfig
    name: str
    log: Log
    store: ObjectStore
    stop: asyncio.Event
    logger: logging.Logger
    index: int = 0
    pool: str = ""
    drain_s: float = 0.0
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    measures: Measures = field(default_factory=Measures)
    health: Health = field(default_factory=Health)

    @property
    def run(self) -> str:
        return self.config.run


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, service, tenant, message, and whatever ids the record carries in `extra`."""

    def __init__(self, service: str, run: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "run": run}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._fixed,
            "message": record.getMessage(),
        }
        at_work = tenant.current()
        if at_work is not None:
            line["tenant"] = at_work.name
        for key in ("tenant", "sample", "sequence", "step"):
            if key in record.__dict__:
                line[key] = record.__dict__[key]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(service: str, run: str) -> logging.Logger:
    """Sends every logger of ours to stderr in the one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service, run))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logger = logging.getLogger("packtrain")
    logger.setLevel(logging.INFO)
    return logger


async def run_service(
    serve: Callable[[Context], Awaitable[None]],
    config: RunConfig,
    name: str,
    index: int = 0,
    pool: str = "",
    stop: asyncio.Event | None = None,
) -> None:
    """Runs one service until it ends, is told to stop, or the run stops. `stop`: set instead of by signals.

    Raises BrokerUnavailable or StoreUnavailable when it cannot start, BadBind on an address for metrics that is none.
    """
    logger = log_to_stderr(name, config.run)
    loop = asyncio.get_running_loop()
    hurry = asyncio.Event()
    if stop is None:
        stop = _told(loop, hurry)
    measures = Measures()
    loop.set_default_executor(MeasuredPool(measures.waits))
    drain_s = drain_of(config, name, pool)
    log = await _connected(config, name, stop)
    if log is None:
        return
    ending = asyncio.create_task(_until_run_stops(log, stop, hurry))
    try:
        store = ObjectStore.open(config.store)
        log.waits = store.waits = measures.waits
        store.requests = measures.requests
        context = Context(config, name, log, store, stop, logger, index, pool, drain_s, hurry, measures)
        async with serving(config.metrics.bind, name, measures):
            logger.info("started%s", f", metrics at {measures.address}" if measures.address else "")
            await _served(asyncio.ensure_future(serve(context)), ending, stop, hurry, drain_s)
        logger.info("stopped")
    finally:
        await end_tasks([ending])
        await log.close()


def _told(loop: asyncio.AbstractEventLoop, hurry: asyncio.Event) -> asyncio.Event:
    """Set by the first signal to stop; `hurry` by those after it."""
    stop = asyncio.Event()

    def told() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    return stop


def drain_of(config: RunConfig, name: str, pool: str) -> float:
    """Seconds that a host which is told to stop lets its tenants end in; 0 for what is no host."""
    for each in config.pools:
        if pool and each.name == pool:
            return each.drain_s
    return config.agent_loop.drain_s if name.startswith("agent-loop") else 0.0


async def _served(
    served: asyncio.Future[None],
    ending: asyncio.Task[None],
    stop: asyncio.Event,
    hurry: asyncio.Event,
    drain_s: float,
) -> None:
    """Until the service has ended. Once it need not drain it has `_STOP_S`: it may wait for a broker that is away."""
    stopping, hurrying = asyncio.create_task(stop.wait()), asyncio.create_task(hurry.wait())
    try:
        done, _ = await asyncio.wait({served, ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if served not in done:
            if ending in done:
                # Without it the service would not hear that the run has stopped.
                ending.result()
            if drain_s:
                await asyncio.wait({served, hurrying}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({served}, timeout=_STOP_S)
        if served.done():
            served.result()
    finally:
        await end_tasks((served, stopping, hurrying))


async def _connected(config: RunConfig, name: str, stop: asyncio.Event) -> Log | None:
    """The run's log; None when the service is told to stop while the broker is not there yet."""
    connecting = asyncio.create_task(Log.connect(config.broker, config.run, name, timeout_s=_CONNECT_S))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        await end_tasks([connecting])
    await end_tasks([stopping])
    return None if connecting.cancelled() else connecting.result()


async def _until_run_stops(log: Log, stop: asyncio.Event, hurry: asyncio.Event) -> None:
    async for _ in log.subscribe("run.stopped"):
        hurry.set()
        stop.set()
        return
