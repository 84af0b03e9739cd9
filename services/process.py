"""The process around a service: configuration, log, store, signals, measures and one log-line format.

Promises:
- parts of a deployment start in any order: a service waits for its broker, and for its run to begin, for as long as that
  takes, and says in the log and at `/readyz` what it waits for; what waiting does not help (credentials that are refused, a
  configuration that cannot be) ends it at once;
- it is ready from when it says so until it is told to stop, while it is connected to the broker. The object store is no part of
  that: services wait for one that is away where they use it, and whoever counts its errors finds them at `/metrics`;
- told to stop it ends within its own drain time and `_STOP_S`, and at once while it waits for its broker or its run; told a
  second time, or when the run is over, it does not drain. A run that is over already ends it as it starts (all but `LASTING`);
- all that it says is on stderr, one JSON object a line (`JsonLines`).

A service is `services/<module>.py` with `async def serve(ctx: Context) -> None`. This module knows no service.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import orjson

from pipeline.hosts import tenant
from pipeline.hosts.health import Health
from pipeline.hosts.metrics import MeasuredPool, Measures, serving
from pipeline.log import BrokerUnavailable, Log, end_tasks
from pipeline.store import ObjectStore
from schemas.config import RunConfig
from schemas.facts import RunStopped

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
    "dashboard": "services.dashboard",
}
"""Deployable services: their names on the command line and their modules, imported only in their own process."""

LASTING = ("dashboard",)
"""Services that go on when their run is over, so that what it came to can still be read."""
_LOOK_S = 0.5
"""Between two looks for a run that has not begun."""
_STOP_S = 5.0
"""Less than whoever stops a process waits until he kills it."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Context:
    """What a service is given. `stop` is set by SIGTERM, SIGINT, or the end of the run; `hurry` by a second signal or the
    end of the run, after which a host does not wait for its tenants. `drain_s` is how long it else may. `index`: which rank or
    packer this is; None: it finds its own place. The service says `health.ready()` when it does its work."""

    config: RunConfig
    name: str
    log: Log
    store: ObjectStore
    stop: asyncio.Event
    logger: logging.Logger
    index: int | None = 0
    pool: str = ""
    drain_s: float = 0.0
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    measures: Measures = field(default_factory=Measures)
    health: Health = field(default_factory=Health)

    @property
    def run(self) -> str:
        return self.config.run


class JsonLines(logging.Formatter):
    """One JSON object a line, with the keys

    - `time` (RFC 3339, UTC, milliseconds), `level` (info, warning, error), `service` (the process's name, as `packer-0`),
      `run`, `message`: always;
    - `sample`, `sequence`, `attempt`, `step`: of the fact that the process works on as it says this, those that it has
      (`pipeline.hosts.tenant.ids`), or as the record has them in `extra`;
    - `tenant`: in a host, the sequence or attempt whose code this is;
    - `error`: a traceback, where there is one.
    """

    def __init__(self, service: str, run: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "run": run}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._fixed,
            "message": record.getMessage(),
            **tenant.ids(),
        }
        at_work = tenant.current()
        if at_work is not None:
            line["tenant"] = at_work.name
        for key in ("tenant", *tenant.ID_FIELDS):
            if key in record.__dict__:
                line[key] = record.__dict__[key]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:
            # A lone surrogate, as of a file's name or an agent's JSON: it is no text, and the line is to be read all the same.
            return orjson.dumps(
                {key: str(value).encode(errors="backslashreplace").decode() for key, value in line.items()}
            ).decode()


def log_to_stderr(service: str, run: str) -> logging.Logger:
    """Sends every logger to stderr in the one format: ours from info on, those of packages from warning on."""
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
    index: int | None = 0,
    pool: str = "",
    stop: asyncio.Event | None = None,
) -> None:
    """Runs one service until it ends, is told to stop, or the run stops. `stop`: set instead of by signals.

    Raises BrokerUnavailable when the broker refuses it, BadStore or StoreUnavailable on a store that cannot be opened, BadBind on
    an address for metrics that is none, and what the service raises.
    """
    logger = log_to_stderr(name, config.run)
    loop = asyncio.get_running_loop()
    hurry = asyncio.Event()
    if stop is None:
        stop = _told(loop, hurry)
    measures = Measures()
    health = Health(checks=[lambda: "stopping" if stop.is_set() else ""])
    loop.set_default_executor(MeasuredPool(measures.waits))
    drain_s = drain_of(config, name, pool)
    store = ObjectStore.open(config.store)
    async with serving(config.metrics.bind, name, measures, health):
        log = await _unless(stop, _connected(config, name, health))
        if log is None:
            return
        try:
            lasts = kind_of(name) in LASTING
            if not await _unless(stop, _goes_on(log, health, logger, lasts)):
                return
            log.waits = store.waits = measures.waits
            store.requests = measures.requests
            context = Context(
                config, name, log, store, stop, logger, index, pool, drain_s, hurry, measures, health
            )
            logger.info("started%s", f", metrics at {measures.address}" if measures.address else "")
            over = asyncio.Event().wait() if lasts else _until_run_stops(log, stop, hurry)
            ending = asyncio.ensure_future(over)
            try:
                await _served(asyncio.ensure_future(serve(context)), ending, stop, hurry, drain_s)
            finally:
                await end_tasks([ending])
            logger.info("stopped")
        finally:
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
    ending: asyncio.Future[Any],
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


async def _unless(stop: asyncio.Event, wanted: Coroutine[Any, Any, _Result]) -> _Result | None:
    """What it gives; None when the service is told to stop before."""
    waiting, stopping = asyncio.create_task(wanted), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        await end_tasks([waiting, stopping])


def kind_of(name: str) -> str:
    """The service of a process's name, as which the broker knows it; empty for none of `SERVICES`."""
    return next((kind for kind in SERVICES if name == kind or name.startswith(f"{kind}-")), "")


async def _connected(config: RunConfig, name: str, health: Health) -> Log:
    """The run's log, however long its broker is not there. Raises BrokerUnavailable when it refuses us."""
    health.not_ready(f"waiting for broker {config.broker.url}")
    log = await Log.connect(config.broker, config.run, name, math.inf, kind_of(name))
    health.checks.append(lambda: "" if log.connected else f"no connection to broker {config.broker.url}")
    return log


async def _goes_on(log: Log, health: Health, logger: logging.Logger, lasts: bool) -> bool:
    """Waits for the run to begin; whether the service has something to do: it lasts, or the run is not over yet."""
    begun, told = False, ""
    while not begun:
        try:
            begun = await log.exists()
            reason = f"run {log.run} to begin: packtrain runs begin"
        except BrokerUnavailable as error:
            reason = str(error)
        if not begun:
            if reason != told:
                logger.info("waiting for %s", reason)
                health.not_ready(f"waiting for {reason}")
                told = reason
            await asyncio.sleep(_LOOK_S)
    health.not_ready("starting")
    if not lasts and await log.latest(RunStopped.type) is not None:
        logger.info("run %s is over: there is nothing to do", log.run)
        return False
    return True


async def _until_run_stops(log: Log, stop: asyncio.Event, hurry: asyncio.Event) -> None:
    async for _ in log.subscribe("run.stopped"):
        hurry.set()
        stop.set()
        return
