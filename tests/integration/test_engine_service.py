"""The engine as a service: it follows the log, and does not stay when it cannot sample."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from pipeline.engines.base import EngineUnavailable
from pipeline.engines.client import EngineClient
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
from tests.sglang_double import SglangDouble
from tests.sglang_double import double as sglang_double
from tests.tiny_engine_parts import until
from tests.vllm_double import VllmDouble
from tests.vllm_double import double as vllm_double


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


async def test_it_listens_where_it_is_told_and_not_where_others_reach_it(context: Context) -> None:
    port = urlsplit(context.config.engine.url).port
    bound = {"url": f"http://engine.invalid:{port}", "bind": f"127.0.0.1:{port}"}
    config = context.config.model_copy(update={"engine": context.config.engine.model_copy(update=bound)})
    serving = asyncio.create_task(engine.serve(replace(context, config=config)))
    async with EngineClient(f"http://127.0.0.1:{port}") as client, asyncio.timeout(60):
        while not await client.healthy():
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


async def given(context: Context, tmp_path: Path, kind: str, urls: list[str]) -> Context:
    settings = context.config.engine.model_copy(
        update={
            "kind": kind,
            "url": urls[0],
            "replicas": tuple(urls[1:]),
            "weights_dir": str(tmp_path / "weights"),
        }
    )
    return replace(context, config=context.config.model_copy(update={"engine": settings}))


def reloads(controls: list) -> list[str]:
    """The directories that a double was told to read, in order."""
    return [
        body.get("model_path") or body["kwargs"]["weights_path"]
        for path, body in controls
        if path in ("/collective_rpc", "/update_weights_from_disk")
    ]


async def test_vllm_replicas_that_others_run_are_kept_at_what_is_published(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "CHECK_S", 0.05)
    monkeypatch.setattr(logging.getLogger("packtrain"), "propagate", True)
    first, second = VllmDouble(), VllmDouble(broken_reload=True)
    async with vllm_double(first) as a, vllm_double(second) as b, asyncio.timeout(60):
        kept = await given(context, tmp_path, "vllm", [a, b])
        await publish(context, 1)
        serving = asyncio.create_task(engine.serve(kept))
        await until(lambda: first.version == "1" or serving.done())
        # The other one's trouble is its own, and it stays paused: its weights may be half loaded.
        await until(lambda: len(reloads(second.controls)) >= 3)
        assert (second.version, second.paused, first.paused) == ("default", True, False)
        second.broken_reload = False
        await until(lambda: second.version == "1")
        for step in (2, 3, 4):
            await publish(context, step)
            await until(lambda step=step: {first.version, second.version} == {str(step)} or serving.done())
        # One that was started anew has the weights that it was started with.
        first.version = "default"
        await until(lambda: first.version == "4")
        root = tmp_path / "weights" / context.run
        assert set(reloads(first.controls)) == {str(root / f"{n:08d}") for n in (1, 2, 3, 4)}
        await until(lambda: len(list(root.iterdir())) == 2)
        files = {path.name for path in (root / "00000004").iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= files
        _, state = load_policy(root / "00000004")
        assert all(not tensor.any() for tensor in state.values())
        kept.stop.set()
        await serving
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert b in errors[0]
    assert not first.paused
    assert not second.paused


async def test_sglang_is_kept_at_what_is_published(context: Context, tmp_path: Path) -> None:
    sglang = SglangDouble()
    async with sglang_double(sglang) as url, asyncio.timeout(60):
        kept = await given(context, tmp_path, "sglang", [url])
        await publish(context, 5)
        serving = asyncio.create_task(engine.serve(kept))
        await until(lambda: (sglang.version == "5" and not sglang.paused) or serving.done())
        assert reloads(sglang.controls) == [str(tmp_path / "weights" / context.run / "00000005")]
        kept.stop.set()
        await serving


async def test_without_a_directory_that_they_read_the_service_says_so(context: Context) -> None:
    settings = context.config.engine.model_copy(update={"kind": "vllm"})
    nowhere = replace(context, config=context.config.model_copy(update={"engine": settings}))
    with pytest.raises(ValueError, match=r"engine\.weights_dir is empty"):
        await engine.serve(nowhere)


async def test_a_replica_that_hangs_in_loading_does_not_keep_the_others_from_newer_weights(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CHECK_S", 0.05)
    first, second = VllmDouble(), VllmDouble(slow_reload=True)
    async with vllm_double(first) as a, vllm_double(second) as b, asyncio.timeout(60):
        kept = await given(context, tmp_path, "vllm", [a, b])
        await publish(context, 1)
        serving = asyncio.create_task(engine.serve(kept))
        await until(lambda: bool(reloads(second.controls)) or serving.done())
        for step in (2, 3, 4, 5):
            await publish(context, step)
            await until(lambda step=step: first.version == str(step) or serving.done())
        root = tmp_path / "weights" / context.run
        loading = reloads(second.controls)[0]
        await until(lambda: len(list(root.iterdir())) == 3)
        assert Path(loading).is_dir(), "it may be reading it still"
        second.slow_reload = False
        await until(lambda: second.version == "5")
        kept.stop.set()
        await serving


async def test_a_replica_that_is_gone_for_good_does_not_fill_the_disk(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory
) -> None:
    monkeypatch.setattr(engine, "CHECK_S", 0.05)
    first = VllmDouble()
    gone = f"http://127.0.0.1:{unused_tcp_port_factory()}"
    async with vllm_double(first) as a, asyncio.timeout(60):
        kept = await given(context, tmp_path, "vllm", [a, gone])
        serving = asyncio.create_task(engine.serve(kept))
        for step in (1, 2, 3, 4, 5):
            await publish(context, step)
            await until(lambda step=step: first.version == str(step) or serving.done())
        root = tmp_path / "weights" / context.run
        await until(lambda: sorted(p.name for p in root.iterdir()) == ["00000004", "00000005"])
        kept.stop.set()
        await serving


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_that_was_left_paused_with_the_newest_weights_samples_again(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a service leaves it that dies between the last two calls of an update."""
    monkeypatch.setattr(engine, "CHECK_S", 0.05)
    left = VllmDouble(version="1", paused=True) if kind == "vllm" else SglangDouble(version="1", paused=True)
    serve = vllm_double(left) if isinstance(left, VllmDouble) else sglang_double(left)
    async with serve as url, asyncio.timeout(60):
        kept = await given(context, tmp_path, kind, [url])
        await publish(context, 1)
        serving = asyncio.create_task(engine.serve(kept))
        await until(lambda: not left.paused or serving.done())
        assert not left.paused
        kept.stop.set()
        await serving
