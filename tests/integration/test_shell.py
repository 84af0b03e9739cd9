"""The shell around a core against a real broker: crashes, second processes, and what stands in the log already."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipeline.decision import Decision
from pipeline.log import Log
from pipeline.log.shell import run_core
from schemas.config import Broker
from schemas.envelope import Event
from schemas.facts import SampleCompleted, SampleGraded

pytestmark = pytest.mark.timeout(60)


class Grading:
    """A core in small: every completed sample is graded, with an object, by how many were completed before it."""

    STATE_VERSION: ClassVar[int] = 1

    def __init__(self) -> None:
        self.completed = 0
        self.graded: Counter[str] = Counter()

    def fold(self, event: Event) -> None:
        if isinstance(event.fact, SampleCompleted):
            self.completed += 1
        elif isinstance(event.fact, SampleGraded):
            self.graded[event.fact.sample] += 1

    def decide(self, event: Event) -> list[Decision]:
        if not isinstance(event.fact, SampleCompleted):
            return []
        sample = event.fact.sample
        fact = SampleGraded(source="math", sample=sample, grader="count", rewards=(float(self.completed),))
        return [Decision(fact, {f"plans/{sample}": b"object"})]

    def dump(self) -> dict[str, Any]:
        return {"completed": self.completed, "graded": dict(self.graded)}

    def load(self, state: dict[str, Any]) -> None:
        self.completed, self.graded = state["completed"], Counter(state["graded"])


def completed(number: int) -> SampleCompleted:
    return SampleCompleted(
        source="math", sample=f"math-{number:06d}", sequences=("a",), rewards=(0.0,), failed=0
    )


async def no_write(objects: Mapping[str, bytes]) -> None:
    assert list(objects)


@asynccontextmanager
async def running(log: Log, core: Grading, write=no_write) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(run_core(log, core, write, stop))
    try:
        yield
    finally:
        stop.set()
        await task


async def graded(log: Log, count: int, deadline_s: float = 20.0) -> list[Event]:
    """The first `count` grades of the log."""
    found: list[Event] = []
    async with asyncio.timeout(deadline_s):
        async for event in log.subscribe("sample.graded"):
            found.append(event)
            if len(found) == count:
                break
    return found


def rewards(events: list[Event]) -> dict[str, float]:
    return {e.fact.sample: e.fact.rewards[0] for e in events if isinstance(e.fact, SampleGraded)}


DIES = """
import asyncio, os, sys
from pipeline.log import Log
from pipeline.log.shell import run_core
from schemas.config import Broker
from tests.integration.test_shell import Grading

async def write(objects):
    # The object is "written"; the process dies before the fact is in the log.
    print(sorted(objects), flush=True)
    os.kill(os.getpid(), 9)

async def main(url, token_file, run):
    log = await Log.connect(Broker(url=url, token_file=token_file), run, "dies")
    await run_core(log, Grading(), write, asyncio.Event())

asyncio.run(main(*sys.argv[1:]))
"""


async def test_what_was_decided_before_a_kill_is_published_by_the_successor(broker: Broker, log: Log) -> None:
    for number in range(3):
        await log.publish(completed(number))
    died = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", DIES, broker.url, broker.token_file, log.run],
        capture_output=True,
        timeout=40,
        cwd=Path(__file__).parents[2],
    )
    assert died.returncode == -9, died.stderr.decode()
    assert died.stdout.decode().strip() == "['plans/math-000000']"
    assert await log.latest("sample.graded") is None
    written: list[str] = []

    async def write(objects: Mapping[str, bytes]) -> None:
        written.extend(objects)

    async with running(log, Grading(), write):
        found = await graded(log, 3)
    # Each as it was decided on its own prefix of the stream, and caused by that event.
    assert rewards(found) == {"math-000000": 1.0, "math-000001": 2.0, "math-000002": 3.0}
    assert [e.causation for e in found] == [e.id for e in await _events(log, "sample.completed", 3)]
    assert sorted(written) == [f"plans/math-{n:06d}" for n in range(3)]


async def _events(log: Log, type_: str, count: int) -> list[Event]:
    found: list[Event] = []
    async for event in log.subscribe(type_):
        found.append(event)
        if len(found) == count:
            break
    return found


async def test_two_processes_decide_each_fact_once_and_alike(broker: Broker, log: Log) -> None:
    other = await Log.connect(broker, log.run, "other")
    cores = Grading(), Grading()
    async with running(log, cores[0]), running(other, cores[1]):
        for number in range(100):
            await log.publish(completed(number))
        found = await graded(log, 100)
        async with asyncio.timeout(20):
            while any(len(core.graded) < 100 for core in cores):
                await asyncio.sleep(0.02)
    assert rewards(found) == {f"math-{n:06d}": n + 1.0 for n in range(100)}
    assert {e.producer for e in found} <= {"test", "other"}
    assert (await log.size())[0] == 200
    assert all(set(core.graded.values()) == {1} for core in cores)
    await other.close()


async def test_what_is_in_the_log_is_not_published_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        await log.publish(completed(number))
    async with running(log, Grading()):
        await graded(log, 3)
    tried: list[str] = []
    publish_all = log.publish_all

    async def watched(facts):
        tried.extend(fact.id() for fact, _ in facts)
        return await publish_all(facts)

    monkeypatch.setattr(log, "publish_all", watched)
    async with running(log, Grading()):
        await log.publish(completed(3))
        await graded(log, 4)
    assert tried == ["math-000003"]


@pytest.mark.parametrize("last", ["dead-letter", "rubbish", "unknown"])
async def test_a_restart_goes_on_when_the_newest_message_is_no_event(log: Log, last: str) -> None:
    """The successor waits for nobody: what stands last in the stream is not for it, and nothing follows."""
    await log.publish(completed(0))
    if last == "unknown":
        headers = {
            "ce-specversion": "1.0",
            "ce-id": "x",
            "ce-type": "sample.dreamt",
            "ce-typeversion": "1",
        }
        await log._js.publish(f"rl.{log.run}.sample.dreamt.math.x", b"{}", headers=headers)
    else:
        await log._js.publish(f"rl.{log.run}.sample.completed.math.x", b"rubbish")
    if last == "dead-letter":
        async for _ in log.read(first=2):
            break
        assert (await log.size())[0] == 3
    async with running(log, Grading()):
        assert rewards(await graded(log, 1, 10)) == {"math-000000": 1.0}


async def test_an_object_that_cannot_be_written_keeps_its_fact_out_of_the_log(log: Log) -> None:
    await log.publish(completed(0))

    async def write(_: Mapping[str, bytes]) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await asyncio.wait_for(run_core(log, Grading(), write, asyncio.Event()), 20)
    assert await log.latest("sample.graded") is None
