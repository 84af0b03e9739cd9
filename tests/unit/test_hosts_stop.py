"""How long a service that is told to stop has: its drain, unless it shall hurry, and a few seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from schemas.config import RunConfig
from services import process
from tests.log_parts import until


class Service:
    """Serves until it is let go, whatever it is told."""

    def __init__(self, drain_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "_STOP_S", 0.05)
        self.hurry = asyncio.Event()
        self.stop = process._told(asyncio.get_running_loop(), self.hurry)
        self.go = asyncio.Event()
        self.inner: asyncio.Future[None] = asyncio.ensure_future(self._serve())
        ending = asyncio.create_task(asyncio.Event().wait())
        self.whole = asyncio.create_task(
            process._served(self.inner, ending, self.stop, self.hurry, drain_s)  # pyright: ignore[reportArgumentType]  # a task that waits
        )

    async def _serve(self) -> None:
        await self.go.wait()


async def test_a_service_that_drains_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(60.0, monkeypatch)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(service.stop.is_set)
    later = time.monotonic() + 0.2
    await until(lambda: time.monotonic() > later)
    assert not service.inner.done()
    service.go.set()
    await service.whole
    assert not service.inner.cancelled()


async def test_told_again_it_has_only_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(60.0, monkeypatch)
    for event in (service.stop, service.hurry):
        os.kill(os.getpid(), signal.SIGTERM)
        await until(event.is_set)
    async with asyncio.timeout(20):
        await service.whole
    assert service.inner.cancelled()


async def test_a_service_without_a_drain_has_only_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(0.0, monkeypatch)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(20):
        await service.whole
    assert service.inner.cancelled()


def test_the_drain_is_the_pools_or_the_agent_loops_and_nobody_elses() -> None:
    config = RunConfig.model_validate(
        {
            "agent_loop": {"drain_s": 7},
            "pools": [{"name": "a", "harness": "chat", "drain_s": 3}, {"name": "b", "harness": "chat"}],
            "sources": [{"name": "s", "pool": "a", "groups": 1, "environment": {"kind": "arithmetic"}}],
        }
    )
    places = [("harness-a-0", "a"), ("harness-b-0", "b"), ("agent-loop-1", ""), ("sampler", "")]
    assert [process.drain_of(config, *place) for place in places] == [3, 0, 7, 0]


@pytest.mark.parametrize("bind", ["9090", "127.0.0.1:", ":80", "127.0.0.1:99999", "host:http"])
def test_an_address_for_metrics_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        RunConfig.model_validate({"metrics": {"bind": bind}, "pools": [], "sources": []})
