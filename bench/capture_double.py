"""Doubles of an engine, as a process: vLLM's token-in/token-out wire, and Chat Completions for a peer that has no other.

A double answers always with the same tokens; a stream is one event a token, as vLLM writes it. With `tiny` it is no double
but the tiny engine on the policy that ships. Reads a line of JSON: `tiny`; or `ids` and `text` of the answer and `doubles`,
an object for each, which may have `delay_s` before an answer, `jitter_s` (an answer takes up to that much longer) and
`pace_s` between the events of a stream. Its answer, a line of JSON, has their `urls`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web


class Double:
    def __init__(
        self, ids: list[int], text: str, delay_s: float = 0.0, jitter_s: float = 0.0, pace_s: float = 0.0
    ) -> None:
        self._ids, self._text = ids, text
        self._words = [f"{word} " for word in text.split(" ")]
        self._delay_s, self._jitter_s, self._pace_s = delay_s, jitter_s, pace_s
        self._numbers = itertools.count()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/weight_info", self._weights)
        app.router.add_get("/health", self._weights)
        return app

    async def _wait(self) -> None:
        if self._delay_s:
            # Spread evenly, and the same in every run.
            part = next(self._numbers) * 0.6180339887 % 1.0
            await asyncio.sleep(self._delay_s + self._jitter_s * part)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        await self._wait()
        # What was asked for is given: a prompt of no tokens is nobody's.
        if not body["token_ids"]:
            return web.json_response({"error": {"message": "no tokens"}}, status=400)
        if not body.get("stream"):
            return _json({"request_id": body["request_id"], "choices": [_choice(self._ids, 0, True)]})
        last = len(self._ids) - 1
        return await self._events(
            request,
            (
                {"request_id": body["request_id"], "choices": [_choice([token], at, at == last)]}
                for at, token in enumerate(self._ids)
            ),
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        await self._wait()
        head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        counted = {
            "prompt_tokens": 1,
            "completion_tokens": len(self._ids),
            "total_tokens": 1 + len(self._ids),
        }
        if not body.get("stream"):
            message = {"role": "assistant", "content": self._text}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            return _json({**head, "object": "chat.completion", "choices": [choice], "usage": counted})
        deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in self._words), {}]
        chunks = (
            {
                **head,
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}],
            }
            for delta in deltas
        )
        return await self._events(request, chunks)

    async def _events(self, request: web.Request, chunks: Iterable[dict[str, Any]]) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at, chunk in enumerate(chunks):
            # Each at its own time: one that was late does not make the next ones late.
            if self._pace_s and (left := began + (at + 1) * self._pace_s - loop.time()) > 0:
                await asyncio.sleep(left)
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _weights(self, request: web.Request) -> web.Response:
        return _json({"weight_version": "1"})


def _choice(ids: list[int], start: int, last: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "stop" if last else None,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in ids]},
    }
    if last:
        made["weight_versions"] = [{"version": "1", "start": 0, "end": start + len(ids)}]
    return made


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def _tiny() -> web.Application:
    import torch

    from pipeline.engines.policies import TINY, policy_dir
    from pipeline.engines.tiny.engine import TinyEngine
    from pipeline.engines.tiny.server import create_app

    torch.set_num_threads(1)
    return create_app(TinyEngine(policy_dir(TINY)))


async def main() -> None:
    given = json.loads(sys.stdin.readline())
    if given.get("tiny"):
        apps = [_tiny()]
    else:
        apps = [Double(given["ids"], given["text"], **each).application() for each in given["doubles"]]
    runners = [
        web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1) for app in apps
    ]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    urls = [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    print(json.dumps({"urls": urls}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for runner in runners:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
