"""Snapshots against a real nats-server: a start from one goes on as a refold would, and a wrong one is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import orjson
import pytest

from pipeline.decision import Decision
from pipeline.log import Log, LogError, end_tasks, shell
from pipeline.log.shell import run_core
from pipeline.log.snapshot import Snapshots, bucket_name
from schemas.config import Broker
from schemas.envelope import Event
from schemas.facts import SampleCompleted, SampleGraded
from tests.log_parts import dispatched, take

pytestmark = pytest.mark.timeout(60)
EVERY = 20


class Counting:
    """A core in small: a sample's grade is how many samples were completed before it."""

    STATE_VERSION: ClassVar[int] = 3

    def __init__(self) -> None:
        self.completed = 0
        self.folded: list[int] = []
        self.padding = ""

    def fold(self, event: Event) -> None:
        self.folded.append(event.seq)
        if isinstance(event.fact, SampleCompleted):
            self.completed += 1

    def decide(self, event: Event) -> list[Decision]:
        if not isinstance(event.fact, SampleCompleted):
            return []
        return [
            Decision(
                SampleGraded(
                    source="math", sample=event.fact.sample, grader="count", rewards=(float(self.completed),)
                )
            )
        ]

    def dump(self) -> dict[str, Any]:
        return {"completed": self.completed, "padding": self.padding}

    def load(self, state: dict[str, Any]) -> None:
        self.completed = state["completed"]


def completed(number: int) -> SampleCompleted:
    return SampleCompleted(
        source="math", sample=f"math-{number:06d}", sequences=("a",), rewards=(0.0,), failed=0
    )


async def no_objects(_: Mapping[str, bytes]) -> None:
    return None


@asynccontextmanager
async def running(log: Log, core: Counting) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(run_core(log, core, no_objects, stop, "counting"))
    try:
        yield
    finally:
        if task.done():
            task.result()
        stop.set()
        await end_tasks([task])


