"""Parts for tests of the tiny engine: a small random policy, and an engine that serves it over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import torch

from pipeline.engines.client import EngineClient
from pipeline.engines.tiny.engine import TinyEngine
from pipeline.engines.tiny.model import Llama, LlamaConfig, save_policy
from pipeline.engines.tiny.server import create_app, serve
from pipeline.engines.wire import SamplingParams

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=2048,
)
PROMPT = (1, 2, 3)


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach().clone() if p.ndim == 1 else torch.randn(p.shape, generator=generator) * 0.3
        for name, p in Llama(CONFIG).named_parameters()
    }


def random_policy(tmp_path: Path) -> Path:
    save_policy(tmp_path / "policy", CONFIG, random_weights(1))
    return tmp_path / "policy"


class Running:
    def __init__(self, engine: TinyEngine, url: str) -> None:
        self.engine, self.url = engine, url
        self.http = aiohttp.ClientSession(base_url=url)
        self.client = EngineClient(url, timeout=60)

    async def post(self, path: str, **kwargs) -> tuple[int, dict]:
        async with self.http.post(path, **kwargs) as response:
            return response.status, await response.json()

    def start(self, max_tokens: int, **params) -> asyncio.Task:
        asked = SamplingParams(max_tokens=max_tokens, **params)
        return asyncio.create_task(self.client.generate(PROMPT, asked, "r", "s"))


@asynccontextmanager
async def serving(policy: Path) -> AsyncIterator[Running]:
    """An engine on a free loopback port, with a client."""
    engine = TinyEngine(policy, max_running=64, max_context=2048)
    runner, port = await serve(create_app(engine), "127.0.0.1", 0, None)
    server = Running(engine, f"http://127.0.0.1:{port}")
    try:
        yield server
    finally:
        await server.http.close()
        await server.client.close()
        await runner.cleanup()


async def until(condition: Callable[[], bool], within: float = 20) -> None:
    """Wait for a condition with a deadline."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.002)


def sampled(engine: TinyEngine) -> int:
    return sum(len(s.output) for s in engine.scheduler.running)
