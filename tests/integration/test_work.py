"""Work consumers at their limits: facts that fail, facts that kill their readers, facts of a newer version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipeline.config import load
from pipeline.log import Delivery, Log, Work, end_tasks, serve_work
from pipeline.log import serving as serving_loop
from pipeline.log import work as works
from schemas import envelope
from schemas.config import Broker
from schemas.facts import Failure, SampleCompleted, SampleGraded, SequenceFailed
from schemas.names import BadName
from services import grader
from services.agent_loop.host import Host
from services.process import Context
from tests.integration.test_dead_letters import DEMO
from tests.log_parts import CHECKED, completed, dispatched, until

pytestmark = pytest.mark.timeout(60)


class Serving:
    """A worker that runs until it is stopped, and remembers what it was given."""

    def __init__(self, work: Work, fail: Callable[[Delivery], BaseException | None] = lambda _: None) -> None:
        self.given: list[tuple[int, int]] = []
        self.last_words: list[tuple[int, str]] = []
        self.fail = fail
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(serve_work(work, 4, self._handle, self._stop, self._last_word))

    async def _handle(self, delivery: Delivery) -> None:
        self.given.append((delivery.event.seq, delivery.attempt))
        error = self.fail(delivery)
        if error is not None:
            raise error
        await delivery.ack()

    async def _last_word(self, delivery: Delivery, reason: str) -> None:
        self.last_words.append((delivery.event.seq, reason))

    async def stop(self) -> None:
        self._stop.set()
        await self._task


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_loop, "_BACKOFF_S", (0.01,))
    monkeypatch.setattr(works, "_UNKNOWN_S", (0.01,))


async def state_of(log: Log, letter: str) -> str | None:
    return next((found.state for found in (await log.letters.all())[0] if found.name == letter), None)


async def reached(log: Log, letter: str, state: str) -> None:
    async with asyncio.timeout(20):
        while await state_of(log, letter) != state:
            await asyncio.sleep(0.02)


async def test_a_fact_whose_handler_always_fails_is_buried_with_its_error(log: Log) -> None:
    for number in range(3):
        await log.publish(dispatched(number))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30, max_deliver=3)
    poison = RuntimeError("no\x1b[31m such\ntask")
    serving = Serving(work, lambda d: poison if d.event.seq == 2 else None)
    await reached(log, "loop/2", "buried")
    assert sorted(serving.given) == [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    letter = await log.letters.find("loop", 2)
    assert (letter.reason, letter.deliveries) == ("RuntimeError: no [31m such task", 3)
    assert serving.last_words == [(2, letter.reason)]
    # The reader goes on, and the fact is none of its pending ones.
    await log.publish(dispatched(9))
    await until(lambda: len(serving.given) == 6)
    await serving.stop()
    info = await log.js.consumer_info(log.stream, "loop")
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_a_handler_that_cancels_itself_has_failed(log: Log) -> None:
    await log.publish(dispatched(1))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30, max_deliver=2)
    serving = Serving(work, lambda _: asyncio.CancelledError("mine"))
    await reached(log, "loop/1", "buried")
    assert serving.given == [(1, 1), (1, 2)]
    assert (await log.letters.find("loop", 1)).reason == "CancelledError: mine"
    await serving.stop()


async def lose(work: Work, times: int) -> None:
    """Readers that take the fact and are never heard of again."""
    for attempt in range(1, times + 1):
        deliveries: list[Delivery] = []
        while not deliveries:
            deliveries = await work.fetch(1)
        assert deliveries[0].attempt == attempt


async def test_a_fact_that_kills_its_readers_is_buried_at_the_door(broker: Broker, log: Log) -> None:
    await log.publish(dispatched(1))
    await lose(await log.work("loop", "sequence.dispatched", ack_wait_s=0.3, max_deliver=2), 2)
    other = await Log.connect(broker, log.run, "other")
    both = [
        Serving(await each.work("loop", "sequence.dispatched", ack_wait_s=0.3, max_deliver=2))
        for each in (log, other)
    ]
    await reached(log, "loop/1", "buried")
    assert (await log.letters.find("loop", 1)).reason == "delivered 2 times, no reader answered"
    assert [serving.given for serving in both] == [[], []]

    # Retried it is new; and buried again when it fails again.
    first = both[0]
    for serving in both:
        serving.fail = lambda _: ValueError("still")
    await log.letters.retry(await log.letters.find("loop", 1))
    async with asyncio.timeout(20):
        while (await log.letters.find("loop", 1)).reason != "ValueError: still":
            await asyncio.sleep(0.02)
    assert sorted(both[0].given + both[1].given) == [(1, 1), (1, 2)]
    for serving in both:
        serving.fail = lambda _: None
        serving.given.clear()
    await log.letters.retry(await log.letters.find("loop", 1))
    await until(lambda: sorted(both[0].given + both[1].given) == [(1, 1)])
    await both[1].stop()
    # A letter that was moved on since it was retried is old news.
    await log.letters.drop(await log.letters.find("loop", 1))
    await log.publish(dispatched(2))
    await until(lambda: any(seq > 1 for seq, _ in first.given))
    await first.stop()
    info = await log.js.consumer_info(log.stream, "loop")
    assert (info.num_ack_pending, info.num_pending) == (0, 0)
    await other.close()


async def test_a_letter_written_before_its_reader_was_lost_is_not_written_again(log: Log) -> None:
    await log.publish(dispatched(1))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=0.3, max_deliver=1)
    await lose(work, 1)
    original = await log.letters.original(1)
    assert original is not None
    await log.letters.bury("loop", original, "the first reader's reason")
    serving = Serving(work)
    async with asyncio.timeout(20):
        while (await log.js.consumer_info(log.stream, "loop")).num_ack_pending:
            await asyncio.sleep(0.02)
    assert (await log.letters.find("loop", 1)).reason == "the first reader's reason"
    assert serving.given == []
    await serving.stop()


async def test_a_last_word_that_fails_does_not_hold_up_the_letter(log: Log) -> None:
    await log.publish(dispatched(1))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30, max_deliver=1)
    stop = asyncio.Event()

    async def fails(*_: object) -> None:
        raise KeyError("math")

    serving = asyncio.create_task(serve_work(work, 1, fails, stop, fails))
    await reached(log, "loop/1", "buried")
    reason = (await log.letters.find("loop", 1)).reason
    assert reason == "KeyError: 'math'; and the service's last word failed: KeyError: 'math'"
    stop.set()
    await serving


async def test_a_retried_letter_that_points_elsewhere_is_no_work(log: Log) -> None:
    """A letter is anybody's to write: what is handled is the message of the log, and only one of the consumer's facts."""
    await log.publish(completed(1))
    await log.publish(dispatched(1))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30)
    serving = Serving(work)
    await until(lambda: serving.given == [(2, 1)])
    for seq in (1, 99):
        await log.js.publish(f"dlq.{log.run}.loop.{seq}", b"{}", headers={"dlq-state": "retried"})
        await reached(log, f"loop/{seq}", "buried")
    reasons = [(await log.letters.find("loop", seq)).reason for seq in (1, 99)]
    assert reasons == ["message 1 is not among the facts of loop", "message 99 is no longer in the stream"]
    await log.js.publish(f"dlq.{log.run}.loop.2.x", b"{}", headers={"dlq-state": "retried"})
    await log.js.publish(f"dlq.{log.run}.loop.0", b"{}", headers={"dlq-state": "retried"})
    await log.publish(dispatched(2))
    await until(lambda: len(serving.given) == 2)
    await serving.stop()
    info = await log.js.consumer_info(log.stream, "loop")
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_a_durable_of_an_older_version_is_given_the_letters_too(log: Log) -> None:
    await log.publish(dispatched(1))
    await log.publish(dispatched(2))
    subject = f"rl.{log.run}.sequence.dispatched.*.*"
    config = ConsumerConfig(
        durable_name="loop", filter_subject=subject, deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT, ack_wait=30, max_ack_pending=20_000,
    )  # fmt: skip
    await log.js.add_consumer(log.stream, config)
    subscription = await log.js.pull_subscribe_bind(consumer="loop", stream=log.stream)
    [message] = await subscription.fetch(1)
    await message.ack_sync()
    await subscription.unsubscribe()
    serving = Serving(await log.work("loop", "sequence.dispatched", ack_wait_s=30))
    await until(lambda: serving.given == [(2, 1)])
    info = await log.js.consumer_info(log.stream, "loop")
    assert info.config.filter_subjects == [subject, f"dlq.{log.run}.loop.>"]
    original = await log.letters.original(1)
    assert original is not None
    await log.letters.bury("loop", original, "no")
    await log.letters.retry(await log.letters.find("loop", 1))
    await until(lambda: serving.given == [(2, 1), (1, 1)])
    await serving.stop()


async def test_a_consumer_that_the_server_forgot_begins_again(log: Log) -> None:
    await log.publish(dispatched(1))
    serving = Serving(await log.work("loop", "sequence.dispatched", ack_wait_s=30))
    await until(lambda: serving.given == [(1, 1)])
    await log.js.delete_consumer(log.stream, "loop")
    # Handlers look for their result first.
    await until(lambda: serving.given == [(1, 1), (1, 1)])
    await serving.stop()


async def test_what_comes_back_to_the_process_that_has_it_in_hand_is_not_handled_twice(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that was away for longer than ack_wait did not hear that the fact was kept, and delivers it again."""

    async def unheard(_: Delivery) -> None:
        pass

    monkeypatch.setattr(Delivery, "progress", unheard)
    for number in range(2):
        await log.publish(dispatched(number))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=0.5)
    stop, release = asyncio.Event(), asyncio.Event()
    given: list[tuple[int, int]] = []

    async def handle(delivery: Delivery) -> None:
        given.append((delivery.event.seq, delivery.attempt))
        if delivery.attempt == 1:
            await release.wait()
            if delivery.event.seq == 2:
                raise RuntimeError("once")
        await delivery.ack()

    serving: asyncio.Task[None] = asyncio.create_task(serve_work(work, 4, handle, stop))
    try:
        async with asyncio.timeout(20):
            while True:
                delivered = (await log.js.consumer_info(log.stream, "loop")).delivered
                if delivered is not None and delivered.consumer_seq >= 6:
                    break
                await asyncio.sleep(0.02)
        assert given == [(1, 1), (2, 1)]
        # Its end is the fact's end, and its failure hands the fact back, whichever delivery the handler was given.
        release.set()
        async with asyncio.timeout(20):
            while (await log.js.consumer_info(log.stream, "loop")).num_ack_pending:
                await asyncio.sleep(0.02)
    finally:
        stop.set()
        await end_tasks([serving])
    [(seq, attempt)] = given[2:]
    assert (seq, attempt >= 4) == (2, True)


