"""`packtrain runs begin`: what a launcher does before it starts services, for services that others start.

Promises:
- done again, done by two at once, or gone on with after it was killed half-way, it comes to the same run;
- a broker and a store that are only starting are waited for; one that refuses us is told at once;
- a run that was begun with other decisions, or whose place in the store is another log's, is refused unchanged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config import ConfigError, Override, load, place
from pipeline.log import BrokerUnavailable, Log
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import ALL, RunStarted, RunStopped, StepTrained
from services.cli.begin import begin, check_decisions
from services.cli.check import Place, plain_faults
from services.cli.claim import open_place
from services.cli.embedded import LaunchError
from services.cli.live import counted
from services.cli.reach import LAUNCHER

_AGAIN_S = 0.2
Say = Callable[[str], None]


def load_deployed(file: Path, overrides: Sequence[Override] = ()) -> RunConfig:
    """The configuration of a run whose services others start: checked as far as it tells by itself, since what it names is on
    other machines. Raises ConfigError with every fault."""
    config = load(file, overrides)
    found = [*_unnamed(config), *plain_faults(config)]
    if found:
        raise ConfigError([f"{place(file, path, overrides)}: {what}" for path, what in found])
    return config


def _unnamed(config: RunConfig) -> list[tuple[Place, str]]:
    remedies = {
        "broker": "nats://host:port or tls://host:port",
        "store": "s3://bucket/prefix, or file:///path where all services are on one machine",
    }
    return [
        (
            (section, "url"),
            f"{section}.url is empty, and a deployment has no launcher to start one: name {like}",
        )
        for section, like in remedies.items()
        if not getattr(config, section).url
    ]


def begin_run(config: RunConfig, groups_from: str, wait_s: float, say: Say) -> None:
    """Begins the run, or finds it begun or over, and says which. Raises LaunchError, BrokerUnavailable, StoreError, LogError."""
    asyncio.run(_begin_run(config, groups_from, wait_s, say))


async def _begin_run(config: RunConfig, groups_from: str, wait_s: float, say: Say) -> None:
    log = await Log.connect(config.broker, config.run, LAUNCHER, wait_s, user=LAUNCHER)
    try:
        before = await _started(log, wait_s)
        if before is not None and isinstance(before.fact, RunStarted):
            check_decisions(config, before.fact)
        try:
            store = await open_place(config, before is not None, wait_s)
        except LaunchError:
            # Who claims a place has published its run.started before: another of us may just have done both.
            if before is not None or await _started(log, wait_s) is None:
                raise
            store = await open_place(config, True, wait_s)
        await begin(log, config, store, True, groups_from, say)
        say(await _state(log, config, before is not None))
    finally:
        await log.close()


async def _started(log: Log, wait_s: float) -> Event | None:
    """The run's first fact, if it is there; waits for a broker whose JetStream is only starting."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await log.last(RunStarted.type, ALL, log.run) if await log.exists() else None
        except BrokerUnavailable:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_AGAIN_S)


async def _state(log: Log, config: RunConfig, known: bool) -> str:
    stopped = await log.last(RunStopped.type, ALL, log.run)
    if stopped is not None and isinstance(stopped.fact, RunStopped):
        steps = counted(stopped.fact.steps, "step")
        return f"run {log.run} is over: {stopped.fact.reason} after {steps}"
    if not known:
        return f"run {log.run} has begun"
    trained = await log.latest(StepTrained.type)
    steps = trained.fact.step if trained is not None and isinstance(trained.fact, StepTrained) else 0
    return f"run {log.run} goes on: {steps} of {counted(config.steps, 'step')} {'is' if steps == 1 else 'are'} trained"
