"""The log against a real nats-server: exactly-once effect, restarts, dead letters, redelivery."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from nats.js.errors import APIError

from pipeline.log import BrokerUnavailable, Delivery, Log, LogError, serve_work
from pipeline.log.fold import Found
from schemas.config import Broker
from schemas.envelope import EXPECTED_LAST, BodyTooLarge, encode, new_event
from schemas.facts import MAX_BODY
from tests.log_parts import CHECKED, HEADERS, completed, dispatched, take, until
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(60)


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
    publish, calls = log._publisher._acks.publish, 0

    async def lose_first_ack(*args: object, **kwargs: object):
        nonlocal calls
        calls += 1
        ack = await publish(*args, **kwargs)  # pyright: ignore[reportArgumentType]  # passes through what it was given
        if calls == 1:
            raise TimeoutError("acknowledgement lost")
        return ack

    monkeypatch.setattr(log._publisher._acks, "publish", lose_first_ack)
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
    await log._js.publish(subject, b"{not json", headers={**HEADERS, "ce-type": "sample.completed"})
    await log._js.publish(
        f"rl.{log.run}.sample.dreamt.math.x", b"{}", headers={**HEADERS, "ce-type": "sample.dreamt"}
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


async def test_a_message_that_is_published_twice_counts_once(broker: Broker, log: Log) -> None:
    """As a publisher without our care may send it: with its condition the broker refuses the copy, without it no reader does."""
    first, second = (encode(new_event(completed(1, (reward,)), "stranger"), log.run) for reward in (1.0, 2.0))
    await log.js.publish(first.subject, first.body, headers=dict(first.headers))
    for copy in (first, second):
        with pytest.raises(APIError, match="wrong last sequence"):
            await log.js.publish(copy.subject, copy.body, headers=dict(copy.headers))
    for copy in (first, second):
        unchecked = {
            k: v
            for k, v in copy.headers.items()
            if k in ("content-type", "traceparent") or k.startswith("ce-")
        }
        await log.js.publish(copy.subject, copy.body, headers=unchecked)
    await log.publish(completed(2))
    other = await Log.connect(broker, log.run, "other")
    for reader in (log, other):
        assert [(e.fact, e.seq) for e in await take(reader.subscribe(), 2)] == [
            (completed(1), 1),
            (completed(2), 4),
        ]
        assert reader.skipped == {"invalid": 2}
    letters, _ = await log.letters.all()
    assert [letter.name for letter in letters] == ["malformed/2", "malformed/3"]
    assert all("compare-and-set" in letter.reason for letter in letters)
    work = await log.work("grader", "sample.completed", ack_wait_s=30)
    given = await work.fetch(5, timeout_s=10)
    while len(given) < 2:
        given += await work.fetch(5, timeout_s=10)
    assert [d.event.seq for d in given] == [1, 4]
    await other.close()


async def test_a_burst_that_arrives_in_another_order_is_read_in_that_order_by_everybody(
    broker: Broker, log: Log
) -> None:
    facts = [completed(number) for number in range(20)]
    order = facts[::-2] + facts[::2]
    messages = [encode(new_event(fact, "stranger"), log.run) for fact in order]
    # No acknowledgement is waited for in between.
    for message in messages:
        await log._client.publish(message.subject, message.body, headers=dict(message.headers))
    other = await Log.connect(broker, log.run, "other")
    seen = [[e.fact for e in await take(reader.subscribe(), 20)] for reader in (log, other)]
    assert seen == [order, order]
    # Whoever decides them again, in its own order, reads what stands.
    again = await other.publish_all([(fact, None) for fact in facts])
    assert [(p.won, p.event.fact) for p in again] == [(False, fact) for fact in facts]
    assert (await log.info()).state.messages == 20
    await other.close()


async def test_unknown_types_and_newer_versions_are_skipped_and_counted(log: Log) -> None:
    for type_, version in (("sample.dreamt", "1"), ("sample.completed", "9"), ("batch.yielded", "9")):
        head = {**CHECKED, "ce-type": type_, "ce-typeversion": version}
        await log.js.publish(f"rl.{log.run}.{type_}.math.x", b"not for us", headers=head)
    await log.publish(completed(1))
    assert [e.fact for e in await take(log.subscribe(), 1)] == [completed(1)]
    assert log.skipped == {"unknown": 3}
    # They are somebody's: no dead letters.
    assert await log.letters.all() == ([], 0)


async def test_oversized_bodies_are_refused_at_the_door_and_by_the_broker(log: Log) -> None:
    with pytest.raises(BodyTooLarge, match="limit 65536"):
        await log.publish(completed(1, (0.123456789,) * 6000))
    subject = f"rl.{log.run}.sample.completed.math.math-000001"
    with pytest.raises(APIError, match="message size exceeds maximum"):
        await log.js.publish(subject, b"x" * (MAX_BODY + 4096 + 1))
    assert (await log.size())[0] == 0
    assert await log.last("sample.completed", "math", "math-000001") is None


async def test_rubbish_on_its_own_subject_neither_blocks_nor_hides_a_fact(broker: Broker, log: Log) -> None:
    subject = f"rl.{log.run}.sample.completed.math.math-000001"
    # A header of another alphabet too: what stands first is read by subject, not as it is delivered.
    for headers in (None, {**HEADERS, "ce-type": "\u4e8b\u5b9e", EXPECTED_LAST: "1"}):
        await log.js.publish(subject, b"rubbish", headers=headers)
        assert await log.last("sample.completed", "math", "math-000001") is None
    won = await log.publish(completed(1, (1.0,)))
    assert (won.won, won.event.seq) == (True, 3)
    await log.js.publish(subject, b"more rubbish")
    found = await log.last("sample.completed", "math", "math-000001")
    assert found is not None
    assert found.id == won.event.id
    other = await Log.connect(broker, log.run, "other")
    late = await other.publish(completed(1, (2.0,)))
    assert (late.won, late.event.id, late.event.fact) == (False, won.event.id, completed(1, (1.0,)))
    await other.publish(completed(2))
    assert [e.seq for e in await take(other.subscribe(), 2)] == [3, 5]
    assert other.skipped == {"invalid": 3}
    await other.close()


@pytest.mark.parametrize("headers", [{}, {"padding": "p" * 4000}], ids=["no-headers", "long-headers"])
async def test_the_largest_malformed_message_stops_no_reader(log: Log, headers: dict[str, str]) -> None:
    """With its reason it is larger than the stream takes: it is dead-lettered all the same, cut."""
    room = MAX_BODY + 4096 - 12 - sum(len(f"{k}: {v}\r\n") for k, v in headers.items())
    body = b"\xff" * (room if headers else MAX_BODY + 4096)
    await log._js.publish(f"rl.{log.run}.sample.completed.math.x", body, headers=headers or None)
    await log.publish(completed(7))
    assert [e.fact for e in await take(log.subscribe(), 1)] == [completed(7)]
    letter = await log._js.get_last_msg(log.stream, f"dlq.{log.run}.malformed.1")
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
    bad = Found(f"rl.{log.run}.sample.completed.math.x", None, b"body", 1)
    server.kill()
    burying = asyncio.create_task(log.letters.bury("malformed", bad, "no reason"))
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
    newer = {**HEADERS, "ce-type": "sample.completed", "ce-typeversion": "2"}
    await log._js.publish(f"rl.{log.run}.sample.completed.math.z", b"{}", headers=newer)
    with pytest.raises(LogError, match="cannot read"):
        await log.latest("sample.completed")


async def test_head_counts_no_dead_letters(log: Log) -> None:
    assert await log.head() == 0
    await log._js.publish(f"rl.{log.run}.sample.completed.math.y", b"rubbish")
    await log.letters.bury("malformed", Found("x", None, b"", 1), "no reason")
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


async def test_a_broker_whose_jetstream_is_not_there_is_waited_for_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that starts or stops serves its clients a little longer than their streams."""
    server = NatsServer(tmp_path)
    server.start()
    log = await Log.connect(server.broker, "r", "test")
    await log.create()
    config, whole = tmp_path / "nats.conf", (tmp_path / "nats.conf").read_text()
    server.stop()
    config.write_text("".join(line + "\n" for line in whole.splitlines() if "jetstream" not in line))
    server.start()
    await until(lambda: log._client.stats["reconnects"] == 1 and log._client.is_connected)
    with pytest.raises(BrokerUnavailable, match="does not serve JetStream"):
        await log.exists()
    with caplog.at_level(logging.WARNING, "packtrain.log"):
        doing = [
            asyncio.create_task(log.publish(dispatched(1))),
            asyncio.create_task(log.work("loop", "sequence.dispatched", ack_wait_s=5)),
            asyncio.create_task(log.head()),
        ]
        async with asyncio.timeout(20):
            while caplog.text.count("does not serve JetStream") < 2:
                assert not [task for task in doing if task.done()]
                await asyncio.sleep(0.02)
    server.stop()
    config.write_text(whole)
    server.start()
    async with asyncio.timeout(30):
        published, work, _ = await asyncio.gather(*doing)
        [delivery] = await work.fetch(1, 10)
    assert delivery.event == published.event
    await log.close()
    server.stop()
