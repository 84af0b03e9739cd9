"""`packtrain limit`: how much of a pool or a source runs at once, looked at and changed while the run goes on.

Promises: a change is one fact in the log, which whoever it concerns follows, wherever he runs; a name that the run does
not have, a limit that has no room for a group, and a run that is over are refused; of two people at once one is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import orjson

from pipeline.batch.limits import fits
from pipeline.log import Log
from pipeline.log.limits import Of, changes, newest
from schemas.config import Pool, RunConfig, Source
from schemas.facts import ALL, LimitChanged, RunStopped
from services.cli.embedded import BadInput, LaunchError
from services.cli.reach import LAUNCHER, find_run, open_log
from services.cli.where import Where

Write = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A limit that holds. `number`: changes so far; `concurrency`, `configured`: 0 is no limit."""

    of: Of
    name: str
    concurrency: int
    configured: int
    number: int

    def line(self) -> str:
        other = self.number and self.concurrency != self.configured
        given = f", {told(self.configured)} in the configuration" if other else ""
        return f"{self.of} {self.name}: {told(self.concurrency)}{given}"


def told(concurrency: int) -> str:
    return f"{concurrency:,} at once" if concurrency else "no limit"


def show(where: Where, as_json: bool, write: Write) -> None:
    """Writes what holds, pools first."""
    for row in asyncio.run(_rows(find_run(where))):
        write(orjson.dumps(asdict(row)).decode() if as_json else row.line())


async def _rows(config: RunConfig) -> list[Row]:
    async with open_log(config) as log:
        return await rows(config, log)


async def rows(config: RunConfig, log: Log) -> list[Row]:
    """What holds, pools first. Waits while the broker is away."""
    events = await changes(log)
    kinds: Sequence[tuple[Of, Sequence[Pool | Source]]] = (("pool", config.pools), ("source", config.sources))
    found: list[Row] = []
    for of, sections in kinds:
        for section in sections:
            fact = newest(events, of, section.name)
            now, number = (fact.concurrency, fact.number) if fact else (section.concurrency, 0)
            found.append(Row(of, section.name, now, section.concurrency, number))
    return found


def put(where: Where, of: Of, name: str, concurrency: int, write: Write) -> None:
    """Sets a limit; 0 lifts it. Raises BadInput, LaunchError."""
    found = find_run(where)
    check(found, of, name, concurrency)
    write(asyncio.run(_put(found, of, name, concurrency)))


def check(config: RunConfig, of: Of, name: str, concurrency: int) -> None:
    """Raises BadInput on a pool or source that the run does not have, and on a limit that has no room for a group."""
    sections = config.pools if of == "pool" else config.sources
    section = next((section for section in sections if section.name == name), None)
    if section is None:
        known = ", ".join(section.name for section in sections)
        raise BadInput(f"run {config.run} has no {of} {name!r}; {of}s: {known}")
    if isinstance(section, Source) and not fits(concurrency, section.group_size):
        raise BadInput(
            f"source {name!r} sends out groups of {section.group_size}, and {concurrency} have no room for one; give "
            f"{section.group_size} or more, or 0 for no limit"
        )


async def _put(config: RunConfig, of: Of, name: str, concurrency: int) -> str:
    async with open_log(config, "limit", LAUNCHER) as log:
        if await log.last(RunStopped.type, ALL, config.run) is not None:
            raise LaunchError(f"run {config.run} is over: nothing of it runs any more")
        return await change(log, of, name, concurrency)


async def change(log: Log, of: Of, name: str, concurrency: int) -> str:
    """Publishes the change, and says so. Raises LaunchError when somebody else changed it at the same time."""
    before = newest(await changes(log, name), of, name)
    number = before.number + 1 if before else 1
    fact = LimitChanged(of=of, name=name, number=number, concurrency=concurrency)
    published = await log.publish(fact)
    if not published.won:
        theirs = published.event.fact
        assert isinstance(theirs, LimitChanged)
        raise LaunchError(
            f"{of} {name} was set to {told(theirs.concurrency)} just now by somebody else; set it again if it is to be otherwise"
        )
    return f"{of} {name}: {told(concurrency)}"
