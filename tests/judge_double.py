"""A double of a judge model's server: it speaks OpenAI's chat completions, with answers that the test gives.

It is for what cannot be had on this machine: a model that judges well enough to answer a schema. What it cannot show is how well
a real judge follows a rubric.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Step = Callable[["JudgeDouble", web.Request], Any]


@dataclass
class JudgeDouble:
    """steps: what becomes of the next requests, in order; of all others `good`. hold: what `held` answers wait for."""

    steps: list[Step] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    asking: int = 0
    most: int = 0
    url: str = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.asking += 1
        self.most = max(self.most, self.asking)
        try:
            given = (self.steps.pop(0) if self.steps else good)(self, request)
            return await given if asyncio.iscoroutine(given) else given
        finally:
            self.asking -= 1


def verdicts(body: dict[str, Any], **changed: Any) -> str:
    """A whole answer to a request, all of quality 0.5."""
    asked = body["messages"][-1]["content"].rpartition("each once: ")[2].removesuffix(".")
    given = [
        {"sequence": each, "quality": 0.5, "hack": False, "reason": "as scripted", **changed}
        for each in asked.split(", ")
    ]
    return json.dumps({"sequences": given})


def completion(content: str | None, **changed: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    return {"id": "c", "object": "chat.completion", "choices": [{**choice, **changed}], "usage": usage}


def good(judge: JudgeDouble, _: web.Request) -> web.Response:
    return web.json_response(completion(verdicts(judge.bodies[-1])))


def says(content: str | None, **changed: Any) -> Step:
    return lambda judge, _: web.json_response(completion(content, **changed))


def status(number: int, text: str = "no", **headers: str) -> Step:
    return lambda judge, _: web.Response(status=number, text=text, headers=headers)


async def held(judge: JudgeDouble, _: web.Request) -> web.Response:
    body = judge.bodies[-1]
    await judge.hold.wait()
    return web.json_response(completion(verdicts(body)))


@asynccontextmanager
async def judge() -> AsyncIterator[JudgeDouble]:
    double = JudgeDouble()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/chat/completions", double._answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        double.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield double
    finally:
        double.hold.set()
        await runner.cleanup()
