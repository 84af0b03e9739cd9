"""What an attempt waits for before it is opened, and what an engine's absence is to a trial under way."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pipeline.engines.progress import Ask, Progress
from pipeline.engines.replicas import Replicas
from pipeline.engines.wire import SamplingParams
from services.agent_loop import readiness
from services.agent_loop.readiness import Readiness
from tests.capture_parts import ScriptedEngine
from tests.unit.test_engine_retries import Away

LOGGER = logging.getLogger("test")


class Probed(ScriptedEngine):
    """Counts who asks whether it is there."""

    def __init__(self) -> None:
        super().__init__(lambda _: "a")
        self.probes = 0

    async def healthy(self) -> bool:
        self.probes += 1
        return not self.away


async def probed(engine: Probed, count: int) -> None:
    async with asyncio.timeout(20):
        while engine.probes < count:
            await asyncio.sleep(0.001)


async def test_an_engine_that_is_away_is_waited_for_and_one_asks_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "PROBE_S", (0.001, 0.002))
    engine = Probed()
    engine.away = True
    ready = Readiness(engine, LOGGER)
    waiting = asyncio.gather(*(ready.there() for _ in range(10)))
    await probed(engine, 50)  # each of them could have asked five times
    assert not waiting.done()
    engine.away = False
    async with asyncio.timeout(20):
        await waiting
    asked = engine.probes
    await ready.there()
    assert engine.probes == asked, "it answered just now"
    ready.doubt()
    await ready.there()
    assert engine.probes == asked + 1


async def test_the_wait_for_a_version_counts_only_while_the_engine_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "PROBE_S", (0.001, 0.002))
    monkeypatch.setattr(readiness, "VERSION_POLL_S", 0.01)

    class Updating(Probed):
        """At version 1 when it is asked for the second time."""

        async def version(self) -> int:
            self.version_asked += 1
            return min(self.version_asked - 1, 1)

    engine = Updating()
    engine.away = True
    ready = Readiness(engine, LOGGER)
    within = 0.4
    clock = asyncio.get_running_loop().time
    waiting, began = asyncio.create_task(ready.has_version(1, within)), clock()
    async with asyncio.timeout(20):
        while clock() - began < 1.5 * within:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        engine.away = False
        assert await waiting
        assert not await ready.has_version(2, 0.05), "it stays at version 1"


async def test_the_time_without_an_engine_is_told() -> None:
    class Back(Away):
        async def sample(self, ask: Ask, progress: Progress, watch: object, deadline: float):
            if len(self.asked) < 3:
                await super().sample(ask, progress, watch, deadline)
            progress.begin()
            progress.add([7], [-0.5])
            progress.label([{"version": "0", "start": 0, "end": 1}])
            return "stop"

    back = Back("http://a", after=0.05)
    async with Replicas([back]) as engine:
        first = await engine.generate([1], SamplingParams(max_tokens=4), "r", "s", within=20)
        second = await engine.generate([1], SamplingParams(max_tokens=4), "r", "s", within=20)
    assert first.away_s >= 3 * 0.05
    assert second.away_s == 0.0
