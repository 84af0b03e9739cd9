"""A work consumer killed at its worst moments: one result stands, and what kills its readers becomes a dead letter; and the grader
service itself, killed while its judge thinks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.config import dumps, load
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker
from schemas.facts import SampleGraded
from tests import grader_parts
from tests.judge_double import held, judge
from tests.log_parts import completed, until
from tests.log_worker import MAX_DELIVER

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]


class Worker:
    def __init__(self, log: Log, broker: Broker) -> None:
        self._command = [sys.executable, "-m", "tests.log_worker", broker.url, broker.token_file, log.run]

    async def start(self, mode: str) -> Worker:
        self.process = await asyncio.create_subprocess_exec(
            *self._command, mode, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        await self.says("ready")
        return self

    async def says(self, line: str) -> None:
        assert self.process.stdout is not None
        said = await asyncio.wait_for(self.process.stdout.readline(), 30)
        assert said.decode().strip() == line

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        assert await asyncio.wait_for(self.process.wait(), 30) == -signal.SIGKILL


@pytest.fixture
async def workers(log: Log, broker: Broker) -> AsyncIterator[list[Worker]]:
    """Three that are not started; those that were are killed in the end."""
    workers = [Worker(log, broker) for _ in range(MAX_DELIVER + 2)]
    yield workers
    for worker in workers:
        if hasattr(worker, "process"):
            await worker.kill()


async def result(log: Log) -> SampleGraded:
    """The one result; more would be a fault."""
    subject = f"rl.{log.run}.sample.graded.math.math-000001"
    info = await log.js.stream_info(log.stream, subjects_filter=subject)
    assert info.state.subjects == {subject: 1}
    event = await log.last("sample.graded", "math", "math-000001")
    assert event is not None
    assert isinstance(event.fact, SampleGraded)
    return event.fact


async def settled(log: Log) -> None:
    async with asyncio.timeout(20):
        while True:
            info = await log.js.consumer_info(log.stream, "grader")
            if not info.num_ack_pending and not info.num_pending:
                return
            await asyncio.sleep(0.02)


async def test_killed_between_its_result_and_the_acknowledgement(log: Log, workers: list[Worker]) -> None:
    await log.publish(completed(1))
    first = await workers[0].start("block")
    await first.says("taken 1")
    await first.says("published won")
    await first.kill()
    second = await workers[1].start("good")
    await second.says("taken 2")
    await second.says("published lost")
    await second.says("acknowledged")
    assert (await result(log)).grader == "block"
    await settled(log)


async def test_killed_by_its_fact_until_the_fact_is_a_dead_letter_that_a_person_retries(
    log: Log, broker: Broker, workers: list[Worker], tmp_path: Path
) -> None:
    await log.publish(completed(1))
    for attempt in range(1, MAX_DELIVER + 1):
        worker = await workers[attempt - 1].start("die")
        await worker.says(f"taken {attempt}")
        assert await asyncio.wait_for(worker.process.wait(), 30) == -signal.SIGKILL
    # The next one would die of it too: it is not given the fact.
    survivor = await workers[MAX_DELIVER].start("die")
    await settled(log)
    letter = await log.letters.find("grader", 1)
    assert letter.reason == f"delivered {MAX_DELIVER} times, no reader answered"
    assert survivor.process.returncode is None
    await survivor.kill()

    config = tmp_path / "config.toml"
    demo = load(ROOT / "examples" / "demo.toml")
    config.write_text(dumps(demo.model_copy(update={"run": log.run, "broker": broker})))
    good = await workers[MAX_DELIVER + 1].start("good")
    retried = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "services.cli.main", "dlq", "retry", "grader/1", "--config", str(config)],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert (retried.returncode, retried.stderr) == (0, "")
    await good.says("taken 1")
    await good.says("published won")
    await good.says("acknowledged")
    assert (await result(log)).grader == "good"
    await settled(log)
    assert (await log.letters.find("grader", 1)).state == "retried"


class GraderProcess:
    """The service, with groups that come back soon."""

    def __init__(self, config: Path) -> None:
        self._config = config

    async def __aenter__(self) -> GraderProcess:
        command = [sys.executable, "-m", "tests.grader_process", str(self._config)]
        self.process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def test_a_grader_killed_while_its_judge_thinks(
    log: Log, broker: Broker, store: ObjectStore, tmp_path: Path
) -> None:
    async with judge() as double:
        options = {"url": double.url, "model": "j", "rubric": "Judge."}
        given = grader_parts.config(
            log.run, broker, str(tmp_path), kind="rubric", options=options, deadline_s=600
        )
        config = tmp_path / "run.toml"
        config.write_text(dumps(given))
        double.steps = [held]
        await grader_parts.completed(log, store)
        async with GraderProcess(config) as first:
            await until(lambda: len(double.bodies) == 1)
            first.process.kill()
            await first.process.wait()
        assert await grader_parts.facts(log) == 0
        async with GraderProcess(config):
            found = await grader_parts.graded(log)
            await grader_parts.settled(log)
        # Its judge is asked again, by nobody but the second grader.
        assert len(double.bodies) == 2
    assert (found.quality, found.fallback, found.attempts) == ((0.5, 0.5), None, 1)
    assert await grader_parts.facts(log) == 1
