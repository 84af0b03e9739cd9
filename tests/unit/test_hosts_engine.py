"""Waits that are measured around other parts: calls to the engine, and the queue of the loop's executor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pipeline.engines.base import Engine, EngineUnavailable, Generation, Watch
from pipeline.engines.wire import SamplingParams
from pipeline.hosts.engine import MeasuredEngine
from pipeline.hosts.metrics import MeasuredPool
from pipeline.hosts.waits import Waits
from tests.log_parts import until

ANSWER = Generation((1, 2), (-0.1, -0.2), (0, 0), "stop")


class Slow:
    """An engine whose first token and whose end are the test's to give."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.end = asyncio.Event()
        self.asked: dict[str, Any] = {}
        self.error: Exception | None = None

    async def generate(
        self, ids: Sequence[int], *given: object, watch: Watch | None = None, **asked: object
    ) -> Generation:
        self.asked = asked
        await self.first.wait()
        if self.error is not None:
            raise self.error
        if watch is not None:
            assert watch([1]) is None
        await self.end.wait()
        assert watch is None or watch([2]) == 1
        return ANSWER


async def open_s(waits: Waits) -> bool:
    """Whether somebody waits for the engine at this moment."""
    before = waits.totals()["engine"]
    await asyncio.sleep(0.005)
    return waits.totals()["engine"] > before


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_waits_until_its_first_token(streamed: bool) -> None:
    slow, waits = Slow(), Waits()
    engine = MeasuredEngine(cast(Engine, slow), waits)
    seen: list[int] = []

    def watch(tokens: Sequence[int]) -> int | None:
        seen.extend(tokens)
        return 1 if len(seen) == 2 else None

    call = asyncio.create_task(
        engine.generate(
            [5],
            cast(SamplingParams, None),
            "r",
            "s",
            watch=watch if streamed else None,
            routed_from=3,
            within=9.0,
        )
    )
    await asyncio.sleep(0)
    assert await open_s(waits)
    slow.first.set()
    await asyncio.sleep(0)
    await until(lambda: seen == [1] or not streamed)
    assert await open_s(waits) is not streamed
    slow.end.set()
    assert await call is ANSWER
    assert slow.asked == {"images": (), "routed_from": 3, "within": 9.0}
    assert seen == ([1, 2] if streamed else [])
    assert not await open_s(waits)
    assert waits.counts()["engine"] == 1


async def test_a_call_that_fails_waits_no_longer() -> None:
    slow, waits = Slow(), Waits()
    slow.error = EngineUnavailable("gone")
    slow.first.set()
    with pytest.raises(EngineUnavailable):
        await MeasuredEngine(cast(Engine, slow), waits).generate([5], cast(SamplingParams, None), "r", "s")
    assert not await open_s(waits)
    assert waits.counts()["engine"] == 1


async def test_the_queue_of_the_executor_is_measured() -> None:
    waits = Waits()
    asyncio.get_running_loop().set_default_executor(MeasuredPool(waits, 1))
    go = threading.Event()
    calls = [asyncio.create_task(asyncio.to_thread(go.wait, 20)) for _ in range(3)]
    await until(lambda: waits.counts()["threads"] == 1 and waits.totals()["threads"] > 0.02)
    # One that is cancelled before its turn waits no longer.
    calls.pop().cancel()
    await until(lambda: waits.counts()["threads"] == 2)
    go.set()
    assert await asyncio.gather(*calls) == [True] * 2
    assert waits.counts()["threads"] == 3
    before = waits.totals()["threads"]
    await asyncio.sleep(0.005)
    assert waits.totals()["threads"] == before
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(lambda: 1 // 0)
