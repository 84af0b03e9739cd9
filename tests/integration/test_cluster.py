"""The log on three servers (R3): races, a lost acknowledgement, and a leader that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pipeline.log import Delivery, Log, end_tasks, serve_work
from tests.integration.test_publish import completed, race, stored
from tests.log_parts import created
from tests.natsserver import NatsCluster

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    cluster = NatsCluster(tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def r3(cluster: NatsCluster, run_name: str) -> AsyncIterator[Log]:
    log = await Log.connect(cluster.broker(0), run_name, "test")
    await created(log)
    yield log
    await log.close()


async def test_one_of_many_writers_wins_on_three_servers(cluster: NatsCluster, r3: Log) -> None:
    assert (await r3.info()).config.num_replicas == 3
    await race(cluster.broker(1), [[[0, 1, 2], [3]], [[2, 1, 0]], [[0], [1], [2, 3]], [[3, 0]]])


async def test_a_retry_after_a_lost_acknowledgement_is_a_win(
    r3: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the broker does not refuse the retry: it acknowledges it as a duplicate."""
    publish, acks = r3._publisher._acks.publish, []

    async def lose_first(*args, **kwargs):
        acks.append(await publish(*args, **kwargs))
        if len(acks) == 1:
            raise TimeoutError("acknowledgement lost")
        return acks[-1]

    monkeypatch.setattr(r3._publisher._acks, "publish", lose_first)
    result = await r3.publish(completed(1))
    assert result.won
    assert result.event.seq == acks[0].seq
    assert acks[1].duplicate
    assert (await r3.size())[0] == 1


async def test_nothing_is_lost_or_doubled_when_the_leader_dies(
    cluster: NatsCluster, r3: Log, tmp_path: Path
) -> None:
    info = await r3.info()
    assert info.cluster is not None
    leader = cluster.leader(info.cluster.leader)
    reaching = next(i for i, server in enumerate(cluster.servers) if server is not leader)
    log = await Log.connect(cluster.broker(reaching), r3.run, "writer")
    half = asyncio.Event()

    async def write() -> list[bool]:
        won: list[bool] = []
        for burst in range(20):
            won += [
                r.won for r in await log.publish_all([(completed(burst * 10 + i), None) for i in range(10)])
            ]
            won.append((await log.publish(completed(1000 + burst))).won)
            if burst == 6:
                half.set()
        return won

    writing = asyncio.create_task(write())
    await half.wait()
    leader.kill()
    won = await asyncio.wait_for(writing, 90)
    assert all(won)
    events = await stored(log)
    assert len(events) == 220
    assert len({e.fact.id() for e in events}) == 220
    leader.start()
    await log.close()


async def test_everybody_goes_on_when_all_three_die_and_come_back(tmp_path: Path, run_name: str) -> None:
    """Publishers, folds, workers and a durable: what a cluster without its leaders answers is waited for, never believed."""
    cluster = NatsCluster(tmp_path)
    cluster.start()
    log = await Log.connect(cluster.broker(0), run_name, "test")
    await created(log)
    stop, won = asyncio.Event(), list[bool]()
    seen: dict[str, list[int]] = {"fold": [], "durable": [], "work": []}

    async def write() -> None:
        number = 0
        while not stop.is_set():
            burst = [(completed(number + i), None) for i in range(4)]
            won.extend(r.won for r in await log.publish_all(burst))
            won.append((await log.publish(completed(number + 4))).won)
            number += 5

    async def fold(name: str, durable: str | None) -> None:
        async for event in log.subscribe("sample.completed", durable=durable):
            seen[name].append(event.seq)

    async def handle(delivery: Delivery) -> None:
        seen["work"].append(delivery.event.seq)
        await delivery.ack()

    work = await log.work("w", "sample.completed", ack_wait_s=2.0, max_deliver=1000)
    readers = [
        asyncio.create_task(fold("fold", None)),
        asyncio.create_task(fold("durable", "d")),
        asyncio.create_task(serve_work(work, 16, handle, stop)),
    ]
    writing = asyncio.create_task(write())

    async def reach(total: int) -> None:
        async with asyncio.timeout(60):
            while min(len(won), *(len(set(seqs)) for seqs in seen.values())) < total:
                for task in (writing, *readers):
                    assert not task.done(), task
                await asyncio.sleep(0.05)

    try:
        await reach(30)
        for _ in range(2):
            for server in cluster.servers:
                server.kill()
            for server in cluster.servers:
                server.start(wait=False)
            await reach(len(won) + 30)
        stop.set()
        await asyncio.wait_for(writing, 60)
        total = len(won)
        assert all(won)
        events = await stored(log)
        assert len(events) == len({e.fact.id() for e in events}) == total
        for name in ("fold", "durable"):
            async with asyncio.timeout(30):
                while len(seen[name]) < total:
                    await asyncio.sleep(0.05)
            assert seen[name] == [e.seq for e in events], name
    finally:
        stop.set()
        await end_tasks([writing, *readers])
        await log.close()
        cluster.stop()
