"""One server, SIGKILLed and restarted twenty times under load: every fact once, every result once, every reader in order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.log import Delivery, Log, end_tasks, serve_work
from schemas.envelope import Event
from schemas.facts import Failure, SequenceDispatched, SequenceFailed
from tests.log_parts import completed, dispatched, take
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(180)
KILLS = 20
BURST = 8
AHEAD = 150
"""Facts that publishers may be ahead of the slowest reader."""
PROGRESS = 12
"""Of everybody between two kills."""


class Load:
    """All that runs on the log while the server dies, and what each has seen."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.stop = asyncio.Event()
        self.published: list[Event] = []
        self.lost: list[Event] = []
        self.publishing = 0
        self.handled: Counter[str] = Counter()
        self.fold: list[int] = []
        self.ephemeral: list[int] = []
        self.durable: list[int] = []
        self.changed = asyncio.Event()

    def progress(self) -> list[int]:
        return [
            len(self.published),
            len(self.handled),
            len(self.fold),
            len(self.ephemeral),
            len(self.durable),
        ]

    def told(self) -> None:
        self.changed.set()

    async def reaches(self, wanted: list[int], deadline_s: float = 40) -> None:
        async with asyncio.timeout(deadline_s):
            while any(is_ < want for is_, want in zip(self.progress(), wanted, strict=True)):
                self.changed.clear()
                await self.changed.wait()

    async def _room(self) -> None:
        # Without a bound the readers would fall behind, and the kills meet the publishers alone.
        while not self.over.is_set() and len(self.published) - min(len(self.handled), len(self.fold)) > AHEAD:
            self.changed.clear()
            await self.changed.wait()

    async def publish(self, log: Log, source: str, burst: int) -> None:
        number = 0
        while not self.over.is_set():
            await self._room()
            facts = [dispatched(number + i, source) for i in range(burst)]
            number += burst
            self.publishing += 1
            if burst > 1:
                results = await log.publish_all([(fact, None) for fact in facts])
            else:
                results = [await log.publish(facts[0])]
            self.publishing -= 1
            self.published += [result.event for result in results]
            self.lost += [result.event for result in results if not result.won]
            self.told()

    async def work(self, log: Log) -> None:
        work = await log.work("loop", "sequence.dispatched", ack_wait_s=2.0)

        async def handle(delivery: Delivery) -> None:
            fact = delivery.event.fact
            assert isinstance(fact, SequenceDispatched)
            failure = Failure(kind="infra", reason="tested")
            done = SequenceFailed(
                source=fact.source, sample=fact.sample, sequence=fact.sequence, attempts=1, failure=failure
            )
            await log.publish(done, delivery.event)
            await delivery.ack()
            self.handled[fact.sequence] += 1
            self.told()

        await serve_work(work, 8, handle, self.stop)

    async def read(self, events: AsyncIterator[Event], seen: list[int]) -> None:
        async for event in events:
            seen.append(event.seq)
            self.told()


async def test_twenty_restarts_under_load(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "own")
    server.start()
    logs = [await Log.connect(server.broker, "restarts", f"c{i}") for i in range(8)]
    await logs[0].create()
    load = Load()
    publishers = [
        asyncio.create_task(load.publish(log, source, burst))
        for log, source, burst in zip(logs, ("a", "b", "c"), (1, 1, BURST), strict=False)
    ]
    workers = [asyncio.create_task(load.work(log)) for log in logs[3:5]]
    readers = [
        asyncio.create_task(load.read(logs[5].subscribe(), load.fold)),
        asyncio.create_task(load.read(logs[6].subscribe("sequence.dispatched"), load.ephemeral)),
        asyncio.create_task(load.read(logs[7].subscribe("sequence.dispatched", durable="d"), load.durable)),
    ]
    everyone = asyncio.gather(*publishers, *workers, *readers)
    met = 0
    try:
        for _ in range(KILLS):
            going = asyncio.create_task(load.reaches([is_ + PROGRESS for is_ in load.progress()]))
            await asyncio.wait({going, everyone}, return_when=asyncio.FIRST_COMPLETED)
            if everyone.done():
                everyone.result()
            going.result()
            met += load.publishing
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        load.over.set()
        await asyncio.gather(*publishers)
        count = len(load.published)
        await load.reaches([count, count, 2 * count, count, count])
        load.stop.set()
        await asyncio.gather(*workers)
    finally:
        await end_tasks([*publishers, *workers, *readers, everyone])

    # Most kills met somebody who was publishing, and every connection was broken by every one.
    assert met > KILLS
    assert all(log._client.stats["reconnects"] >= KILLS for log in logs)
    # Every fact once, every result once: all that is in the log, and nothing else.
    await logs[0].publish(completed(1))
    events = [e async for e in _until(logs[0], await logs[0].head())]
    assert Counter(e.fact.subject("restarts").text for e in events).most_common(1)[0][1] == 1
    facts = {e.id: e.seq for e in events if e.fact.type == "sequence.dispatched"}
    assert load.lost == []
    assert {e.id: e.seq for e in load.published} == facts
    results = [e.fact.id() for e in events if e.fact.type == "sequence.failed"]
    assert sorted(results) == sorted(load.handled)
    assert len(results) == count
    # Every reader saw all, in order.
    assert load.fold == [e.seq for e in events][:-1]
    assert load.ephemeral == load.durable == sorted(facts.values())
    assert await logs[0].letters.all() == ([], 0)
    assert (await logs[0].info()).state.messages == 2 * count + 1
    for log in logs:
        await log.close()
    server.stop()


async def _until(log: Log, head: int) -> AsyncIterator[Event]:
    async for event in log.subscribe():
        yield event
        if event.seq >= head:
            return


async def test_a_new_reader_after_the_restarts_sees_what_was_acknowledged_before(tmp_path: Path) -> None:
    """A durable's place outlives the server: at least once, so the last acknowledgements may be lost with it."""
    server = NatsServer(tmp_path / "own")
    server.start()
    log = await Log.connect(server.broker, "place", "test")
    await log.create()
    await log.publish_all([(dispatched(number), None) for number in range(400)])
    assert len(await take(log.subscribe(durable="d"), 300)) == 300
    async with asyncio.timeout(20):
        while (await log.js.consumer_info(log.stream, "sub-d")).ack_floor.stream_seq < 299:  # pyright: ignore[reportOptionalMemberAccess]  # a consumer has one
            await asyncio.sleep(0.02)
    await log.close()
    server.kill()
    server.start()
    log = await Log.connect(server.broker, "place", "test")
    following = [e.seq for e in await take(log.subscribe(durable="d"), 101)]
    assert following[0] <= 300
    assert following == list(range(following[0], following[0] + 101))
    await log.close()
    server.stop()
