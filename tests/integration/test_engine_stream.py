"""Tokens as they come: from our engine over real sockets, and from a double of vLLM for what a CPU cannot give."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.engines.base import EngineRefused, EngineUnavailable, ImageItem
from pipeline.engines.client import EngineClient
from pipeline.engines.progress import Ask
from pipeline.engines.tiny.engine import EngineDead
from pipeline.engines.tiny.model import load_model, weights_to_bytes
from pipeline.engines.transport import Transport
from pipeline.engines.vllm import GENERATE, VllmReplica
from pipeline.engines.vllm_wire import request_body
from pipeline.engines.wire import SamplingParams
from tests.tiny_engine_parts import PROMPT, Running, random_policy, random_weights, serving, until
from tests.vllm_double import VllmDouble, double, routed

LONG = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return random_policy(tmp_path)


@pytest.fixture
async def running(policy: Path) -> AsyncIterator[Running]:
    async with serving(policy) as server:
        yield server


def token(place: int) -> int:
    return VllmDouble.token(place)


async def test_streamed_tokens_are_those_of_the_whole_answer(running: Running):
    params = SamplingParams(max_tokens=200, seed=4, top_k=5)
    whole = await running.client.generate(PROMPT, params, "r", "s")
    seen: list[int] = []
    events = 0

    def watch(tokens) -> None:
        nonlocal events
        events += 1
        seen.extend(tokens)

    prompt = np.array(PROMPT, np.int32)
    got = await running.client.generate(prompt, params, "r2", "s", watch=watch)
    assert got == whole
    assert tuple(seen) == whole.token_ids
    assert events > 50
    assert all(len(c) <= 5 and t in c for t, c in zip(got.token_ids, got.candidates, strict=True))


async def test_a_watcher_ends_a_turn_where_it_says_and_the_engine_stops(running: Running):
    seen: list[int] = []

    def watch(tokens) -> int | None:
        seen.extend(tokens)
        return 0 if len(seen) >= 30 else None

    got = await running.client.generate(
        PROMPT, SamplingParams(max_tokens=1900, seed=1), "r", "s", watch=watch
    )
    assert got.finish_reason == "stop"
    assert 0 < len(got.token_ids) < 30 <= len(seen)
    assert got.token_ids == tuple(seen[: len(got.token_ids)])
    assert len(got.logprobs) == len(got.versions) == len(got.token_ids)
    await until(lambda: not running.engine.scheduler.running)
    assert running.engine.counters.sampled_tokens < 1900
    assert running.engine.scheduler.free_blocks == 2048


async def test_a_stream_over_a_weight_update_has_per_token_versions(running: Running):
    seen: list[int] = []
    params = SamplingParams(max_tokens=700, seed=1)
    task = asyncio.create_task(running.client.generate(PROMPT, params, "r", "s", watch=seen.extend))
    await until(lambda: len(seen) >= 50)
    await running.post("/pause", params={"mode": "abort"})
    await running.engine.load_weights(weights_to_bytes(random_weights(2)), 3)
    await running.post("/resume")
    got = await task
    switch = got.versions.index(3)
    assert 50 <= switch < 700
    assert got.versions == (0,) * switch + (3,) * (700 - switch)
    assert (tuple(seen), got.resumed) == (got.token_ids, 1)


async def test_a_step_that_fails_in_mid_stream_is_the_engines_fault(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    def broken(batch):
        raise FloatingPointError("not finite")

    def watch(tokens) -> None:
        monkeypatch.setattr(running.engine._runner, "step", broken)

    with pytest.raises(EngineUnavailable, match="not finite"):
        await running.client.generate(
            PROMPT, SamplingParams(max_tokens=900), "r", "s", watch=watch, within=1.0
        )
    with pytest.raises(EngineDead):
        await running.engine.ended()


async def test_refusals_of_a_stream_are_told_at_once(running: Running):
    with pytest.raises(EngineRefused, match="outside the vocabulary"):
        await running.client.generate((99,), SamplingParams(max_tokens=1), "r", "s", watch=lambda t: None)


async def test_scores_of_a_generation_are_its_log_probabilities(running: Running, policy: Path):
    got = await running.client.generate(PROMPT, SamplingParams(max_tokens=60, seed=3), "r", "s")
    ids = [*PROMPT, *got.token_ids]
    scores = await running.client.score(np.array(ids, np.int32), 3, "score")
    assert scores.logprobs[len(PROMPT) :].tolist() == pytest.approx(got.logprobs, abs=1e-4)
    with torch.inference_mode():
        whole = load_model(policy)(torch.tensor([ids])).log_softmax(-1)[0, :-1]
    best = whole.topk(3)
    assert scores.top_ids[1:].tolist() == best.indices.tolist()
    assert np.allclose(scores.top_logprobs[1:], best.values.numpy(), atol=1e-4)
    assert (scores.logprobs.dtype, scores.top_ids.dtype) == (np.float32, np.int32)
    with pytest.raises(EngineRefused, match="outside the vocabulary"):
        await running.client.score([99], 0, "score")


async def test_a_connection_that_breaks_loses_no_token_and_repeats_none():
    engine = VllmDouble(version="7", cut_after=[5, 0, 3, None])
    seen: list[int] = []
    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        params = SamplingParams(max_tokens=20, seed=1)
        got = await client.generate(LONG, params, "r", "s", watch=seen.extend)
    assert got.token_ids == tuple(seen) == tuple(token(i) for i in range(6, 26))
    assert got.logprobs == pytest.approx([-t / 1000 for t in got.token_ids])
    # The broken parts say no version: they have the one that was known when they were sent.
    assert set(got.versions) == {7}
    # What broke off without a token is repeated, not continued.
    assert got.resumed == 2
    sent = [r["token_ids"] for r in engine.requests]
    assert sent == [
        LONG,
        LONG + list(got.token_ids[:5]),
        LONG + list(got.token_ids[:5]),
        LONG + list(got.token_ids[:8]),
    ]
    assert [r["sampling_params"]["max_tokens"] for r in engine.requests] == [20, 15, 15, 12]
    assert len({r["request_id"] for r in engine.requests}) == 4
    seeds = [r["sampling_params"]["seed"] for r in engine.requests]
    assert seeds[1] == seeds[2]
    assert len(set(seeds)) == 3


async def test_all_who_ask_at_once_know_the_version_that_is_in_use():
    engine = VllmDouble(version="7", cut_after=[5] * 8)
    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        params = SamplingParams(max_tokens=6, seed=1)
        calls = (client.generate(LONG, params, f"r{i}", "s", watch=lambda _: None) for i in range(8))
        found = await asyncio.gather(*calls)
    assert [set(got.versions) for got in found] == [{7}] * 8


async def test_a_connection_to_a_host_that_vanishes_is_given_up():
    """No host vanishes here: what makes the kernel notice is asked of it."""
    async with double(VllmDouble(silent=True)) as url:
        http = Transport(url)
        body = Ask(LONG, SamplingParams(max_tokens=1), "r", "s", stream=True)
        async with http._post(GENERATE, request_body(body, bool), {}, time.monotonic() + 20) as response:
            assert response.connection is not None
            assert response.connection.transport is not None
            used = response.connection.transport.get_extra_info("socket")
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, between, count = (used.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle + between * count <= 60
        await http.close()


async def test_tokens_of_a_broken_stream_are_called_no_newer_than_they_are():
    engine = VllmDouble(version="7", cut_after=[6])

    def update(count: int) -> None:
        if count == 3 and len(engine.requests) == 1:
            engine.version = "8"

    engine.on_token = update
    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        got = await client.generate(LONG, SamplingParams(max_tokens=10), "r", "s", watch=lambda t: None)
    assert got.versions == (7,) * 6 + (8,) * 4


async def test_a_turn_that_the_watcher_ends_is_aborted_by_its_id_and_keeps_versions_and_routing():
    engine = VllmDouble(version="7", routing=True)

    def update(count: int) -> None:
        if count == 4:
            engine.version = "8"

    engine.on_token = update
    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        got = await client.generate(
            LONG,
            SamplingParams(max_tokens=100_000),
            "r",
            "s",
            watch=lambda t: 1 if t[-1] >= token(12) else None,
            routed_from=2,
        )
    assert got.token_ids == tuple(token(i) for i in range(6, 13))
    assert got.versions == (7,) * 4 + (8,) * 3
    assert got.finish_reason == "stop"
    assert ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-r"]}) in engine.controls
    assert got.routing is not None
    assert got.routing.start == 2
    ids = LONG + list(got.token_ids)
    assert got.routing.rows[:, 0, 0].tolist() == [routed(t) for t in ids[2:-1]]


@pytest.mark.parametrize("watched", [False, True])
async def test_routing_of_a_continued_generation_has_each_row_once(watched: bool):
    engine = VllmDouble(routing=True, cut_after=[4, None] if watched else [])
    watch = (lambda t: None) if watched else None
    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        got = await client.generate(LONG, SamplingParams(max_tokens=9), "r", "s", watch=watch, routed_from=5)
    assert got.routing is not None
    ids = LONG + list(got.token_ids)
    assert got.routing.start == 5
    assert got.routing.rows[:, 0, 0].tolist() == [routed(t) for t in ids[5:-1]]
    assert got.routing.rows.shape == (len(ids) - 6, 2, 2)
    assert [r["sampling_params"]["routed_experts_prompt_start"] for r in engine.requests] == [5] * (
        1 + watched
    )


@pytest.mark.parametrize("watched", [False, True])
async def test_an_image_is_sent_once_and_again_when_the_engine_forgot_it(watched: bool):
    engine = VllmDouble()
    # Tokens 1 and 2 of the prompt are placeholders of the first, token 3 that of the second.
    images = [
        ImageItem("a" * 64, "image/png", b"pixels", 1, 2),
        ImageItem("b" * 64, "image/png", b"more", 3, 1),
    ]
    watch = (lambda t: None) if watched else None

    async def turn(client: EngineClient, shown: list[ImageItem]) -> None:
        await client.generate(LONG, SamplingParams(max_tokens=2), "r", "s", images=shown, watch=watch)

    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        await turn(client, images[:1])
        await turn(client, images)
        engine.images.clear()
        await turn(client, images)
        # New weights: what images were made into under the old ones is gone.
        replica = VllmReplica(url)
        await replica.update("weights", 3)
        await replica.close()
        engine.images.clear()
        await turn(client, images)
    with_bytes = [[part["url"] is not None for part in r["content_parts"]] for r in engine.requests]
    assert with_bytes == [[True], [False, True], *[[False, False], [True, True]] * 2]
    assert {tuple(r["token_ids"]) for r in engine.requests} == {(LONG[0], LONG[1], *LONG[3:])}


async def test_an_engine_that_refuses_while_paused_is_waited_for():
    engine = VllmDouble(paused=True)
    async with double(engine) as url, EngineClient(url, timeout=20) as client:
        with pytest.raises(EngineUnavailable, match="paused"):
            await client.generate(LONG, SamplingParams(max_tokens=2), "r", "s", within=0.3)
        waiting = asyncio.create_task(client.generate(LONG, SamplingParams(max_tokens=2), "r", "s"))
        await until(lambda: len(engine.requests) >= 3)
        engine.paused = False
        assert len((await waiting).token_ids) == 2


async def test_a_request_that_hangs_ends_with_its_deadline():
    engine = VllmDouble(silent=True)
    async with double(engine) as url, EngineClient(url) as client:
        for watch in (None, lambda t: None):
            with pytest.raises(EngineUnavailable, match="deadline"):
                await client.generate(LONG, SamplingParams(max_tokens=2), "r", "s", within=0.3, watch=watch)


async def test_an_update_is_pause_reload_version_resume_and_stays_paused_when_it_fails():
    from pipeline.engines.vllm import VllmReplica

    engine = VllmDouble(version="1")
    async with double(engine) as url:
        replica = VllmReplica(url)
        await replica.update("/weights/2", 2, "keep")
        assert engine.controls == [
            ("/pause", {"mode": "keep"}),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights/2"}}),
            ("/update_weight_version", {"new_version": "2"}),
            ("/resume", {}),
        ]
        assert await replica.version() == 2
        engine.broken_reload = True
        with pytest.raises(EngineUnavailable, match="no such directory"):
            await replica.update("/weights/3", 3)
        assert (engine.paused, engine.version) == (True, "2")
        await replica.close()
