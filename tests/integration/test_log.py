"""The log against a real nats-server: exactly-once effect, restarts, dead letters, redelivery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipeline.log import BrokerUnavailable, Delivery, Log, serve_work
from schemas.config import Broker
from schemas.envelope import Event, Invalid
from schemas.facts import MAX_BODY, SampleCompleted, SequenceDispatched
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(60)

GOOD = {
    "ce-specversion": "1.0", "ce-id": "x", "ce-time": "2026-01-01T00:00:00+00:00", "ce-typeversion": "1",
}  # fmt: skip


def dispatched(number: int, source: str = "math") -> SequenceDispatched:
    sample = f"{source}-{number:06d}"
    return SequenceDispatched(
        source=source,
        sample=sample,
        sequence=f"{sample}-0",
        member=0,
        group_size=1,
        pool="chat",
        task_index=number,
    )


def completed(number: int, rewards: tuple[float, ...] = (1.0,)) -> SampleCompleted:
    return SampleCompleted(
        source="math", sample=f"math-{number:06d}", sequences=("a",) * len(rewards), rewards=rewards, failed=0
    )


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    found: list[Event] = []
    async for event in events:
        found.append(event)
        if len(found) == count:
            break
    return found


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_one_of_many_writers_wins_and_the_others_read_the_winner(broker: Broker, log: Log) -> None:
    writers = [await Log.connect(broker, log.run, f"w{i}") for i in range(8)]
    results = await asyncio.gather(*(w.publish(completed(1, (float(i),))) for i, w in enumerate(writers)))
    winners = [r for r in results if r.won]
    assert len(winners) == 1
    assert {r.event.id for r in results} == {winners[0].event.id}
    assert all(r.event.fact == winners[0].event.fact for r in results)
    for writer in writers:
        await writer.close()


async def test_a_retry_after_a_lost_acknowledgement_is_a_win_not_a_lost_race(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, calls = log._js.publish, 0

    async def lose_first_ack(*args: object, **kwargs: object):
        nonlocal calls
        calls += 1
        ack = await publish(*args, **kwargs)  # pyright: ignore[reportArgumentType]  # passes through what it was given
        if calls == 1:
            raise TimeoutError("acknowledgement lost")
        return ack

    monkeypatch.setattr(log._js, "publish", lose_first_ack)
    result = await log.publish(completed(1))
    assert result.won
    assert calls == 2
    assert (await log.size())[0] == 1


async def test_subscribe_gives_every_event_in_order_then_goes_on(log: Log) -> None:
    for number in range(5):
        await log.publish(dispatched(number, "math" if number % 2 else "code"))
    everything = await take(log.subscribe(), 5)
    assert [e.seq for e in everything] == [1, 2, 3, 4, 5]
    assert [e.seq for e in await take(log.subscribe(start=4), 2)] == [4, 5]
    assert [e.seq for e in await take(log.subscribe("sequence.dispatched", source="math"), 2)] == [2, 4]


async def test_subscribe_new_skips_what_was_there(log: Log) -> None:
    await log.publish(dispatched(0))
    later = asyncio.create_task(take(log.subscribe(start="new"), 1))
    number = 0
    while not later.done():
        number += 1
        await log.publish(dispatched(number))
    assert (await later)[0].seq > 1


async def test_subscribe_and_publish_survive_server_kills(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "own")
    server.start()
    log = await Log.connect(server.broker, "killed", "test")
    await log.create()
    reader = asyncio.create_task(take(log.subscribe(poll_s=0.5), 60))

    async def write() -> None:
        for number in range(60):
            assert (await log.publish(dispatched(number))).won

    writer = asyncio.create_task(write())
    for reached in (10, 30):
        await until(lambda reached=reached: log_length(server) >= reached or writer.done())
        server.kill()
        server.start()
    await writer
    events = await asyncio.wait_for(reader, 30)
    assert [e.fact.id() for e in events] == [dispatched(n).id() for n in range(60)]
    await log.close()
    server.stop()


def log_length(server: NatsServer) -> int:
    """Messages on disk, roughly: good enough to kill the server in the midst of the writing."""
    blocks = list((server.directory / "js").rglob("*.blk"))
    return sum(block.stat().st_size for block in blocks) // 600


async def test_work_of_a_silent_reader_goes_to_another(broker: Broker, log: Log) -> None:
    await log.publish(dispatched(1))
    first = await log.work("loop", "sequence.dispatched", ack_wait_s=1.0)
    taken = await first.fetch(5)
    assert [d.attempt for d in taken] == [1]
    again: list[Delivery] = []
    while not again:
        again = await first.fetch(5)
    assert again[0].attempt == 2
    await again[0].ack()
    assert await first.fetch(1, timeout_s=1.5) == []


async def test_serve_work_bounds_tenants_keeps_the_living_and_isolates_the_failing(log: Log) -> None:
    for number in range(12):
        await log.publish(dispatched(number))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=1.0)
    stop, running, peak = asyncio.Event(), 0, 0
    done: list[tuple[str, int]] = []
    release = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        try:
            if delivery.event.fact.id() == "math-000003-0" and delivery.attempt == 1:
                raise RuntimeError("this tenant fails once")
            if delivery.event.fact.id() == "math-000000-0":
                await release.wait()
            await delivery.ack()
            done.append((delivery.event.fact.id(), delivery.attempt))
        finally:
            running -= 1

    serving = asyncio.create_task(serve_work(work, 4, handler, stop))
    await until(lambda: len(done) == 11)
    info = await log._js.consumer_info(log.stream, "loop")
    # The slow tenant lives past two ack_waits without a second delivery, because it is kept.
    async with asyncio.timeout(20):
        start = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - start < 2.2:
            info = await log._js.consumer_info(log.stream, "loop")
    assert info.num_ack_pending == 1
    release.set()
    await until(lambda: len(done) == 12)
    assert ("math-000000-0", 1) in done
    assert ("math-000003-0", 2) in done
    assert peak <= 4
    stop.set()
    await serving


async def test_malformed_bodies_are_dead_lettered_once_and_unknown_types_counted(
    broker: Broker, log: Log
) -> None:
    subject = f"rl.{log.run}.sample.completed.math.math-000001"
    await log._js.publish(subject, b"{not json", headers={**GOOD, "ce-type": "sample.completed"})
    await log._js.publish(
        f"rl.{log.run}.sample.dreamt.math.x", b"{}", headers={**GOOD, "ce-type": "sample.dreamt"}
    )
    await log._js.publish(f"rl.{log.run}.sample.completed.math.math-000002", b"{}", headers={})
    await log.publish(completed(7))
    other = await Log.connect(broker, log.run, "other")
    for reader in (log, other):
        assert [e.fact for e in await take(reader.subscribe(), 1)] == [completed(7)]
        assert reader.skipped == {"invalid": 2, "unknown": 1}
    dead = await log._js.stream_info(log.stream, subjects_filter=f"dlq.{log.run}.>")
    assert set((dead.state.subjects or {}).values()) == {1}
    assert len(dead.state.subjects or {}) == 2
    await other.close()


@pytest.mark.parametrize("headers", [{}, {"padding": "p" * 4000}], ids=["no-headers", "long-headers"])
async def test_the_largest_malformed_message_stops_no_reader(log: Log, headers: dict[str, str]) -> None:
    """With its reason it is larger than the stream takes: it is dead-lettered all the same, cut."""
    room = MAX_BODY + 4096 - 12 - sum(len(f"{k}: {v}\r\n") for k, v in headers.items())
    body = b"\xff" * (room if headers else MAX_BODY + 4096)
    await log._js.publish(f"rl.{log.run}.sample.completed.math.x", body, headers=headers or None)
    await log.publish(completed(7))
    assert [e.fact for e in await take(log.subscribe(), 1)] == [completed(7)]
    letter = await log._js.get_last_msg(log.stream, f"dlq.{log.run}.1")
    assert letter.headers is not None
    assert letter.headers["dlq-bytes"] == str(len(body))
    assert "not CloudEvents" in letter.headers["dlq-reason"]
    assert letter.data is not None
    assert len(letter.data) > MAX_BODY
    assert body.startswith(letter.data)


async def test_a_dead_letter_waits_for_a_broker_that_is_away(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "own")
    server.start()
    log = await Log.connect(server.broker, "buried", "test")
    await log.create()
    bad = Invalid(f"rl.{log.run}.sample.completed.math.x", "no reason", 1)
    server.kill()
    burying = asyncio.create_task(log._dead_letter(bad, None, b"body"))
    _, pending = await asyncio.wait([burying], timeout=0.3)
    assert pending
    server.start()
    await asyncio.wait_for(burying, 20)
    assert (await log.size())[0] == 1
    await log.close()
    server.stop()


async def test_latest_is_not_hidden_by_rubbish_on_top(log: Log) -> None:
    assert await log.latest("sample.completed") is None
    await log._js.publish(f"rl.{log.run}.sample.completed.math.y", b"rubbish")
    assert await log.latest("sample.completed") is None
    for number in range(3):
        await log.publish(completed(number))
    await log._js.publish(f"rl.{log.run}.sample.completed.math.x", b"rubbish")
    found = await log.latest("sample.completed")
    assert found is not None
    assert (found.fact, found.seq) == (completed(2), 5)
    newer = {**GOOD, "ce-type": "sample.completed", "ce-typeversion": "2"}
    await log._js.publish(f"rl.{log.run}.sample.completed.math.z", b"{}", headers=newer)
    with pytest.raises(ValueError, match="this version cannot read"):
        await log.latest("sample.completed")


async def test_head_counts_no_dead_letters(log: Log) -> None:
    assert await log.head() == 0
    await log._js.publish(f"rl.{log.run}.sample.completed.math.y", b"rubbish")
    await log._dead_letter(Invalid("x", "no reason", 1), None, b"")
    assert await log.head() == 1


async def test_a_wrong_token_is_one_clear_error_at_once(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(BrokerUnavailable, match=r"refused the token.*set broker\.token_file"):
        await asyncio.wait_for(
            Log.connect(Broker(url=broker.url, token_file=str(tmp_path / "token")), "r", "t", 30), 5
        )


@pytest.mark.parametrize("url", ["nats://", "nats://host:99999", "http://host:4222", "nats://[::1"])
async def test_an_address_that_is_none_is_one_clear_error(url: str) -> None:
    with pytest.raises(BrokerUnavailable, match=r"is not nats://host:port"):
        await Log.connect(Broker.model_construct(url=url, token_file="", replicas=1), "r", "t")


async def test_an_outage_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = NatsServer(tmp_path / "own")
    server.start()
    log = await Log.connect(server.broker, "outage", "test")
    await log.create()
    with caplog.at_level("INFO", "packtrain.log"):
        server.kill()
        async with asyncio.timeout(20):
            while log._client.stats["errors_received"] < 1 and not log._client.is_reconnecting:
                await asyncio.sleep(0.02)
            # Every try to reconnect fails; several of them are let pass.
            before = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() - before < 1.5:
                await asyncio.sleep(0.1)
        server.start()
        await until(lambda: any("is back" in r.message for r in caplog.records))
    told = [r.message for r in caplog.records if "broker" in r.message and "is back" not in r.message]
    assert 1 <= len(told) <= 3, told
    await log.close()
    server.stop()


async def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(BrokerUnavailable, match=r"nats://127\.0\.0\.1:1 is not reachable"):
        await Log.connect(Broker(url="nats://127.0.0.1:1"), "r", "t", timeout_s=0.5)
