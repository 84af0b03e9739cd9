"""`packtrain runs stop` and `resume`: ask a launcher to end, end a run for good, or go on with one.

Promises:
- `stop` leaves the run unfinished, `cancel` writes its last fact unless it has one; both return when the launcher here,
  if there is one, is gone;
- `resume` goes on with exactly that run, by the configuration that it was started with, or is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipeline.config import Override
from pipeline.log import Log, LogError
from schemas.config import Broker, RunConfig
from schemas.facts import ALL, RunStopped, StepTrained
from services.cli import launch, launcher
from services.cli.check import load_checked
from services.cli.embedded import LaunchError, is_embedded
from services.cli.live import counted
from services.cli.reach import (
    GIVEN,
    IMPORTING,
    LAUNCHER,
    RECORD,
    broker_of,
    embedded_broker,
    home_of,
    inside,
    read_record,
)
from services.cli.runs import longest_drain

STOP_S = 60.0
"""What a launcher may take to stop, beside its hosts' drain."""
_CONNECT_S = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a run is: its broker, and its record in the launcher's directory if there is one."""

    broker: Broker
    record: RunConfig | None


def record_of(directory: Path, run: str) -> RunConfig | None:
    """The run's record, also that of an import that is not complete."""
    home = home_of(directory, run)
    for name in (RECORD, IMPORTING):
        if (home / name).is_file():
            return read_record(home / name)
    return None


@asynccontextmanager
async def place_of(directory: Path, run: str, given: Broker | None) -> AsyncIterator[Place]:
    """Where the run is: in the given broker, else where its record says, else in the directory's own broker."""
    record = record_of(directory, run)
    if given is not None:
        known = record is not None and not is_embedded(record) and record.broker.url == given.url
        yield Place(given, record if known else None)
    elif record is not None:
        async with broker_of(record) as broker:
            yield Place(broker, record)
    else:
        if not (directory / "nats").is_dir():
            raise LaunchError(
                f"{directory} has no run {run!r}; name its directory with --directory, or its broker with --nats"
            )
        async with embedded_broker(directory) as broker:
            yield Place(broker, None)


@asynccontextmanager
async def log_of(place: Place, run: str) -> AsyncIterator[Log]:
    """A connection to the log of a run; LogError in it is an error of the command."""
    log = await Log.connect(place.broker, run, "runs", _CONNECT_S, LAUNCHER)
    try:
        yield log
    except LogError as error:
        raise LaunchError(str(error)) from error
    finally:
        await log.close()


async def ending(log: Log) -> str | None:
    """Why the run is over: completed or cancelled; None while it is not."""
    stopped = await log.last(RunStopped.type, ALL, log.run)
    return stopped.fact.reason if stopped is not None and isinstance(stopped.fact, RunStopped) else None


def stop(directory: Path, run: str, say: Say) -> None:
    """Stops the launcher of the run. Raises LaunchError when none is here, or it does not stop."""
    home = home_of(directory, run)
    running = launcher.find_launcher(directory)
    if running is None or running.run != run:
        here = (
            f"the launcher in {directory} runs {running.run}"
            if running
            else f"no launcher runs in {directory}"
        )
        raise LaunchError(
            f"run {run} is not launched from here ({here}); packtrain runs stop {run} --cancel{inside(directory)} ends it for good, "
            "wherever its services run"
        )
    launcher.stop(directory, running, STOP_S + longest_drain(read_record(home / RECORD)))
    over = asyncio.run(_ending(directory, run))
    say(
        f"run {run} is over: {over}"
        if over
        else f"run {run} is stopped and unfinished; packtrain runs resume {run}{inside(directory)} goes on with it"
    )


async def _ending(directory: Path, run: str) -> str | None:
    async with place_of(directory, run, None) as place, log_of(place, run) as log:
        return await ending(log) if await log.exists() else None


def cancel(directory: Path, run: str, given: Broker | None, say: Say) -> None:
    """Ends the run for good, and waits for its launcher if it is here. Raises LaunchError, BrokerUnavailable."""
    home_of(directory, run)
    running = launcher.find_launcher(directory)
    here = asyncio.run(_cancel(directory, run, given, say))
    if here and running is not None and running.run == run and not launcher.wait_for(running, STOP_S):
        raise LaunchError(
            f"the launcher of run {run}, process {running.pid}, has not ended in {STOP_S:.0f} s; see {directory / 'launcher.log'}"
        )


async def _cancel(directory: Path, run: str, given: Broker | None, say: Say) -> bool:
    """Whether it is the directory's run of that name, and not another broker's."""
    async with place_of(directory, run, given) as place, log_of(place, run) as log:
        if not await log.exists():
            raise LaunchError(
                f"broker {place.broker.url} has no run {run!r}; `packtrain runs list` tells which it has"
            )
        trained = await log.latest(StepTrained.type)
        steps = trained.fact.step if trained is not None and isinstance(trained.fact, StepTrained) else 0
        stopped = await log.publish(RunStopped(run=run, reason="cancelled", steps=steps))
        fact = stopped.event.fact
        if not stopped.won and isinstance(fact, RunStopped):
            say(f"run {run} is over already: {fact.reason} after {counted(fact.steps, 'step')}")
        else:
            say(f"run {run} is cancelled after {counted(steps, 'step')}")
        return place.record is not None


def resume(directory: Path, run: str, plain: bool, console: Console) -> int:
    """Goes on with the run until it ends; the launcher's exit status. Raises what `launch.run` raises."""
    home = home_of(directory, run)
    if (home / IMPORTING).is_file():
        raise LaunchError(f"the import of run {run} is not complete; import its file again, then resume it")
    if not (home / GIVEN).is_file():
        known = (home / RECORD).is_file()
        raise LaunchError(
            f"{home} does not say what run {run} was started with; start it again by the command that began it"
            if known
            else f"{directory} has no run {run!r}; name its directory with --directory"
        )
    here = [
        Override("--directory", ("directory",), str(directory.absolute())),
        Override("RUN", ("run",), run),
    ]
    return launch.run(load_checked(home / GIVEN, here), launch.Options(plain=plain, resume=True), console)
