"""Subscriptions: where they begin, what a durable promises, and the ways in which nats-py's own would go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from pipeline.log import Log, LogError, end_tasks
from pipeline.log import subscription as subscriptions
from pipeline.log.pull import Lost, Pull
from schemas.config import Broker
from schemas.envelope import Event
from schemas.names import BadName
from tests.log_parts import CHECKED, completed, dispatched, publish_raw, take, until
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(60)


async def stored_at(log: Log, seq: int) -> datetime:
    time = (await log.js.get_msg(log.stream, seq=seq)).time
    assert time is not None
    return time


async def test_from_a_time_on_in_any_zone(log: Log) -> None:
    for number in range(3):
        await log.publish(dispatched(number))
    times = [await stored_at(log, seq) for seq in (1, 2, 3)]
    # The broker counts nanoseconds, which Python's datetime cuts.
    assert times[0] < times[1] < times[2]
    assert [e.seq for e in await take(log.subscribe(start=times[1]), 2)] == [2, 3]
    east = (times[1] + timedelta(microseconds=1)).astimezone(timezone(timedelta(hours=9)))
    assert [e.seq for e in await take(log.subscribe(start=east), 1)] == [3]
    assert [e.seq for e in await take(log.subscribe(start=times[0] - timedelta(days=1)), 3)] == [1, 2, 3]
    assert [e.seq for e in await take(log.subscribe(start=times[1], durable="timed"), 2)] == [2, 3]


async def test_a_start_that_means_nothing_is_refused_at_the_call(log: Log) -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        log.subscribe(start=datetime(2026, 1, 1))  # that is the point
    with pytest.raises(ValueError, match="begin at 1"):
        log.subscribe(start=-1)
    with pytest.raises(BadName, match="durable"):
        log.subscribe(durable="a.b")
    with pytest.raises(BadName, match="durable"):
        log.subscribe(durable="")


async def test_a_durable_goes_on_with_what_its_reader_had_in_hand(broker: Broker, log: Log) -> None:
    for number in range(6):
        await log.publish(dispatched(number))
    first = await Log.connect(broker, log.run, "first")
    # The loop is left in the body of the third: it is not done.
    assert [e.seq for e in await take(first.subscribe(durable="rewards"), 3)] == [1, 2, 3]
    await first.close()
    second = await Log.connect(broker, log.run, "second")
    # Where to begin counts no more.
    assert [e.seq for e in await take(second.subscribe(durable="rewards", start=6), 4)] == [3, 4, 5, 6]
    await second.close()
    # What it said before it went may still be on its way through the broker.
    async with asyncio.timeout(20):
        while True:
            info = await log.js.consumer_info(log.stream, "sub-rewards")
            assert info.ack_floor is not None
            if (info.ack_floor.stream_seq, info.num_ack_pending) == (5, 1):
                break


async def test_a_reader_that_dies_without_a_word_leaves_the_durable_to_the_next_at_once(
    broker: Broker, log: Log
) -> None:
    await log.publish_all([(dispatched(number), None) for number in range(300)])
    first = await Log.connect(broker, log.run, "first")
    events = first.subscribe(durable="d")
    assert [(await anext(events)).seq for _ in range(10)] == list(range(1, 11))
    # As a SIGKILL does: the connection ends, nothing is said.
    transport = first._client._transport
    assert transport is not None
    first._client.options["allow_reconnect"] = False
    transport._io_writer.transport.abort()  # pyright: ignore[reportAttributeAccessIssue]  # its TCP transport
    # How many of its acknowledgements were out by then is chance: at most nine, for it had the tenth in hand.
    seen: list[int] = []
    async with asyncio.timeout(20):
        async for event in log.subscribe(durable="d"):
            seen.append(event.seq)
            if event.seq == 300:
                break
    assert seen[0] <= 10
    assert seen == list(range(seen[0], 301))
    await first.close()


async def test_a_slow_body_is_not_given_its_event_again(log: Log) -> None:
    await log.publish_all([(dispatched(number), None) for number in range(20)])
    durable = log.subscribe(durable="slow", poll_s=0.2)
    seen: list[int] = []
    async for event in durable:
        seen.append(event.seq)
        if event.seq == 2:
            # Several requests' time: whatever was asked for has expired meanwhile.
            before = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() - before < 1.5:
                await log.head()
        if event.seq == 20:
            break
    assert seen == list(range(1, 21))


async def test_a_durable_with_another_filter_is_refused(log: Log) -> None:
    await log.publish(completed(1))
    await take(log.subscribe("sample.completed", durable="d"), 1)
    with pytest.raises(
        LogError, match=r"sub-d .* reads rl\.\w+\.sample\.completed\.\*\.\*, not .*another name"
    ):
        await take(log.subscribe("sample.graded", durable="d"), 1)
    await log.js.add_consumer(
        log.stream,
        ConsumerConfig(
            durable_name="sub-e", ack_policy=AckPolicy.EXPLICIT, filter_subject=f"rl.{log.run}.*.*.*.*"
        ),
    )
    with pytest.raises(LogError, match="sub-e"):
        await take(log.subscribe(durable="e"), 1)


async def test_a_durable_has_one_reader_at_a_time(
    broker: Broker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "_BUSY_S", 0.3)
    other = await Log.connect(broker, log.run, "other")
    waiting = asyncio.create_task(take(log.subscribe(durable="d", poll_s=30), 1))
    while not (await other.js.stream_info(log.stream)).state.consumer_count:
        await asyncio.sleep(0.02)
    while not (await other.js.consumer_info(log.stream, "sub-d")).num_waiting:
        await asyncio.sleep(0.02)
    with pytest.raises(LogError, match="read by another process"):
        await take(other.subscribe(durable="d"), 1)
    await log.publish(dispatched(1))
    assert [e.seq for e in await waiting] == [1]
    await other.close()


async def test_an_unsubscribed_durable_is_gone_and_begins_anew(log: Log) -> None:
    assert not await log.unsubscribe("d")
    for number in range(3):
        await log.publish(dispatched(number))
    assert len(await take(log.subscribe(durable="d"), 3)) == 3
    assert await log.unsubscribe("d")
    assert [e.seq for e in await take(log.subscribe(durable="d", start=2), 2)] == [2, 3]


async def test_what_is_no_event_is_passed_over_and_acknowledged(log: Log) -> None:
    await log.js.publish(f"rl.{log.run}.sample.completed.math.x", b"rubbish")
    await log.publish(completed(1))
    await log.publish(completed(2))
    assert [e.seq for e in await take(log.subscribe(durable="d"), 2)] == [2, 3]
    letters, _ = await log.letters.all()
    assert [letter.name for letter in letters] == ["malformed/1"]


HOSTILE = {
    "a-status-header": (b"sample.completed.math.a", b"NATS/1.0\r\nStatus: 404\r\n\r\n"),
    "an-inline-status": (b"sample.completed.math.a", b"NATS/1.0 409 Consumer Deleted\r\n\r\n"),
    "an-inline-status-that-is-no-text": (b"sample.completed.math.a", b"NATS/1.0 404 \xff\xfe\r\n\r\n"),
    "a-subject-that-is-no-text": (b"sample.completed.math.\xff\xfe", b""),
    "headers-that-are-no-text": (b"sample.completed.math.a", b"NATS/1.0\r\nk\xff: \xff\r\nnone\r\na(b: c\r\n\r\n"),
    "no-headers-in-a-header-block": (b"sample.completed.math.a", b"NATS/1.0\r\n\r\n"),
    "a-broker's-header": (b"sample.completed.math.a", b"NATS/1.0\r\nNats-Rolled: sub\r\nnats-ttl: x\r\n\r\n"),
}  # fmt: skip


@pytest.mark.parametrize(("subject", "headers"), HOSTILE.values(), ids=HOSTILE)
async def test_a_message_that_a_stranger_wrote_stops_no_reader(
    broker: Broker, log: Log, subject: bytes, headers: bytes
) -> None:
    """nats-py drops what looks like an answer of the broker, and stops reading at what is not UTF-8."""
    await log.publish(completed(1))
    await publish_raw(broker, f"rl.{log.run}.".encode() + subject, headers, b"x" * 100)
    await log.publish(completed(2))
    assert (await log.info()).state.messages == 3
    for reading in (log.subscribe(), log.subscribe(durable="d")):
        assert [e.seq for e in await take(reading, 2)] == [1, 3]
    work = await log.work("grader", "sample.completed", ack_wait_s=30)
    given: list[int] = []
    while len(given) < 2:
        for delivery in await work.fetch(5):
            given.append(delivery.event.seq)
            await delivery.ack()
    assert given == [1, 3]
    letter = await log.letters.find("malformed", 2)
    assert letter.body == b"x" * 100
    assert log.skipped == {"invalid": 3}


async def test_no_more_comes_than_was_asked_for(log: Log) -> None:
    """A slow subscriber's memory is its request, not the stream: nats-py's buffer drops what it cannot hold."""
    await log.publish_all([(dispatched(number), None) for number in range(100)])
    await log.js.add_consumer(log.stream, ConsumerConfig(durable_name="p", ack_policy=AckPolicy.NONE))
    pull = Pull(log._client, log.stream, "p")
    await pull.open()
    taken = [m.metadata.sequence.stream for m in await pull.take(3, 0.3)]
    while len(taken) < 3:
        taken += [m.metadata.sequence.stream for m in await pull.take(3 - len(taken), 0.3)]
    info = await log.js.consumer_info(log.stream, "p")
    assert info.delivered is not None
    assert (info.delivered.stream_seq, taken) == (3, [1, 2, 3])
    # What a request still owes counts for the next: two requests stand at most for what the larger wants.
    await log.js.delete_consumer(log.stream, "p")
    with pytest.raises(Lost, match=r"answers 503"):
        await pull.take(3, 0.3)
    await pull.close()


async def test_a_request_that_the_broker_answers_with_nothing_ends_in_its_time(log: Log) -> None:
    await log.js.add_consumer(log.stream, ConsumerConfig(durable_name="p", ack_policy=AckPolicy.NONE))
    pull = Pull(log._client, log.stream, "p")
    await pull.open()
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert await pull.take(5, 0.3) == []
    assert 0.2 < loop.time() - before < 1.2
    await log.js.delete_consumer(log.stream, "p")
    await pull.close()


async def test_a_consumer_that_the_server_forgot_is_made_anew(log: Log) -> None:
    seen: list[int] = []

    async def read() -> None:
        async for event in log.subscribe(poll_s=30):
            seen.append(event.seq)

    reading = asyncio.create_task(read())
    for number in range(4):
        await log.publish(dispatched(number))
        await until(lambda number=number: len(seen) == number + 1)
        for consumer in await log.js.consumers_info(log.stream):
            await log.js.delete_consumer(log.stream, consumer.name)
    assert seen == [1, 2, 3, 4]
    await end_tasks([reading])


async def test_a_request_in_flight_over_a_restart_is_asked_again_at_once(tmp_path: Path) -> None:
    """nats-py's fetch would wait for its own timeout, here ten minutes."""
    server = NatsServer(tmp_path / "own")
    server.start()
    log = await Log.connect(server.broker, "inflight", "test")
    await log.create()
    await log.publish(dispatched(0))
    ordered, durable = log.subscribe(poll_s=600), log.subscribe(durable="d", poll_s=600)
    for events in (ordered, durable):
        assert (await anext(events)).seq == 1
    following = [asyncio.ensure_future(anext(events)) for events in (ordered, durable)]
    work = await log.work("w", "sequence.dispatched", ack_wait_s=30)
    assert await (await work.fetch(1))[0].ack() is None
    fetching = asyncio.create_task(work.fetch(1, timeout_s=600))
    while not all([(await log.js.consumer_info(log.stream, name)).num_waiting for name in ("w", "sub-d")]):
        await asyncio.sleep(0.02)
    server.kill()
    server.start()
    await log.publish(dispatched(1))
    events = await asyncio.wait_for(asyncio.gather(*following), 15)
    assert [event.seq for event in events] == [2, 2]
    with pytest.raises(Lost):
        await asyncio.wait_for(fetching, 15)
    assert [d.event.seq for d in await work.fetch(1, timeout_s=10)] == [2]
    await log.close()
    server.stop()