async def graded(log: Log, count: int) -> list[float]:
    """The first so many grades, by sample."""
    found: dict[str, float] = {}
    async with asyncio.timeout(30):
        async for event in log.subscribe("sample.graded"):
            assert isinstance(event.fact, SampleGraded)
            found[event.fact.sample] = event.fact.rewards[0]
            if len(found) == count:
                break
    return [found[sample] for sample in sorted(found)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def kept(log: Log) -> int:
    snapshot = await Snapshots(log, "counting", Counting.STATE_VERSION).load()
    return snapshot.seq if snapshot is not None else 0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr(shell, "_SNAPSHOT_COST", 0)


async def fill(log: Log, first: int, last: int) -> None:
    await log.publish_all([(completed(i), None) for i in range(first, last)])


async def test_a_start_from_a_snapshot_reads_what_follows_and_decides_the_same(log: Log) -> None:
    async with running(log, Counting()):
        for start in range(0, 120, 10):
            await fill(log, start, start + 10)
            await graded(log, start + 10)
        before = await kept(log)
        assert before >= EVERY
    await fill(log, 120, 130)
    second = Counting()
    async with running(log, second):
        grades = await graded(log, 130)
    assert min(second.folded) > before
    assert second.completed == 130
    refolded = Counting()
    async for event in log.subscribe():
        refolded.fold(event)
        if event.seq == 260:
            break
    assert refolded.completed == second.completed
    assert grades == [float(i + 1) for i in range(130)]


async def test_a_snapshot_is_taken_only_when_all_that_was_decided_is_in_the_log(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between a snapshot and its publishes, a core could never decide them again."""
    publish_all, saved = log.publish_all, []
    save = Snapshots.save

    async def watched(self, seq, state):
        saved.append((seq, state["core"]["completed"], sum(decided)))
        waited_for.append((seq, set(state["published"])))
        return await save(self, seq, state)

    decided: list[int] = []
    waited_for: list[tuple[int, set[str]]] = []

    async def counted(facts):
        done = await publish_all(facts)
        decided.append(len(facts))
        return done

    monkeypatch.setattr(Snapshots, "save", watched)
    monkeypatch.setattr(log, "publish_all", counted)
    writer = log.publish
    async with running(log, Counting()):
        for number in range(100):
            await writer(completed(number))
        await graded(log, 100)
        await until(lambda: bool(saved))
    assert all(completed_ <= published for _, completed_, published in saved)
    # What has come back through the stream is waited for no longer, or it would be kept for ever.
    seqs = {e.fact.subject(log.run).text: e.seq for e in await take(log.subscribe("sample.graded"), 100)}
    assert all(seqs[subject] > seq for seq, subjects in waited_for for subject in subjects)


async def test_a_snapshot_of_many_chunks_comes_back_whole_and_old_chunks_go(log: Log) -> None:
    import random

    noise = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=3_000_000))
    snapshots = Snapshots(log, "counting", 3)
    for seq in (1, 2, 3):
        await log.publish(completed(seq))
        assert await snapshots.save(seq, {"noise": noise, "seq": seq}) > 1_500_000
    found = await Snapshots(log, "counting", 3).load()
    assert found is not None
    assert (found.seq, found.state) == (3, {"noise": noise, "seq": 3})
    info = await log.js.stream_info(f"KV_{bucket_name(log.run)}")
    assert info.state.bytes < 2 * 2_200_000, "chunks of older snapshots are still there"


async def test_of_two_that_save_at_once_the_newer_stands_and_it_is_whole(broker: Broker, log: Log) -> None:
    for number in range(9):
        await log.publish(completed(number))
    other = await Log.connect(broker, log.run, "other")
    first, second = Snapshots(log, "counting", 3), Snapshots(other, "counting", 3)
    for seq in (3, 6, 9):
        sizes = await asyncio.gather(first.save(seq, {"at": seq}), second.save(seq, {"at": seq}))
        assert any(sizes)
        assert await second.save(seq - 1, {"at": "late"}) == 0
        found = await first.load()
        assert found is not None
        assert (found.seq, found.state) == (seq, {"at": seq})
    await other.close()


@pytest.mark.parametrize(
    "fault", ["version", "chunk lost", "chunk damaged", "head damaged", "other log", "ahead"]
)
async def test_a_snapshot_that_does_not_fit_is_refused_and_the_log_refolded(
    log: Log, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(log, Counting()):
        await fill(log, 0, 50)
        await graded(log, 50)
        await until_async(lambda: kept(log))
    bucket = await log.js.key_value(bucket_name(log.run))
    head = "counting.head"
    # That of the newest: whoever was stopped as it saved may have left others.
    chunk = f"counting.{orjson.loads((await bucket.get(head)).value or b'')['id']}.0"
    core = Counting()
    match fault:
        case "version":
            core.STATE_VERSION = 4  # pyright: ignore[reportAttributeAccessIssue]  # a later version of this code
        case "chunk lost":
            await bucket.purge(chunk)
        case "chunk damaged":
            await bucket.put(chunk, b"\0" + ((await bucket.get(chunk)).value or b"")[1:])
        case "head damaged":
            await bucket.put(head, b'{"version": 3')
        case "other log":
            await log.js.delete_stream(log.stream)
            await log.create()
            await fill(log, 0, 50)
            # Longer than the one before: its length alone would not tell.
            await log.publish_all([(dispatched(i), None) for i in range(200)])
        case _:
            text = (await bucket.get(head)).value or b""
            await bucket.put(head, text.replace(b'"seq":', b'"seq":9'))
    with caplog.at_level(logging.WARNING, "packtrain.snapshot"):
        async with running(log, core):
            await fill(log, 50, 60)
            assert await graded(log, 60) == [float(i + 1) for i in range(60)]
    assert core.folded[0] == 1
    assert "is not used, the log is refolded" in caplog.text


async def until_async(condition) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_without_its_beginning_and_without_a_snapshot_a_log_is_refused(
    broker: Broker, run_name: str
) -> None:
    log = await Log.connect(broker, run_name, "test")
    await log.create(first_seq=500)
    await fill(log, 0, 3)
    with pytest.raises(LogError, match=r"begins at message 500.*needed from 1 on.*max_age_s"):
        await asyncio.wait_for(run_core(log, Counting(), no_objects, asyncio.Event(), "counting"), 20)
    await log.close()
