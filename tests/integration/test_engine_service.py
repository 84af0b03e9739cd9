"""The engine as a service: it follows the log, and does not stay when it cannot sample."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.engines.client import EngineClient, EngineUnavailable
from pipeline.engines.policies import TINY, policy_dir
from pipeline.engines.tiny.engine import EngineDead
from pipeline.engines.tiny.model import load_policy, weights_to_bytes
from pipeline.engines.tiny.runner import ModelRunner
from pipeline.engines.wire import SamplingParams
from pipeline.log import Log
from pipeline.secret_file import SecretUnreadable
from pipeline.store import ObjectStore
from pipeline.store.keys import weights_key
from schemas.config import Broker
from schemas.facts import PolicyPublished
from services import engine
from services.process import Context
from tests.rollout_stage import configuration


@pytest.fixture
def context(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore, unused_tcp_port: int
) -> Context:
    config = configuration(tmp_path, broker, run_name, f"http://127.0.0.1:{unused_tcp_port}")
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"policy": TINY})})
    return Context(config, "engine", log, store, asyncio.Event(), logging.getLogger("packtrain.test"))


async def publish(context: Context, step: int) -> None:
    _, state = load_policy(policy_dir(TINY))
    weights = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ref = await context.store.create(weights_key(context.run, step, "abc"), weights_to_bytes(weights))
    await context.log.publish(PolicyPublished(step=step, weights=ref))


async def test_it_starts_with_the_newest_weights_and_follows_what_is_published(context: Context) -> None:
    await publish(context, 1)
    await publish(context, 2)
    serving = asyncio.create_task(engine.serve(context))
    async with EngineClient(context.config.engine.url) as client, asyncio.timeout(60):
        while not await client.healthy():
            assert not serving.done(), serving
        assert await client.version() == 2
        await publish(context, 3)
        while await client.version() != 3:
            assert not serving.done(), serving
        context.stop.set()
        await serving


async def test_a_step_that_fails_ends_the_service(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ModelRunner, batch: object) -> None:
        raise FloatingPointError("not finite")

    monkeypatch.setattr(ModelRunner, "step", broken)
    serving = asyncio.create_task(engine.serve(context))
    async with EngineClient(context.config.engine.url) as client, asyncio.timeout(60):
        while not await client.healthy():
            assert not serving.done(), serving
        with pytest.raises(EngineUnavailable):
            await client.generate((1, 2), SamplingParams(max_tokens=2), "r", "s", within=1.0)
        with pytest.raises(EngineDead, match="not finite"):
            await serving


async def test_with_a_token_file_only_its_holder_is_served(context: Context, tmp_path: Path) -> None:
    secret = tmp_path / "engine.token"
    settings = context.config.engine.model_copy(update={"token_file": str(secret)})
    guarded = replace(context, config=context.config.model_copy(update={"engine": settings}))
    with pytest.raises(SecretUnreadable, match=r"engine\.token_file .*engine\.token' cannot be read"):
        await engine.serve(guarded)
    secret.write_text("sesame\n")
    serving = asyncio.create_task(engine.serve(guarded))
    params = SamplingParams(max_tokens=2)
    async with (
        EngineClient(settings.url, "sesame") as friend,
        EngineClient(settings.url) as stranger,
        asyncio.timeout(60),
    ):
        while not await friend.healthy():
            assert not serving.done(), serving
        assert len((await friend.generate((1, 2), params, "r", "s")).token_ids) <= 2
        with pytest.raises(EngineUnavailable, match="401"):
            await stranger.generate((1, 2), params, "r", "s", within=1.0)
        guarded.stop.set()
        await serving
