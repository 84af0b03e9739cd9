"""Publishing against a real nats-server: races, lost acknowledgements, bursts, strangers, and brokers that are full or wrong."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.api import StreamConfig
from nats.js.errors import APIError

from pipeline.log import Log, LogError, Published
from schemas.config import Broker
from schemas.envelope import Event, encode, new_event
from schemas.facts import SampleCompleted
from tests.log_parts import Tries
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(120)


def completed(number: int, reward: float = 1.0) -> SampleCompleted:
    return SampleCompleted(
        source="math", sample=f"math-{number:06d}", sequences=("a",), rewards=(reward,), failed=0
    )


async def stored(log: Log) -> list[Event]:
    """Every event that is in the log."""
    head, events = await log.head(), []
    async for event in log.subscribe():
        events.append(event)
        if event.seq >= head:
            break
    return events


WRITERS = st.lists(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=4),
    min_size=2,
    max_size=6,
)
"""Of each writer its bursts, of each burst the samples that it decides."""


@settings(max_examples=25)
@given(writers=WRITERS)
def test_of_many_writers_one_wins_each_fact_and_the_others_read_it(
    nats_server: NatsServer, writers: list[list[list[int]]]
) -> None:
    asyncio.run(race(nats_server.broker, writers))


async def race(broker: Broker, writers: list[list[list[int]]]) -> None:
    run = f"r{secrets.token_hex(6)}"
    logs = [await Log.connect(broker, run, f"w{i}") for i in range(len(writers))]
    await logs[0].create()
    results: dict[int, list[Published]] = defaultdict(list)

    async def write(log: Log, number: int, bursts: list[list[int]]) -> None:
        for burst in bursts:
            facts = [(completed(sample, float(number)), None) for sample in burst]
            published = await (log.publish_all(facts) if len(facts) > 1 else _one(log, facts[0][0]))
            for sample, result in zip(burst, published, strict=True):
                results[sample].append(result)

    await asyncio.gather(
        *(write(log, i, bursts) for i, (log, bursts) in enumerate(zip(logs, writers, strict=True)))
    )
    events = await stored(logs[0])
    assert Counter(e.fact.id() for e in events) == dict.fromkeys((completed(s).id() for s in results), 1)
    winners = {e.fact.id(): e for e in events}
    for sample, published in results.items():
        winner = winners[completed(sample).id()]
        assert [p.event for p in published] == [winner] * len(published)
        # A writer that decides a fact again reads itself: what it is told is that the fact was there.
        assert sum(p.won for p in published) == 1
    for log in logs:
        await log.close()


async def _one(log: Log, fact: SampleCompleted) -> list[Published]:
    return [await log.publish(fact)]


async def test_a_burst_is_one_batch_in_order(log: Log) -> None:
    results = await log.publish_all([(completed(i), None) for i in range(600)])
    assert [r.event.seq for r in results] == list(range(1, 601))
    assert all(r.won for r in results)
    raw = await log.js.get_msg(log.stream, 300)
    assert raw.headers is not None
    assert raw.headers["Nats-Batch-Sequence"] == str(300 - 256)
    assert await stored(log) == [r.event for r in results]


async def test_a_burst_with_a_decided_fact_publishes_the_others(broker: Broker, log: Log) -> None:
    other = await Log.connect(broker, log.run, "other")
    first = await other.publish(completed(3))
    results = await log.publish_all([(completed(i), None) for i in range(6)])
    assert [r.won for r in results] == [True, True, True, False, True, True]
    assert results[3].event == first.event
    assert (await log.size())[0] == 6
    await other.close()


async def test_a_burst_whose_acknowledgement_is_lost_is_stored_once_and_won(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks, lost = log._publisher._acks, 0
    publish = acks.publish

    async def lose_first(subject, body, headers):
        nonlocal lost
        answer = await publish(subject, body, headers)
        if "Nats-Batch-Commit" in headers and not lost:
            lost += 1
            raise TimeoutError("acknowledgement lost")
        return answer

    monkeypatch.setattr(acks, "publish", lose_first)
    results = await log.publish_all([(completed(i), None) for i in range(5)])
    assert lost == 1
    assert all(r.won for r in results)
    assert [r.event.seq for r in results] == [1, 2, 3, 4, 5]
    assert (await log.size())[0] == 5


async def test_a_stream_that_takes_no_batches_takes_bursts_all_the_same(
    broker: Broker, run_name: str
) -> None:
    log = await Log.connect(broker, run_name, "test")
    await log.js.add_stream(StreamConfig(name=log.stream, subjects=[f"rl.{run_name}.>"]))
    for _ in range(2):
        results = await log.publish_all([(completed(i), None) for i in range(20)])
        assert len({r.event.id for r in results}) == 20
    assert (await log.size())[0] == 20
    await log.create()
    assert (await log.info()).config.allow_atomic
    await log.close()


async def test_a_server_that_knows_no_batches_is_not_believed_to_have_stored_one(
    broker: Broker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server before 2.12 takes each of a batch as a message of its own, and answers for the last alone."""
    other = await Log.connect(broker, log.run, "other")
    first = await other.publish(completed(3))
    send = log._client.publish

    async def ignorant(*args, headers=None, **kwargs):
        await send(*args, headers={k: v for k, v in (headers or {}).items() if "-Batch-" not in k}, **kwargs)

    monkeypatch.setattr(log._client, "publish", ignorant)
    results = await log.publish_all([(completed(i), None) for i in range(6)])
    assert [r.won for r in results] == [True, True, True, False, True, True]
    assert results[3].event == first.event
    assert sorted(r.event.seq for r in results) == [1, 2, 3, 4, 5, 6]
    assert await stored(log) == sorted((r.event for r in results), key=lambda e: e.seq)
    await other.close()