async def test_stopped_it_hands_back_what_it_has(log: Log) -> None:
    await log.publish(dispatched(1))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=600)
    stop, taken = asyncio.Event(), asyncio.Event()

    async def block(_: Delivery) -> None:
        taken.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(serve_work(work, 1, block, stop))
    await asyncio.wait_for(taken.wait(), 20)
    stop.set()
    await serving
    again = await log.work("loop", "sequence.dispatched", ack_wait_s=600)
    assert [d.attempt for d in await again.fetch(1, timeout_s=10)] == [2]


async def test_what_comes_with_the_stop_is_handed_back(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    await log.publish(dispatched(1))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=600)
    stop, fetch = asyncio.Event(), work.fetch

    async def at_the_last_moment(most: int, timeout_s: float = 10.0, priority: int = 0) -> list[Delivery]:
        found = await fetch(most, timeout_s, priority)
        stop.set()
        return found

    async def handle(_: Delivery) -> None:
        raise AssertionError("a host that was told to stop begins nothing")

    monkeypatch.setattr(work, "fetch", at_the_last_moment)
    await serve_work(work, 4, handle, stop)
    again = await log.work("loop", "sequence.dispatched", ack_wait_s=600)
    assert [d.attempt for d in await again.fetch(1, timeout_s=10)] == [2]