GONE = "not in the broker|stream not found"


async def test_a_run_that_was_removed_ends_its_readers_with_a_reason(broker: Broker, log: Log) -> None:
    await log.publish(dispatched(0))
    work = await log.work("w", "sequence.dispatched", ack_wait_s=30)
    reading = [
        asyncio.create_task(take(log.subscribe(poll_s=0.2, durable=durable), 2)) for durable in (None, "d")
    ]
    while (await log.js.stream_info(log.stream)).state.consumer_count < 3:
        await asyncio.sleep(0.02)
    await log.js.delete_stream(log.stream)
    for task in reading:
        with pytest.raises(LogError, match=GONE):
            await asyncio.wait_for(task, 15)

    async def fetch() -> None:
        while True:
            with contextlib.suppress(Lost):
                await work.fetch(1)

    with pytest.raises(LogError, match=GONE):
        await asyncio.wait_for(fetch(), 15)


async def test_a_fact_that_was_not_published_by_compare_and_set_is_not_given(log: Log) -> None:
    event = await log.publish(completed(1))
    assert event.won
    raw = await log.js.get_msg(log.stream, seq=1)
    unchecked = {k: v for k, v in (raw.headers or {}).items() if not k.startswith("Nats-")}
    await log.js.publish(raw.subject or "", raw.data or b"", headers=unchecked)
    await log.publish(completed(2))
    events: list[Event] = await take(log.subscribe(), 2)
    assert [e.seq for e in events] == [1, 3]
    assert CHECKED.keys() - unchecked.keys() == {"Nats-Expected-Last-Subject-Sequence"}
    assert (await log.letters.find("malformed", 2)).state == "buried"
    assert events[0].time <= datetime.now(UTC)