@pytest.mark.parametrize("messages", [1, 3])
async def test_what_a_stranger_wrote_on_its_subject_does_not_block_a_fact(
    broker: Broker, log: Log, messages: int
) -> None:
    subject = completed(1).subject(log.run).text
    for _ in range(messages):
        await log.js.publish(subject, b"rubbish")
    writers = [await Log.connect(broker, log.run, f"w{i}") for i in range(6)]
    results = await asyncio.gather(*(w.publish(completed(1, float(i))) for i, w in enumerate(writers)))
    assert sum(r.won for r in results) == 1
    assert {r.event.seq for r in results} == {messages + 1}
    await log.js.publish(subject, b"more rubbish")
    again = await writers[0].publish(completed(1))
    assert not again.won
    assert again.event.seq == messages + 1
    assert await log.last("sample.completed", "math", "math-000001") == again.event
    for writer in writers:
        await writer.close()


async def test_a_copy_without_its_condition_counts_for_nothing(log: Log) -> None:
    """A client that repeats a message by hand, or a mirror that replays one: the first stands, folds see one."""
    published = await log.publish(completed(1))
    message = encode(published.event, log.run)
    bare = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    await log.js.publish(message.subject, message.body, headers=bare)
    await log.js.publish(message.subject, message.body, headers={**bare, "ce-id": "another"})
    await log.publish(completed(2))
    assert [e.fact.id() for e in await stored(log)] == ["math-000001", "math-000002"]
    assert log.skipped["invalid"] == 2


async def test_a_newer_version_on_the_subject_is_not_overruled(log: Log) -> None:
    event = new_event(completed(1), "newer")
    message = encode(event, log.run)
    await log.js.publish(message.subject, b"{}", headers={**message.headers, "ce-typeversion": "9"})
    with pytest.raises(LogError, match=r"sample\.completed version 9.*upgrade"):
        await log.publish(completed(1))


@pytest.mark.parametrize(("status", "code"), [(409, 10158), (429, 10167), (500, 10009), (500, 10118)])
async def test_what_passes_is_waited_for_whatever_status_the_broker_gives_it(
    log: Log, monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    """409 above all: on replicas it is a fact's own first try, not confirmed yet as it is tried again."""
    publish, refusals = log._publisher._acks.publish, 2

    async def refuse_first(*args, **kwargs):
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise APIError.from_error({"code": status, "err_code": code, "description": "not now"})
        return await publish(*args, **kwargs)

    monkeypatch.setattr(log._publisher._acks, "publish", refuse_first)
    result = await log.publish(completed(1))
    assert (result.won, result.event.seq, refusals) == (True, 1, 0)


async def test_a_removed_stream_is_told_not_waited_for(log: Log) -> None:
    await log.publish(completed(1))
    await log.js.delete_stream(log.stream)
    async with asyncio.timeout(30):
        with pytest.raises(LogError, match=f"stream {log.stream} is not in the broker"):
            await log.publish(completed(2))
        with pytest.raises(LogError, match=f"stream {log.stream} is not in the broker"):
            await anext(log.subscribe())
        with pytest.raises(LogError, match=f"stream {log.stream} is not in the broker"):
            await log.work("loop", "sequence.dispatched", ack_wait_s=5)


async def test_a_full_stream_is_waited_for_told_once_and_loses_nothing(
    broker: Broker, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = await Log.connect(broker.model_copy(update={"max_bytes": 20_000}), run_name, "test")
    await log.create()
    tries = Tries(log)
    with caplog.at_level(logging.WARNING, "packtrain.log"):
        writing = asyncio.create_task(log.publish_all([(completed(i), None) for i in range(100)]))
        async with asyncio.timeout(30):
            while "storage is full" not in caplog.text:
                await asyncio.sleep(0.02)
        before, start = tries.count, asyncio.get_running_loop().time()
        await asyncio.wait([writing], timeout=2)
        spent = asyncio.get_running_loop().time() - start
        assert not writing.done()
        # A second between two tries of each that waits: no busy loop.
        assert tries.count - before <= 100 * (spent + 2)
        roomy = await Log.connect(broker.model_copy(update={"max_bytes": 10_000_000}), run_name, "operator")
        await roomy.create()
        results = await asyncio.wait_for(writing, 30)
    assert all(r.won for r in results)
    assert (await log.size())[0] == 100
    alerts = [r for r in caplog.records if "storage is full" in r.message]
    assert [r.levelname for r in alerts] == ["ERROR"]
    assert "the broker goes on" in caplog.text
    await log.close()
    await roomy.close()
