"""More tenants in one host than the limits of what they share were made for."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from pipeline.capture.messages import Tool
from pipeline.harnesses.base import Trial, Verdict
from pipeline.harnesses.chat import ChatHarness
from pipeline.harnesses.environments.base import Outcome, Task, ToolUse
from pipeline.hosts import usage
from pipeline.log import Log
from schemas.config import Behaviour, Broker
from tests.integration.test_host_class import serving_host
from tests.log_parts import until

pytestmark = pytest.mark.timeout(60)
TENANTS = 1_010
"""The OpenAI SDK's client has 1,000 connections at most."""


class Echo:
    tools: tuple[Tool, ...] = ()

    def task(self, index: int) -> Task:
        return Task(index, f"Say {index}.", str(index))

    def call(self, task: Task, name: str, arguments: str) -> ToolUse:
        raise AssertionError("there are no tools")

    def verify(self, task: Task, outcome: Outcome) -> float:
        return float(outcome.answer == task.expected)


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    said = asked["messages"][-1]["content"].removeprefix("Say ").rstrip(".")
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}


async def test_no_tenant_waits_for_anothers_connection() -> None:
    """Every one's call is under way at the same time: none is answered before all are there."""
    usage.allow_files()
    there = 0
    all_there = asyncio.Event()

    async def complete(request: web.Request) -> web.Response:
        nonlocal there
        asked = await request.json()
        there += 1
        if there == TENANTS:
            all_there.set()
        await all_there.wait()
        return web.json_response(_answer(asked))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        harness, echo = ChatHarness(), Echo()
        trials = [Trial(url, Behaviour(), echo, echo.task(n), agent_s=50.0) for n in range(TENANTS)]
        async with asyncio.timeout(40):
            verdicts = await asyncio.gather(*map(harness.run, trials))
    finally:
        await runner.cleanup()
    assert verdicts == [Verdict(1.0)] * TENANTS


async def test_a_host_opens_as_many_files_as_it_may_and_says_when_they_are_too_few(
    broker: Broker, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        with caplog.at_level(logging.WARNING, "packtrain.host"):
            async with serving_host(broker, log.run, "few", 2) as few:
                await until(lambda: resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
                assert few.host.state == "serving"
            assert not caplog.records
            async with serving_host(broker, log.run, "many", hard):
                await until(lambda: bool(caplog.records))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert f"the process may have {hard}" in caplog.text