async def test_names_of_work_consumers_stay_apart_from_those_of_subscriptions(log: Log) -> None:
    for name in ("sub-x", "malformed", "a.b"):
        with pytest.raises(BadName, match=name):
            await log.work(name, "sequence.dispatched", ack_wait_s=30)
    with pytest.raises(ValueError, match="max_deliver is 0"):
        await log.work("x", "sequence.dispatched", ack_wait_s=30, max_deliver=0)


class Newer(SampleCompleted):
    version: ClassVar[int] = 2


@pytest.mark.parametrize("max_deliver", [2, 1_000_000], ids=["over the limit", "within it"])
async def test_a_newer_version_waits_for_a_reader_that_knows_it(
    broker: Broker, log: Log, monkeypatch: pytest.MonkeyPatch, max_deliver: int
) -> None:
    body = completed(1).model_dump_json().encode()
    head = {**CHECKED, "ce-type": "sample.completed", "ce-typeversion": "2"}
    await log.js.publish(f"rl.{log.run}.sample.completed.math.math-000001", body, headers=head)
    await log.publish(completed(2))
    older = Serving(await log.work("grader", "sample.completed", ack_wait_s=30, max_deliver=max_deliver))
    await until(lambda: log.skipped["unknown"] >= 2 and older.given == [(2, 1)])
    if max_deliver == 2:
        await reached(log, "grader/1", "retried")
    assert older.last_words == []
    monkeypatch.setitem(envelope.FACTS, "sample.completed", Newer)  # pyright: ignore[reportArgumentType]  # a dict of classes
    newer = Serving(await log.work("grader", "sample.completed", ack_wait_s=30, max_deliver=max_deliver))
    await until(lambda: [seq for seq, _ in older.given + newer.given] == [2, 1])
    await older.stop()
    await newer.stop()


