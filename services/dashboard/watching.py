"""What the log does not say, asked of the broker: how much work waits, how far the log is, which hosts report, what is buried.

Promises:
- it changes nothing at the broker, and what it asks does not grow with the number of hosts, but for their reports;
- while the broker does not answer nothing is told, rather than what was true before.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from pipeline.hosts.report import SILENT_S, HostReport, reports
from pipeline.log import Log
from schemas.config import RunConfig
from schemas.names import harness_work, teacher_work

EVERY_S = 2.0
_RARELY = 5
"""Letters and reports are looked at in one of so many looks."""
_ANSWER_S = 10.0
GONE_S = 600.0
"""A host that is silent for longer will not come back, and is no longer told of."""


@dataclass(frozen=True, slots=True)
class Queue:
    """One work consumer. `pending`: facts that no reader was given; `unacked`: those that readers have in hand; `readers`: requests
    for work that wait; `redelivered`: facts in hand that were given before."""

    pending: int
    unacked: int
    readers: int
    redelivered: int


class Watch:
    """What was seen last. `queues`: None where nobody ever declared the consumer, and no entry while it is not known."""

    def __init__(self, log: Log, config: RunConfig) -> None:
        self._log = log
        self._names = work_consumers(config)
        self.head = 0
        self.messages = self.bytes = -1
        self.queues: dict[str, Queue | None] = {}
        self.letters: Counter[str] = Counter()
        self.hosts: Counter[tuple[str, str, str]] = Counter()
        """By service, pool and state."""

    async def run(self) -> None:
        """For ever. Raises LogError when the broker denies us what we ask."""
        looks = 0
        while True:
            try:
                if not self._log.connected:
                    raise OSError("no connection to the broker")
                async with asyncio.timeout(_ANSWER_S):
                    await self._look()
                    if looks % _RARELY == 0:
                        await self._look_around()
                    looks += 1
            except (NatsError, OSError, TimeoutError):
                self.queues, self.messages, self.bytes, looks = {}, -1, -1, 0
                self.letters, self.hosts = Counter(), Counter()
            await asyncio.sleep(EVERY_S)

    async def _look(self) -> None:
        self.head = await self._log.head()
        state = (await self._log.info()).state
        self.messages, self.bytes = state.messages, state.bytes
        found = await asyncio.gather(*(self._queue(name) for name in self._names))
        self.queues = {
            name: queue
            for name, queue in zip(self._names, found, strict=True)
            # The hook service declares its work only where a source has hooks that need it.
            if queue is not None or self._names[name]
        }

    async def _queue(self, name: str) -> Queue | None:
        async def look() -> Queue | None:
            try:
                info = await self._log.js.consumer_info(self._log.stream, name)
            except NotFoundError:
                return None
            return Queue(
                info.num_pending or 0,
                info.num_ack_pending or 0,
                info.num_waiting or 0,
                info.num_redelivered or 0,
            )

        return await self._log.patiently(look, f"look at work {name}")

    async def _look_around(self) -> None:
        letters, _ = await self._log.letters.all()
        self.letters = Counter(letter.reader for letter in letters if letter.state == "buried")
        found, _ = await reports(self._log)
        self.hosts = states(found, datetime.now(UTC))


def states(found: Sequence[HostReport], now: datetime) -> Counter[tuple[str, str, str]]:
    """How many hosts, by service, pool and state: as they say, or `silent`, for up to `GONE_S`."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for report in found:
        state = report.state
        if state != "stopped" and report.age_s(now) > SILENT_S:
            if report.age_s(now) > GONE_S:
                continue
            counted[report.service, report.pool, "silent"] += 1
        else:
            counted[report.service, report.pool, state] += 1
    return counted


def work_consumers(config: RunConfig) -> dict[str, bool]:
    """Work consumers of the run, as its services name them, and whether each is there in every run of that configuration."""
    names = {"agent-loop": True, "grader": True}
    names |= {harness_work(pool.name): True for pool in config.pools}
    names |= {teacher_work(t, source.name): True for source in config.sources for t in source.teachers}
    return names | {"hook": False, "hook-graded": False}
