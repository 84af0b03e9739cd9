"""A double of SGLang's server: it replays `/generate` and the control calls as SGLang 0.5.23 documents them and its source
has them. There is no build of SGLang for a CPU; what it really does, this cannot tell."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from pipeline.engines.tiny.server import serve

LAYERS, EXPERTS = 3, 2


def routed(token: int) -> int:
    """What this server routes a token to, in every layer."""
    return 300 + token


@dataclass
class SglangDouble:
    """Samples `token(i)` at place i of the whole sequence, up to max_new_tokens.

    incremental: a stream's events hold the new tokens only. spans: says versions per stretch, as newer servers do.
    cut_after: drop the connection after so many tokens of the next answers. on_token: called before each token.
    paused: requests end at once with reason `abort`.
    """

    version: str = "default"
    incremental: bool = False
    spans: bool = False
    routing: bool = True
    paused: bool = False
    cut_after: list[int | None] = field(default_factory=list)
    on_token: Callable[[int], Any] = lambda count: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    controls: list[tuple[str, Any]] = field(default_factory=list)

    @staticmethod
    def token(place: int) -> int:
        return 100 + place

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        prompt, stream = body["input_ids"], body["stream"]
        problem = None
        if max(prompt) >= 1000:
            problem = f"token {max(prompt)} is out of vocabulary"
        elif body.get("return_routed_experts") and not self.routing:
            problem = "return_routed_experts needs --enable-return-routed-experts"
        if problem is not None:
            # A ValueError of the request: a 400, or an event without a code.
            error = {"error": {"message": problem}}
            if not stream:
                return web.json_response(error, status=400)
            response = await self._stream(request)
            await response.write(f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode())
            return response
        limit = body["sampling_params"]["max_new_tokens"]
        cut = self.cut_after.pop(0) if self.cut_after else None
        response = await self._stream(request) if stream else None
        tokens: list[int] = []
        versions: list[str] = []
        reason: dict[str, Any] | None = None
        while reason is None:
            self.on_token(len(tokens))
            if cut is not None and len(tokens) >= cut:
                assert request.transport is not None
                request.transport.abort()
                return response or web.Response()
            if self.paused:
                reason = {"type": "abort", "message": "Abort in waiting queue"}
            else:
                tokens.append(self.token(len(prompt) + len(tokens)))
                versions.append(self.version)
                if len(tokens) == limit:
                    reason = {"type": "length", "length": limit}
            if response is not None:
                event = self._answer(body, tokens, versions, reason)
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if response is None:
            return web.json_response(self._answer(body, tokens, versions, reason))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, body: dict, tokens: list[int], versions: list[str], reason: dict | None) -> dict:
        shown = tokens[-1:] if self.incremental and body["stream"] else tokens
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": self.version,
            "output_token_logprobs": [[-t / 1000, t, None] for t in shown],
        }
        if self.spans:
            meta["weight_versions"] = [
                {"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)
            ]
        if body.get("return_routed_experts") and reason is not None:
            everything = (body["input_ids"] + tokens)[body["routed_experts_start_len"] : -1]
            rows = np.array([[[routed(t), k] for k in range(LAYERS)] for t in everything], "<i4")
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return {"text": "", "output_ids": shown, "meta_info": meta}

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def control(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.controls.append((request.path, body))
        if request.path == "/model_info":
            return web.json_response({"model_path": "m", "weight_version": self.version})
        if request.path == "/update_weights_from_disk":
            if body["model_path"] == "/missing":
                return web.json_response({"success": False, "message": "no such directory"}, status=400)
            self.version = body["weight_version"]
        if request.path in ("/pause_generation", "/continue_generation"):
            self.paused = request.path == "/pause_generation"
        return web.json_response({"success": True, "message": "ok"})


@asynccontextmanager
async def double(engine: SglangDouble) -> AsyncIterator[str]:
    """Its URL, on a free loopback port."""
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    for path in (
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/update_weight_version",
    ):
        app.router.add_post(path, engine.control)
    app.router.add_get("/model_info", engine.control)
    runner, port = await serve(app, "127.0.0.1", 0, None)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
