"""The SGLang client over real sockets, against a double that replays the documented wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.engines.base import Engine, EngineRefused, EngineUnavailable
from pipeline.engines.client import experts_per_token, open_engine, open_replicas
from pipeline.engines.replicas import Replicas
from pipeline.engines.sglang import SglangReplica
from pipeline.engines.wire import SamplingParams
from schemas.config import Engine as EngineConfig
from tests.sglang_double import EXPERTS, LAYERS, SglangDouble, double, routed
from tests.tiny_engine_parts import until

PROMPT = [1, 2, 3, 4, 5, 6]


def token(place: int) -> int:
    return SglangDouble.token(place)


@asynccontextmanager
async def client(engine: SglangDouble, experts: int | None = None) -> AsyncIterator[Replicas]:
    async with double(engine) as url, Replicas([SglangReplica(url, None, experts)], timeout=20) as opened:
        yield opened


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_that_breaks_is_continued(incremental: bool):
    engine = SglangDouble(version="4", incremental=incremental, cut_after=[5, None])
    seen: list[int] = []
    async with client(engine) as opened:
        got = await opened.generate(PROMPT, SamplingParams(max_tokens=12), "r", "s", watch=seen.extend)
    assert got.token_ids == tuple(seen) == tuple(token(i) for i in range(6, 18))
    assert got.logprobs == pytest.approx([-t / 1000 for t in got.token_ids])
    assert (got.versions, got.resumed, got.finish_reason) == ((4,) * 12, 1, "length")
    assert engine.requests[1]["input_ids"] == [*PROMPT, *got.token_ids[:5]]
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 7


@pytest.mark.parametrize("watched", [False, True])
async def test_a_weight_update_aborts_and_the_rest_has_the_new_version(watched: bool):
    engine = SglangDouble(version="4")

    def pause(count: int) -> None:
        if count == 3 and len(engine.requests) == 1:
            engine.paused = True

    engine.on_token = pause
    async with client(engine) as opened:
        params = SamplingParams(max_tokens=10)
        task = asyncio.create_task(
            opened.generate(PROMPT, params, "r", "s", watch=(lambda t: None) if watched else None)
        )
        await until(lambda: len(engine.requests) >= 3)
        engine.version, engine.paused = "5", False
        got = await task
    assert got.token_ids == tuple(token(i) for i in range(6, 16))
    # Whole, they are called 5 only if 5 was known to be in use when they were asked for.
    assert got.versions[:3] == (4, 4, 4)
    assert set(got.versions[3:]) <= ({5} if watched else {4, 5})
    assert got.resumed >= 2


async def test_versions_per_stretch_are_taken_where_they_are_said():
    engine = SglangDouble(version="4", spans=True)

    def update(count: int) -> None:
        engine.version = "4" if count < 3 else "5"

    engine.on_token = update
    async with client(engine) as opened:
        got = await opened.generate(PROMPT, SamplingParams(max_tokens=5), "r", "s")
    assert got.versions == (4, 4, 4, 5, 5)


async def test_routing_is_narrowed_and_has_the_rows_that_were_not_known():
    engine = SglangDouble()
    async with client(engine, EXPERTS) as opened:
        got = await opened.generate(PROMPT, SamplingParams(max_tokens=4), "r", "s", routed_from=3)
    assert got.routing is not None
    ids = PROMPT + list(got.token_ids)
    assert got.routing.start == 3
    assert got.routing.rows.shape == (len(ids) - 4, LAYERS, EXPERTS)
    assert got.routing.rows.dtype.itemsize == 2
    assert got.routing.rows[:, 0, 0].tolist() == [routed(t) for t in ids[3:-1]]


@pytest.mark.parametrize("watched", [False, True])
async def test_a_server_that_gives_no_routing_is_asked_for_none(watched: bool):
    engine = SglangDouble(routing=False)
    watch = (lambda t: None) if watched else None
    async with client(engine, EXPERTS) as opened:
        for _ in range(2):
            got = await opened.generate(PROMPT, SamplingParams(max_tokens=4), "r", "s", watch=watch)
            assert got.routing is None
    assert ["return_routed_experts" in r for r in engine.requests] == [True, False, False]


async def test_a_watcher_ends_the_turn():
    engine = SglangDouble(version="2")
    async with client(engine) as opened:
        got = await opened.generate(PROMPT, SamplingParams(max_tokens=9999), "r", "s", watch=lambda t: 0)
    assert (got.token_ids, got.finish_reason) == ((), "stop")


@pytest.mark.parametrize("watched", [False, True])
async def test_what_a_request_did_wrong_is_told_at_once(watched: bool):
    async with client(SglangDouble()) as opened:
        with pytest.raises(EngineRefused, match="token 1234 is out of vocabulary"):
            await opened.generate(
                [1234], SamplingParams(max_tokens=1), "r", "s", watch=(lambda t: None) if watched else None
            )


async def test_control_is_in_sglangs_words():
    engine = SglangDouble(version="1")
    async with double(engine) as url:
        replica = SglangReplica(url)
        assert await replica.healthy()
        assert await replica.version() == 1
        engine.controls.clear()
        await replica.update("/weights/2", 2)
        assert engine.controls == [
            ("/pause_generation", {"mode": "abort"}),
            (
                "/update_weights_from_disk",
                {"model_path": "/weights/2", "weight_version": "2", "flush_cache": True},
            ),
            ("/continue_generation", {}),
        ]
        with pytest.raises(EngineUnavailable, match="no such directory"):
            await replica.update("/missing", 3)
        assert engine.paused
        await replica.resume()
        engine.controls.clear()
        await replica.rename(9)
        await replica.pause("keep")
        assert engine.controls == [
            ("/update_weight_version", {"new_version": "9", "abort_all_requests": False}),
            ("/pause_generation", {"mode": "in_place"}),
        ]
        with pytest.raises(ValueError, match="wait"):
            await replica.pause("wait")
        await replica.close()


async def test_the_experts_of_a_token_are_read_from_the_policy(tmp_path: Path):
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    for config, expected in (
        ({"num_experts_per_tok": 8}, 8),
        ({"text_config": {"num_experts_per_tok": 4}}, 4),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert experts_per_token(str(tmp_path)) == expected
    given = EngineConfig(kind="sglang", url="http://a:1", replicas=("http://b:1",), policy=str(tmp_path))
    assert all(isinstance(replica, SglangReplica) for replica in open_replicas(given, None))
    opened = open_engine(given, None, 1)
    # What capture is given.
    engine: Engine = opened
    assert engine is opened
    assert list(opened.views()) == ["http://a:1", "http://b:1"]
