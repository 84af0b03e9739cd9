"""A double of vLLM's server: it replays the wire of vLLM 0.32 as it was seen, with answers that the test gives.

It is for what cannot be had from a small engine on a CPU: versions in the last event only, routed experts, an image cache
that forgets, a stream that is cut at a byte, and 503 while paused. Against the real server the same client is tested by
`make vllm`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from pipeline.engines.tiny.server import serve


def routed(token: int) -> int:
    """What this server routes a token to: a check on whose row is where."""
    return token % 251


def npy(tokens: list[int], start: int) -> str:
    """Routed experts of all but the last of `tokens`, from row `start` on."""
    rows = np.array([[[routed(t), 7], [routed(t + 1), 8]] for t in tokens[start:-1]], np.uint8)
    file = io.BytesIO()
    np.save(file, rows.reshape(-1, 2, 2))
    return base64.b64encode(file.getvalue()).decode()


@dataclass
class VllmDouble:
    """Samples `token(i)` at place i of the whole sequence, up to max_tokens, under `version`.

    paused: refuse requests. silent: answer no token, as vLLM 0.32 does while it is paused. deaf: answer no control, health checks among them. mad: say that
    what was sampled could not be. slow_reload: read no weights while it is set.
    cut_after: drop the connection after so many tokens of the next answers, one number an answer; None: never.
    on_token: called before each token with the number of tokens of this answer so far.
    """

    version: str = "default"
    routing: bool = False
    cut_after: list[int | None] = field(default_factory=list)
    on_token: Callable[[int], Any] = lambda count: None
    paused: bool = False
    silent: bool = False
    deaf: bool = False
    images: set[str] = field(default_factory=set)
    requests: list[dict[str, Any]] = field(default_factory=list)
    controls: list[tuple[str, Any]] = field(default_factory=list)
    broken_reload: bool = False
    slow_reload: bool = False
    mad: bool = False
    _aborted: set[str] = field(default_factory=set)

    @staticmethod
    def token(place: int) -> int:
        return 100 + place

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.paused:
            return web.json_response(
                {"error": {"message": "paused", "type": "engine_paused", "code": 503}}, status=503
            )
        for part in body.get("content_parts", ()):
            if part["url"] is not None:
                self.images.add(part["uuid"])
            elif part["uuid"] not in self.images:
                error = {"message": f"{part['uuid']} is not in the cache", "code": 400}
                return await self._refuse(request, body, error)
        return await self._answer(request, body)

    async def _refuse(self, request: web.Request, body: dict, error: dict) -> web.StreamResponse:
        if not body["stream"]:
            return web.json_response({"error": error}, status=error["code"])
        response = await self._stream(request)
        await response.write(f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode())
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return response

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        name = f"generate-tokens-{body['request_id']}"
        prompt, limit = body["token_ids"], body["sampling_params"]["max_tokens"]
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        cut = self.cut_after.pop(0) if self.cut_after else None
        response = await self._stream(request) if body["stream"] else None
        tokens: list[int] = []
        versions: list[str] = []
        reason = None
        while reason is None:
            self.on_token(len(tokens))
            while self.silent:
                await asyncio.sleep(0.01)
            if cut is not None and len(tokens) >= cut:
                assert request.transport is not None
                request.transport.abort()
                return response or web.Response()
            new = [] if name in self._aborted else [self.token(len(prompt) + len(tokens))]
            tokens += new
            versions += [self.version] * len(new)
            reason = "abort" if not new else "length" if len(tokens) == limit else None
            if response is not None:
                last = reason is not None
                event = self._choice(prompt, tokens, new, versions if last else None, reason, start)
                await response.write(
                    f"data: {json.dumps({'request_id': name, 'choices': [event]})}\n\n".encode()
                )
                await asyncio.sleep(0)
        if response is None:
            choice = self._choice(prompt, tokens, tokens, versions, reason, start)
            return web.json_response({"request_id": name, "choices": [choice], "prompt_logprobs": None})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, prompt, tokens, new, versions, reason, start) -> dict:
        spans = None
        if versions is not None:
            spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]
        experts = npy(prompt + tokens, start) if self.routing and reason is not None else None
        return {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": new,
            "routed_experts": experts,
            "sampling_mask": None,
            "weight_versions": spans,
            "logprobs": {
                "content": [
                    {"token_id": t, "logprob": -9999.0 if self.mad else -t / 1000, "rank": 1} for t in new
                ]
            },
        }

    async def control(self, request: web.Request) -> web.Response:
        raw = await request.read()
        while self.deaf:
            await asyncio.sleep(0.01)
        body = json.loads(raw) if raw else dict(request.query)
        self.controls.append((request.path, body))
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/is_paused":
            return web.json_response({"is_paused": self.paused or self.silent})
        if request.path == "/update_weight_version":
            self.version = body["new_version"]
        while request.path == "/collective_rpc" and self.slow_reload:
            await asyncio.sleep(0.01)
        if request.path == "/collective_rpc" and self.broken_reload:
            return web.json_response({"error": "no such directory"}, status=500)
        if request.path == "/inference/v1/abort_requests":
            self._aborted |= set(body["request_ids"])
            return web.Response()
        if request.path in ("/pause", "/resume"):
            self.paused = request.path == "/pause"
        return web.json_response({"status": "ok"})


@asynccontextmanager
async def double(engine: VllmDouble) -> AsyncIterator[str]:
    """Its URL, on a free loopback port."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", engine.generate)
    for path in (
        "/pause",
        "/resume",
        "/update_weight_version",
        "/collective_rpc",
        "/inference/v1/abort_requests",
    ):
        app.router.add_post(path, engine.control)
    for path in ("/weight_info", "/is_paused", "/health"):
        app.router.add_get(path, engine.control)
    runner, port = await serve(app, "127.0.0.1", 0, None)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        engine.silent = engine.deaf = False
        await runner.cleanup()