def context(log: Log, stop: asyncio.Event) -> Context:
    config = load(DEMO)
    source = config.sources[0].model_copy(update={"name": "math"})
    config = config.model_copy(update={"run": log.run, "sources": (source,)})
    return Context(config, "grader", log, cast("Any", None), stop, logging.getLogger("test"))


async def exhaust(log: Log, name: str, type_: str) -> None:
    work = await log.work(name, type_, ack_wait_s=10, max_deliver=50)
    for _ in range(10):
        deliveries: list[Delivery] = []
        while not deliveries:
            deliveries = await work.fetch(1)
        await deliveries[0].retry(0)
    await work.close()


async def test_a_group_that_kills_its_graders_is_graded_with_its_original_rewards(log: Log) -> None:
    published = await log.publish(completed(1, (0.5, 1.0)))
    await exhaust(log, "grader", "sample.completed")
    stop = asyncio.Event()
    serving = asyncio.create_task(grader.serve(context(log, stop)))
    await reached(log, "grader/1", "buried")
    graded = await log.last("sample.graded", "math", "math-000001")
    assert graded is not None
    assert isinstance(graded.fact, SampleGraded)
    assert (graded.fact.rewards, graded.causation) == ((0.5, 1.0), published.event.id)
    assert graded.fact.fallback == "delivered 10 times, no reader answered"
    stop.set()
    await serving


async def test_a_dispatch_that_becomes_a_dead_letter_is_a_failed_sequence(log: Log) -> None:
    nothing = cast("Any", None)
    host = Host(context(log, asyncio.Event()), "al", "http://x", nothing, nothing, nothing)
    published = await log.publish(dispatched(1))
    work = await log.work("agent-loop", "sequence.dispatched", ack_wait_s=30)
    [delivery] = await work.fetch(1, timeout_s=10)
    for _ in range(2):
        await host.last_word(delivery, "the reason")
    failed = await log.last("sequence.failed", "math", dispatched(1).sequence)
    assert failed is not None
    assert isinstance(failed.fact, SequenceFailed)
    assert failed.fact.failure == Failure(kind="infra", reason="dead_letter", detail="the reason")
    assert failed.causation == published.event.id
    # What is decided stays so.
    await log.publish(dispatched(2))
    done = dispatched(2)
    [second] = await work.fetch(1, timeout_s=10)
    failure = Failure(kind="infra", reason="other")
    await log.publish(
        SequenceFailed(source="math", sample=done.sample, sequence=done.sequence, attempts=1, failure=failure)
    )
    await host.last_word(second, "the reason")
    found = await log.last("sequence.failed", "math", done.sequence)
    assert found is not None
    assert isinstance(found.fact, SequenceFailed)
    assert found.fact.failure == failure


async def test_a_failing_fact_does_not_keep_others_from_their_handlers(log: Log) -> None:
    """One slot: a poisoned fact takes it only for as long as its handler runs."""
    for number in range(20):
        await log.publish(dispatched(number))
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30, max_deliver=3)
    stop, done = asyncio.Event(), set[int]()

    async def handle(delivery: Delivery) -> None:
        if delivery.event.seq % 5 == 0:
            raise RuntimeError("poison")
        await delivery.ack()
        done.add(delivery.event.seq)

    serving: asyncio.Task[None] = asyncio.create_task(serve_work(work, 1, handle, stop))
    try:
        await until(lambda: len(done) == 16)
        for seq in (5, 10, 15, 20):
            await reached(log, f"loop/{seq}", "buried")
    finally:
        stop.set()
        await end_tasks([serving])
