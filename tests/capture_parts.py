"""Parts for tests of capture and harnesses: a small real tokenizer, and a scripted double of an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.capture.call import Answer, Call
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.session import Session
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.base import Generation, ImageItem, Watch
from pipeline.engines.wire import SamplingParams

if TYPE_CHECKING:
    from pipeline.capture.server import Capture

SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


@cache
def byte_level_renderer() -> ChatMLRenderer:
    """A byte-level vocabulary with the special tokens of the tiny policy."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user\nassistant\nsystem\ntool\n"], trainer)
    return ChatMLRenderer(PolicyTokenizer(backend))


Reply = str | list[int] | Exception
Script = Callable[[str], Reply]
"""From the prompt as text (special tokens written out) to the turn as text, as ids, or an error to raise."""


class ScriptedEngine:
    """A double of an engine: samples what its script says; log-probability of its i-th token is -(i + 1) / 8.

    `gate`, while cleared, holds every answer back. `prompts` are the token ids that it was given, in order. A turn that is
    watched comes in portions of `portion` tokens.
    """

    def __init__(self, script: Script, renderer: ChatMLRenderer | None = None) -> None:
        self.renderer = renderer or byte_level_renderer()
        self.script = script
        self.version_number = 0
        self.version_asked = 0
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.images: list[list[str]] = []
        self.portion = 1
        self.generations: list[Generation] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Condition()
        self.down = False
        self.away = False

    async def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        request_id: str,
        session_id: str,
        *,
        watch: Watch | None = None,
        images: Sequence[ImageItem] = (),
        routed_from: int = 0,
        within: float | None = None,
    ) -> Generation:
        prompt = [int(token) for token in token_ids]
        self.prompts.append(prompt)
        self.params.append(params)
        self.images.append([image.digest for image in images])
        async with self.arrived:
            self.arrived.notify_all()
        await self.gate.wait()
        reply = self.script(self.renderer.tokenizer.decode(prompt, keep_special=True))
        if isinstance(reply, Exception):
            raise reply
        ids = self.turn(reply) if isinstance(reply, str) else reply
        most = params.max_tokens or len(ids)
        reason: Literal["stop", "length"] = "stop" if len(ids) <= most else "length"
        ids = ids[:most]
        if watch is not None:
            for at in range(0, len(ids), self.portion):
                kept = watch(ids[at : at + self.portion])
                if kept is not None:
                    ids, reason = ids[: at + kept], "stop"
                    break
                await self.step()
        logprobs = tuple(-(i + 1) / 8 for i in range(len(ids)))
        generation = Generation(tuple(ids), logprobs, (self.version_number,) * len(ids), reason)
        self.generations.append(generation)
        return generation

    async def step(self) -> None:
        """Between two portions of a turn that is watched."""
        await asyncio.sleep(0)

    async def version(self) -> int:
        return self.version_number

    async def healthy(self) -> bool:
        return not self.down

    async def close(self) -> None:
        pass

    def turn(self, text: str) -> list[int]:
        """Ids of a turn; <tool_call> marks and the end are special tokens."""
        ids: list[int] = []
        for i, piece in enumerate(text.replace("</tool_call>", "<tool_call>").split("<tool_call>")):
            if i:
                mark = self.renderer.tokenizer.special("<tool_call>" if i % 2 else "</tool_call>")
                assert mark is not None
                ids.append(mark)
            ids += self.renderer.tokenizer.encode(piece)
        return [*ids, self.renderer.stop_token_ids[0]]

    async def wait_for_prompts(self, count: int) -> None:
        async with asyncio.timeout(20), self.arrived:
            await self.arrived.wait_for(lambda: len(self.prompts) >= count)

    def application(self) -> web.Application:
        """The same double behind vLLM's wire format."""

        async def generate(request: web.Request) -> web.Response:
            if self.down:
                return web.json_response({"error": {"message": "down", "type": "unavailable"}}, status=503)
            body = await request.json()
            params = SamplingParams.model_validate(body["sampling_params"])
            session = request.headers.get("X-Session-ID", "")
            made = await self.generate(body["token_ids"], params, body["request_id"], session)
            content = [
                {"token_id": token, "logprob": logprob}
                for token, logprob in zip(made.token_ids, made.logprobs, strict=True)
            ]
            span = {"version": str(self.version_number), "start": 0, "end": len(made.token_ids)}
            choice = {
                "index": 0,
                "token_ids": made.token_ids,
                "finish_reason": made.finish_reason,
                "logprobs": {"content": content},
                "weight_versions": [span],
            }
            answer = {"request_id": body["request_id"], "choices": [choice]}
            if not body.get("stream"):
                return web.json_response(answer)
            # A stream of one event.
            events = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            return web.Response(text=events, content_type="text/event-stream")

        async def weights(request: web.Request) -> web.Response:
            self.version_asked += 1
            return web.json_response({"weight_version": str(self.version_number)})

        async def health(request: web.Request) -> web.Response:
            return web.Response(status=503 if self.away else 200)

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", generate)
        app.router.add_get("/health", health)
        app.router.add_get("/weight_info", weights)
        app.router.add_get("/weight_version", weights)
        return app


@asynccontextmanager
async def served(what: web.Application | Capture) -> AsyncIterator[str]:
    """The application, or a capture as its host runs it, on a free loopback port; yields its base URL."""
    runner = (
        web.AppRunner(what, access_log=None, shutdown_timeout=1)
        if isinstance(what, web.Application)
        else what.runner(1)
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def complete(
    tenant: Session, digest: str, dialogue: Dialogue, max_tokens: int | None = None, **given: Any
) -> Answer:
    """The answer to a call that came without headers."""
    call = Call(digest, dialogue, "policy", max_tokens=max_tokens, **given)
    return await tenant.answer(call, {}).whole()
