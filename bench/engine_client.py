"""What the engine client costs the process that it runs in: a streamed token, a whole answer, a long prompt, routing.

    python bench/engine_client.py [--json FILE] [--quick]

The server is another process that replays prepared bytes of vLLM's wire, so that figures are the client's alone: CPU
microseconds of this process. Beside each stands the floor in the same run: aiohttp reading the same bytes and doing
nothing with them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from pipeline.engines.client import EngineClient
from pipeline.engines.vllm import GENERATE
from pipeline.engines.wire import SamplingParams

ROOT = Path(__file__).parent.parent


def _choice(count: int, first: int, last: bool, total: int, experts: str | None = None) -> bytes:
    entries = [
        {
            "token_id": first + i,
            "logprob": -1.2345678,
            "rank": 3,
            "top_logprobs": [{"token_id": 1, "logprob": -1.0, "rank": 3}],
        }
        for i in range(count)
    ]
    choice = {
        "index": 0,
        "finish_reason": "length" if last else None,
        "stop_reason": None,
        "token_ids": list(range(first, first + count)),
        "routed_experts": experts,
        "sampling_mask": None,
        "weight_versions": [{"version": "7", "start": 0, "end": total}] if last else None,
        "logprobs": {"content": entries},
    }
    answer = {"request_id": "generate-tokens-r", "usage": None, "output_mode": "tokens", "choices": [choice]}
    return json.dumps(answer, separators=(",", ":")).encode()


def _npy(rows: int) -> str:
    file = io.BytesIO()
    np.save(file, np.zeros((rows, 47, 8), np.uint8))
    return base64.b64encode(file.getvalue()).decode()


async def replay(request: web.Request) -> web.StreamResponse:
    """Answers as the prompt's first ids say: tokens, and rows of routing."""
    body = await request.json()
    total, rows = body["token_ids"][:2]
    if not body["stream"]:
        key = (total, rows)
        if key not in _WHOLE:
            _WHOLE[key] = _choice(total, 0, True, total, _npy(rows) if rows else None)
        return web.Response(body=_WHOLE[key], content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for i in range(total):
        # One token a write, and the loop's turn between two, as from an engine that steps.
        await response.write(b"data: " + _choice(1, i, i == total - 1, total) + b"\n\n")
        await asyncio.sleep(0)
    await response.write(b"data: [DONE]\n\n")
    return response


_WHOLE: dict[tuple[int, int], bytes] = {}


async def serve() -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(GENERATE, replay)
    app.router.add_get("/weight_info", lambda _: _done())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def _done() -> web.Response:
    return web.json_response({"weight_version": "7"})


async def _cost(calls: int, streams: int, call: Callable[[], Awaitable[Any]]) -> tuple[float, float, float]:
    """(CPU microseconds a call, wall seconds a call, longest time in seconds that the loop was held up)."""
    await call()
    lag = 0.0
    stop = False

    async def beat() -> None:
        nonlocal lag
        while not stop:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            lag = max(lag, time.perf_counter() - began - 0.001)

    beating = asyncio.create_task(beat())
    cpu, wall = time.process_time(), time.perf_counter()
    left = calls

    async def one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await call()

    await asyncio.gather(*(one() for _ in range(streams)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    stop = True
    await beating
    return 1e6 * cpu / calls, wall / calls, lag


async def measure(url: str, quick: bool) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []

    def say(name: str, value: float, unit: str, **more: Any) -> None:
        figures.append({"name": name, "value": round(value, 3), "unit": unit, **more})
        print(f"{name:>58} {value:>12.2f} {unit}  " + " ".join(f"{k}={v}" for k, v in more.items()))

    tokens, calls = (200, 20) if quick else (1000, 40)
    params = SamplingParams(max_tokens=tokens)
    async with EngineClient(url) as client, aiohttp.ClientSession() as bare:

        async def read(total: int, stream: bool, rows: int = 0) -> None:
            body = {"token_ids": [total, rows], "sampling_params": {"max_tokens": total}, "request_id": "r"}
            async with bare.post(f"{url}{GENERATE}", json=body | {"stream": stream}) as response:
                async for _ in response.content.iter_any():
                    pass

        async def ours(total: int, watched: bool, rows: int = 0) -> None:
            watch = (lambda ids: None) if watched else None
            ask = params.model_copy(update={"max_tokens": total})
            got = await client.generate(
                [total, rows] if not rows else _prompt(rows, total), ask, "r", "s", watch=watch
            )
            assert len(got.token_ids) == total
            assert (got.routing is not None) == bool(rows)

        for streams in (1, 32):
            cpu, _, _ = await _cost(calls, streams, lambda: ours(tokens, True))
            floor, _, _ = await _cost(calls, streams, lambda: read(tokens, True))
            say(f"streamed token, {streams} at once", cpu / tokens, "us CPU", floor=round(floor / tokens, 2))
        for total in (1, 1000):
            cpu, wall, _ = await _cost(calls * 10, 1, lambda total=total: ours(total, False))
            floor, bare_wall, _ = await _cost(calls * 10, 1, lambda total=total: read(total, False))
            say(
                f"whole call, {total} tokens",
                cpu,
                "us CPU",
                floor=round(floor, 1),
                wall_us=round(1e6 * wall),
                floor_wall_us=round(1e6 * bare_wall),
            )
        size = 100_000 if quick else 1_000_000
        array = np.full(size, 150_000, np.int32)
        array[:2] = (1, 0)
        for name, prompt in (("array", array), ("list", array.tolist())):
            cpu, wall, lag = await _cost(
                5, 1, lambda prompt=prompt: client.generate(prompt, SamplingParams(max_tokens=1), "r", "s")
            )
            say(f"prompt of {size:,} tokens as {name}", cpu / 1000, "ms CPU", lag_ms=round(1000 * lag, 1))
        rows = 2_000 if quick else 131_072
        cpu, wall, lag = await _cost(2, 1, lambda: ours(8, False, rows))
        say(f"routing of {rows:,} rows of 47 x 8", cpu / 1000, "ms CPU", lag_ms=round(1000 * lag, 1))
    return figures


def _prompt(rows: int, total: int) -> np.ndarray:
    """A prompt whose answer of `total` tokens has `rows` rows of routing."""
    prompt = np.ones(rows - total + 1, np.int32)
    prompt[:2] = (total, rows)
    return prompt


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the engine client.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            figures = asyncio.run(measure(url, arguments.quick))
        finally:
            server.kill()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
