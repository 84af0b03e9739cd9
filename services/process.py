"""The process around a service: configuration, log, store, signals and one log-line format.

A service is `services/<module>.py` with `async def serve(ctx: Context) -> None`. This module knows no service.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from pipeline.log import Log, end_tasks
from pipeline.store import ObjectStore
from schemas.config import RunConfig

SERVICES: dict[str, str] = {
    "dispatcher": "services.dispatcher",
    "agent-loop": "services.agent_loop",
    "harness": "services.harness",
    "grader": "services.grader",
    "sampler": "services.sampler",
    "packer": "services.packer",
    "trainer": "services.trainer",
    "engine": "services.engine",
}
"""Deployable services: their names on the command line and their modules, imported only in their own process."""

_CONNECT_S = 30.0
_STOP_S = 5.0
"""Less than whoever stops a process waits until he kills it."""


@dataclass(frozen=True)
class Context:
    """What a service is given. `stop` is set by SIGTERM, SIGINT, or the end of the run."""

    config: RunConfig
    name: str
    log: Log
    store: ObjectStore
    stop: asyncio.Event
    logger: logging.Logger
    index: int = 0
    pool: str = ""

    @property
    def run(self) -> str:
        return self.config.run


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, service, message, and whatever ids the record carries in `extra`."""

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
        for key in ("sample", "sequence", "step"):
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
    serve: Callable[[Context], Awaitable[None]], config: RunConfig, name: str, index: int = 0, pool: str = ""
) -> None:
    """Runs one service until it ends, is told to stop, or the run stops.

    Raises BrokerUnavailable or StoreUnavailable when it cannot start.
    """
    logger = log_to_stderr(name, config.run)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = await _connected(config, name, stop)
    if log is None:
        return
    ending = asyncio.create_task(_until_run_stops(log, stop))
    try:
        store = ObjectStore.open(config.store)
        logger.info("started")
        serving = asyncio.ensure_future(serve(Context(config, name, log, store, stop, logger, index, pool)))
        await _served(serving, ending, stop)
        logger.info("stopped")
    finally:
        await end_tasks([ending])
        await log.close()


async def _served(serving: asyncio.Future[None], ending: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Until the service has ended. Once it is told to stop it has `_STOP_S`: it may wait for a broker that is away."""
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({serving, ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving not in done:
            if ending in done:
                # Without it the service would not hear that the run has stopped.
                ending.result()
            await asyncio.wait({serving}, timeout=_STOP_S)
        if serving.done():
            serving.result()
    finally:
        await end_tasks((serving, stopping))


async def _connected(config: RunConfig, name: str, stop: asyncio.Event) -> Log | None:
    """The run's log; None when the service is told to stop while the broker is not there yet."""
    connecting = asyncio.create_task(Log.connect(config.broker, config.run, name, timeout_s=_CONNECT_S))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        await end_tasks([connecting])
    await end_tasks([stopping])
    return None if connecting.cancelled() else connecting.result()


async def _until_run_stops(log: Log, stop: asyncio.Event) -> None:
    async for _ in log.subscribe("run.stopped"):
        stop.set()
        return
