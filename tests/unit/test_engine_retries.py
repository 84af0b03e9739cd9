"""How long an engine that is away is asked again, and that somebody goes on looking whether it is."""

from __future__ import annotations

import asyncio
import time

import pytest

from pipeline.engines import replicas as module
from pipeline.engines.base import EngineUnavailable
from pipeline.engines.progress import Ask, Progress
from pipeline.engines.replicas import Replica, Replicas
from pipeline.engines.scores import Scores
from pipeline.engines.transport import Broken
from pipeline.engines.wire import PauseMode, SamplingParams


class Away(Replica):
    """A double of a server that answers nothing. `sick`: what its health checks raise, once."""

    def __init__(self, url: str, after: float = 0.0) -> None:
        self.url, self.after = url, after
        self.asked: list[float] = []
        self.checks = 0
        self.sick: Exception | None = None

    async def sample(self, ask: Ask, progress: Progress, watch: object, deadline: float):
        self.asked.append(time.monotonic())
        raise Broken("away", self.after)

    async def healthy(self, within: float = 5.0) -> bool:
        self.checks += 1
        sick, self.sick = self.sick, None
        if sick is not None:
            raise sick
        return False

    async def paused(self, within: float = 5.0) -> bool:
        return False

    async def score(self, *given: object) -> Scores:
        raise Broken("away")

    async def version(self) -> int:
        raise EngineUnavailable("away")

    async def update(self, directory: str, version: int, mode: PauseMode = "abort") -> None:
        raise EngineUnavailable("away")

    async def resume(self) -> None:
        raise EngineUnavailable("away")

    async def close(self) -> None: ...


async def test_an_engine_may_be_away_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(pause: float) -> None: ...

    away = Away("http://a")
    async with Replicas([away]) as engine:
        monkeypatch.setattr(module.asyncio, "sleep", at_once)
        monkeypatch.setattr(
            module.random, "uniform", lambda low, high: high if len(away.asked) < 1500 else 1e9
        )
        with pytest.raises(EngineUnavailable, match="no answer before the deadline"):
            await engine.generate([1], SamplingParams(max_tokens=1), "r", "s", within=36_000)
    assert len(away.asked) == 1500


async def test_those_who_are_told_when_to_come_again_do_not_come_all_at_once() -> None:
    away = Away("http://a", after=0.1)
    async with Replicas([away]) as engine:
        params = SamplingParams(max_tokens=1)
        calls = (engine.generate([1], params, f"r{i}", f"s{i}", within=0.35) for i in range(20))
        await asyncio.gather(*calls, return_exceptions=True)
    begun = away.asked[0]
    again = [at - begun for at in away.asked[20:40]]
    assert min(again) >= 0.1
    assert max(again) - min(again) > 0.03


async def test_a_health_check_that_fails_in_an_unforeseen_way_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HEALTH_S", 0.01)
    pair = [Away("http://a"), Away("http://b")]
    pair[0].sick = OSError("too many open files")
    async with Replicas(pair) as engine, asyncio.timeout(20):
        while pair[0].checks < 3:
            with pytest.raises(EngineUnavailable):
                await engine.generate([1], SamplingParams(max_tokens=1), "r", "s", within=0.05)
