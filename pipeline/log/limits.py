"""The limits that people change while a run goes on (`limit.changed`), as a reader of the log follows them.

Promises: of the changes of a pool or a source the one with the highest number holds, whatever order they are read in; a
change is published once, under the number after the newest that its author knew: a second author loses, and looks again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Literal

from pipeline.log.log import Log
from pipeline.log.work import Work
from schemas.envelope import Event
from schemas.facts import LimitChanged

Of = Literal["pool", "source"]


async def changes(log: Log, name: str = "*") -> list[Event]:
    """All `limit.changed` of pools and sources of that name, in stream order. Waits while the broker is away."""
    last = await log.latest(LimitChanged.type, name)
    found: list[Event] = []
    if last is not None:
        async for event in log.read(LimitChanged.type, source=name):
            if isinstance(event, Event):
                found.append(event)
            if event.seq >= last.seq:
                break
    return found


def newest(events: Iterable[Event], of: Of, name: str) -> LimitChanged | None:
    """The change that holds; None where the configuration's limit does."""
    facts = [e.fact for e in events if isinstance(e.fact, LimitChanged)]
    ours = [fact for fact in facts if (fact.of, fact.name) == (of, name)]
    return max(ours, key=lambda fact: fact.number, default=None)


class Limit:
    """One limit, followed. `concurrency` is what holds, as far as this reader has come; 0: no limit."""

    def __init__(self, log: Log, of: Of, name: str, configured: int) -> None:
        self._log = log
        self._of: Of = of
        self._name = name
        self._number = self._seq = 0
        self.concurrency = configured

    async def read(self) -> int:
        """What holds now: before the first use, so that what was lowered is not lifted by a process that starts."""
        events = await changes(self._log, self._name)
        if events:
            self._seq = events[-1].seq
        self._take(newest(events, self._of, self._name))
        return self.concurrency

    async def keep(self, work: Work) -> None:
        """Keeps the limit of a pool's work with every change, until it is cancelled."""
        async for most in self.follow():
            await work.limit(most)

    async def follow(self) -> AsyncIterator[int]:
        """What holds after each change from there on, for ever."""
        async for event in self._log.subscribe(LimitChanged.type, source=self._name, start=self._seq + 1):
            self._seq = event.seq
            if self._take(newest([event], self._of, self._name)):
                yield self.concurrency

    def _take(self, fact: LimitChanged | None) -> bool:
        if fact is None or fact.number <= self._number:
            return False
        self._number, self.concurrency = fact.number, fact.concurrency
        return True
