"""A run's recorded events for commands that only read: from its broker, or from an exported file.

Promises:
- nothing is written to the log: a message that is no event is counted, not dead-lettered;
- a pass gives the events that stood in the log when the recording was opened, in stream order; a second pass gives the
  same.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pipeline.log.archive import Archive
from pipeline.log.archive_format import ArchiveError
from pipeline.log.fold import Found
from schemas.envelope import Event, Unknown, decode
from schemas.facts import RunStarted
from schemas.names import subject_filter
from services.cli.embedded import BadInput
from services.cli.progress import progress
from services.cli.reach import find_run, open_log
from services.cli.where import Where

_POLL_S = 1.0
_LONG = 5_000
"""Messages from which on progress is shown."""
_STEP = 500

Until = int | datetime | None
Passes = Callable[[], AsyncGenerator[Found, None]]


@dataclass
class Recording:
    """`events` may be read several times. `skipped` counts, by kind, what was no event in the last pass."""

    run: str
    messages: int
    passes: Passes
    until: Until = None
    skipped: Counter[str] = field(default_factory=Counter[str])

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events up to `until`: that sequence number, or the last before the first event that is later."""
        self.skipped.clear()
        async with contextlib.aclosing(self._decoded()) as decoded:
            async for event in decoded:
                if isinstance(self.until, datetime) and event.time > self.until:
                    return
                yield event

    async def started(self) -> RunStarted:
        """The run's first event; raises BadInput when the log does not begin with it."""
        async with contextlib.aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event.fact, RunStarted):
                    return event.fact
                raise BadInput(
                    f"the log of run {self.run} begins at message {event.seq}, {event.fact.type}: what was before it is gone, "
                    "and nothing can be decided again"
                )
        raise BadInput(f"the log of run {self.run} holds no event{' up to there' if self.until else ''}")

    async def _decoded(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(self.passes()) as passing:
            with _progress(self.messages) as at:
                async for found in passing:
                    if isinstance(self.until, int) and found.seq > self.until:
                        return
                    at(found.seq)
                    event = decode(found.subject, found.headers, found.body, found.seq)
                    if isinstance(event, Event):
                        yield event
                    else:
                        self.skipped["unknown" if isinstance(event, Unknown) else "invalid"] += 1


def read_until(text: str | None) -> Until:
    """`--until`: a sequence number, or an ISO 8601 time with its zone. Raises BadInput."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and int(text[:20]) > 0:
        return int(text[:20])
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise BadInput(
            f"--until {text[:100]!r} is neither a sequence number from 1 on nor a time with its zone, as 2026-11-30T10:15:00+00:00"
        )
    return time


@asynccontextmanager
async def open_recording(where: Where, file: Path | None, until: Until = None) -> AsyncIterator[Recording]:
    """The run of an exported file, or that `where` names. Raises BadInput, LaunchError, BrokerUnavailable."""
    if file is not None:
        with _archive(file) as archive:
            if where.run not in (None, archive.manifest.run):
                raise BadInput(f"{file} is of run {archive.manifest.run}, not {where.run}")

            async def stored() -> AsyncGenerator[Found, None]:
                for found in archive.messages():
                    if found.subject.startswith("rl."):
                        yield found

            yield Recording(archive.manifest.run, archive.manifest.last, stored, until)
        return
    config = await asyncio.to_thread(find_run, where)
    async with open_log(config) as log:
        head = await log.head()

        async def logged() -> AsyncGenerator[Found, None]:
            async with contextlib.aclosing(log.messages(subject_filter(log.run), poll_s=_POLL_S)) as messages:
                async for found in messages:
                    if found.seq > head:
                        return
                    yield found
                    if found.seq == head:
                        return

        yield Recording(config.run, head, logged if head else _nothing, until)


async def _nothing() -> AsyncGenerator[Found, None]:
    for found in ():
        yield found


@contextmanager
def _archive(file: Path) -> Iterator[Archive]:
    try:
        archive = Archive(file)
    except OSError as error:
        raise BadInput(
            f"{file} cannot be read: {error.strerror}; name a file of `packtrain export`"
        ) from error
    except ArchiveError as error:
        raise BadInput(str(error)) from error
    try:
        with archive:
            yield archive
    except ArchiveError as error:
        raise BadInput(str(error)) from error


@contextmanager
def _progress(messages: int) -> Iterator[Callable[[int], None]]:
    """Takes the message that a pass has come to; shows it on a terminal, when the pass is long."""
    if messages < _LONG or not sys.stderr.isatty():
        yield lambda seq: None
        return
    with progress("reading the log", messages) as tell:
        yield lambda seq: tell(seq) if seq % _STEP == 0 else None
