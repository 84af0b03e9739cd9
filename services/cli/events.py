"""`packtrain events`: the log of a run as lines, filtered."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.log import Log
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import (
    ALL,
    FACTS,
    BatchReplanned,
    BatchYielded,
    Fact,
    RunStopped,
    SampleGraded,
    SampleShaped,
)
from schemas.names import checked_name
from services.cli.embedded import BadInput
from services.cli.reach import find_run, open_log
from services.cli.where import Where

_TAIL = 10
_QUIET = ("revision", "by", "attempts", "seconds", "cost", "column")
"""Values that a line leaves out where they are what they are by default."""
_IDS = ("source", "sample", "sequence", "run")


@dataclass(frozen=True)
class Filter:
    """Which events are shown; None lets all through."""

    type: str | None
    source: str | None
    id: str | None

    def check(self) -> None:
        """Raises BadInput on a type that there is not, BadName on a source or id that can be none."""
        if self.type is not None and self.type not in FACTS:
            raise BadInput(f"no event type {self.type!r}; types: {', '.join(sorted(FACTS))}")
        for what, name in (("--source", self.source), ("--id", self.id)):
            if name is not None:
                checked_name(name, what)

    def passes(self, event: Event) -> bool:
        """An id is the event's own, its sample's, or that of what is a part of it (`s-000001` has `s-000001-3-a1`)."""
        fact = event.fact
        ids = (fact.id(), fact.correlation())
        return (
            self.type in (None, fact.type)
            and (self.source is None or self.source in places(event))
            and (self.id is None or self.id in ids or fact.id().startswith(f"{self.id}-"))
        )


def places(event: Event) -> set[str]:
    """The source, pool or host that an event belongs to; both when it is addressed from one to another."""
    return {event.fact.scope(), getattr(event.fact, "source", ALL)} - {ALL}


def show(
    where: Where,
    chosen: Filter,
    as_json: bool,
    follow: bool,
    write: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Writes the events of a run, one a line: those in the log, or the newest and what follows until the run stops.

    `note` is told what was skipped: it is no part of the list.
    """
    chosen.check()
    asyncio.run(_show(find_run(where), chosen, as_json, follow, write, note))


async def _show(
    found: RunConfig,
    chosen: Filter,
    as_json: bool,
    follow: bool,
    write: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    async with open_log(found) as log:
        events = _followed(log) if follow else _recorded(log)
        seen: set[str] = set()
        shown = 0
        async for event in events:
            seen |= places(event)
            if chosen.passes(event):
                shown += 1
                write(as_line(event, found.run) if as_json else line(event))
        if not shown and not follow and chosen.type is not None:
            note(f"no event of --type {chosen.type} that is asked for")
        if chosen.source is not None and chosen.source not in seen and not follow:
            note(f"no event of --source {chosen.source}; seen: {', '.join(sorted(seen)) or 'none'}")
        note_skipped(log.skipped, note)


def note_skipped(skipped: Mapping[str, int], note: Callable[[str], None]) -> None:
    """Tells what a reader passed over, by kind, if anything."""
    if skipped:
        note(f"skipped, as no event to this version: {dict(skipped)}")


async def _followed(log: Log) -> AsyncIterator[Event]:
    async for event in log.subscribe(start=max(1, await log.head() - _TAIL + 1), poll_s=1.0):
        yield event
        if isinstance(event.fact, RunStopped):
            return


async def _recorded(log: Log) -> AsyncIterator[Event]:
    """Up to the newest message, be that an event or not."""
    head = await log.head()
    if not head:
        return
    async with contextlib.aclosing(log.read(poll_s=1.0)) as found:  # pyright: ignore[reportArgumentType]  # it is an async generator
        async for each in found:
            if isinstance(each, Event) and each.seq <= head:
                yield each
            if each.seq >= head:
                return


def as_line(event: Event, run: str) -> str:
    """Envelope and body as one JSON object."""
    envelope = {
        "seq": event.seq,
        "id": event.id,
        "type": event.fact.type,
        "time": event.time.isoformat(),
        "source": event.producer,
        "subject": event.fact.subject(run).text,
        "causationid": event.causation,
        "correlationid": event.correlation,
        "data": event.fact.model_dump(mode="json"),
    }
    return json.dumps({key: value for key, value in envelope.items() if value is not None})


def line(event: Event) -> str:
    """Sequence number, time, type, scope, id, and the body's plain values, of a failure too, floats to six significant digits: JSON, so that
    no control character gets out."""
    body = _told(event.fact)
    values = [
        f"{k}={json.dumps(_short(v))}"
        for k, v in body.items()
        if k not in _IDS and isinstance(v, str | int | float)
    ]
    head = f"{event.seq:>7}  {event.time:%H:%M:%S.%f}"[:-3]
    return (
        f"{head}  {event.fact.type:<19} {event.fact.scope()} {event.fact.id()}  {' '.join(values)}".rstrip()
    )


def _told(fact: Fact) -> dict[str, Any]:
    """The body, with what people look for in its lists and objects as plain values."""
    fields = type(fact).model_fields
    body = {
        k: v for k, v in fact.model_dump(mode="json").items() if k not in _QUIET or v != fields[k].default
    }
    if isinstance(failure := body.get("failure"), dict):
        body |= {"reason": failure["reason"], "detail": failure["detail"]}
    match fact:
        case SampleGraded(quality=quality, hacks=hacks):
            if quality:
                body["quality"] = f"{min(quality):.3g}..{max(quality):.3g}"
            if hacks:
                body["hacks"] = sum(hacks)
        case SampleShaped(sidecars=sidecars) if sidecars:
            body["sidecars"] = sum(sidecar is not None for sidecar in sidecars)
        case BatchYielded(factors=factors) if factors:
            body |= factors.model_dump()
        case BatchReplanned(without=without):
            body |= {"without": len(without), "newest": without[-1]}
        case _:
            pass
    return body


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
