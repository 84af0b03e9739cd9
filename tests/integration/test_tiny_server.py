"""The engine over real sockets: refusals, batching, pauses, weight swaps in mid-generation, and its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch

from pipeline.engines.base import EngineRefused, EngineUnavailable
from pipeline.engines.client import EngineClient
from pipeline.engines.tiny.engine import EngineDead, TinyEngine
from pipeline.engines.tiny.model import load_model, save_policy, weights_to_bytes
from pipeline.engines.tiny.server import create_app, serve
from pipeline.engines.wire import SamplingParams
from tests.tiny_engine_parts import (
    CONFIG,
    PROMPT,
    Running,
    random_policy,
    random_weights,
    sampled,
    serving,
    until,
)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return random_policy(tmp_path)


@pytest.fixture
async def running(policy: Path) -> AsyncIterator[Running]:
    async with serving(policy) as server:
        yield server


async def test_generation_has_vllms_shape(running: Running):
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 5, "seed": 1, "logprobs": 0},
        "request_id": "abc",
    }
    status, answer = await running.post("/inference/v1/generate", json=body)
    assert status == 200
    assert answer["request_id"] == "generate-tokens-abc"
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 5
    assert [c["token_id"] for c in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]


async def test_a_stream_has_vllms_shape(running: Running):
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 40, "seed": 1},
        "request_id": "abc",
        "stream": True,
    }
    async with running.http.post("/inference/v1/generate", json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    answers = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {a["request_id"] for a in answers} == {"generate-tokens-abc"}
    choices = [a["choices"][0] for a in answers]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    _, whole = await running.post("/inference/v1/generate", json=body | {"stream": False})
    tokens = whole["choices"][0]["token_ids"]
    assert [t for c in choices for t in c["token_ids"]] == tokens
    entries = [entry for c in choices for entry in c["logprobs"]["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    # More than vLLM says: the versions so far, with every event.
    ends = list(itertools.accumulate(len(c["token_ids"]) for c in choices))
    assert [c["weight_versions"] for c in choices] == [
        [{"version": "0", "start": 0, "end": end}] for end in ends
    ]


async def test_a_stream_whose_client_vanished_leaves_the_batch(running: Running):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1900}, "stream": True}
    async with running.http.post("/inference/v1/generate", json=body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await until(lambda: not running.engine.scheduler.running)
    assert running.engine.counters.sampled_tokens < 1900
    assert running.engine.scheduler.free_blocks == 2048


async def test_prompt_log_probabilities_have_vllms_shape(running: Running):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
    status, answer = await running.post("/inference/v1/generate", json=body)
    assert status == 200
    none, *entries = answer["prompt_logprobs"]
    assert none is None
    assert [next(iter(entry)) for entry in entries] == [str(t) for t in PROMPT[1:]]
    for entry in entries:
        ranks = {value.get("rank"): value["logprob"] for value in entry.values()}
        assert ranks[1] >= ranks[2]
        assert len(entry) in (2, 3)
    assert len(answer["choices"][0]["token_ids"]) == 1


async def test_stop_token_ends_the_turn_and_is_part_of_it(running: Running):
    free = await running.client.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0), "r", "s")
    stop = free.token_ids[6]
    got = await running.client.generate(
        PROMPT, SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,)), "r", "s"
    )
    assert got.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert got.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [61]}, "token id 61 is outside the vocabulary of 61"),
        ({"token_ids": [-1]}, "outside the vocabulary"),
        ({"token_ids": [1] * 2048}, "no room"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 2048}}, "at most 2047"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "n=2"),
        ({"token_ids": [1], "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 1}}, "stream"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"token_ids": [1], "content_parts": [{"type": "image_url", "url": "data:,"}]}, "images"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({}, "token_ids"),
    ],
    ids=str,
)
async def test_bad_requests_are_refused_by_name(running: Running, body: dict, message: str):
    if len(body.get("token_ids", ())) < 10:
        body = {"sampling_params": {"max_tokens": 4}, **body}
    status, answer = await running.post("/inference/v1/generate", json=body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert running.engine.counters.refused == 1
    status, _ = await running.post("/inference/v1/generate", data=b"{not json")
    assert status == 400


async def test_unknown_and_neutral_fields_are_accepted_and_counted(running: Running):
    body = {
        "token_ids": [1],
        "cache_salt": "x",
        "sampling_params": {
            "max_tokens": 1,
            "n": 1,
            "min_p": 0.0,
            "stop": None,
            "skip_special_tokens": False,
        },
    }
    status, _ = await running.post("/inference/v1/generate", json=body)
    assert status == 200
    assert running.engine.counters.unknown_fields == 5


async def test_requests_join_and_leave_one_batch(running: Running):
    alone = await running.client.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0), "r", "s")
    before = running.engine.counters.steps
    lengths = [10 + i for i in range(32)]
    tasks = [running.start(n, temperature=0) for n in lengths]
    await until(lambda: sampled(running.engine) > 0)
    late = running.start(30, temperature=0)
    results = await asyncio.gather(*tasks, late)
    assert [len(r.token_ids) for r in results] == [*lengths, 30]
    assert late.result().token_ids == alone.token_ids
    assert all(r.token_ids[:10] == alone.token_ids[:10] for r in results)
    steps = running.engine.counters.steps - before
    assert steps < (sum(lengths) + 30) / 4
    assert not running.engine.scheduler.running


async def test_more_requests_than_places_wait_their_turn(policy: Path):
    engine = TinyEngine(policy, max_running=4, max_context=64, cache_tokens=128)
    runner, port = await serve(create_app(engine), "127.0.0.1", 0, None)
    async with EngineClient(f"http://127.0.0.1:{port}", timeout=60) as client:
        asked = [
            client.generate(PROMPT, SamplingParams(max_tokens=20, seed=i), str(i), "s") for i in range(12)
        ]
        assert all(len(r.token_ids) == 20 for r in await asyncio.gather(*asked))
        with pytest.raises(EngineRefused, match="exceeds the context"):
            await client.generate(PROMPT, SamplingParams(max_tokens=62), "r", "s")
    assert engine.scheduler.free_blocks == 128 // 16
    await runner.cleanup()


async def test_weights_swapped_in_mid_generation_give_version_spans(running: Running):
    task = running.start(1500, seed=1)
    await until(lambda: sampled(running.engine) >= 50)
    status, _ = await running.post(
        "/update_weights", params={"version": 7, "mode": "keep"}, data=weights_to_bytes(random_weights(2))
    )
    assert status == 200
    got = await task
    switch = got.versions.index(7)
    assert 50 <= switch < 1500
    assert got.versions == (0,) * switch + (7,) * (1500 - switch)
    assert (len(got.token_ids), got.finish_reason, got.resumed) == (1500, "length", 0)
    assert await running.client.version() == 7


async def test_the_new_weights_are_what_samples(running: Running, tmp_path: Path):
    await running.engine.load_weights(weights_to_bytes(random_weights(2)), 1)
    save_policy(tmp_path / "two", CONFIG, random_weights(2))
    params = SamplingParams(max_tokens=10, temperature=0)
    got = await running.client.generate(PROMPT, params, "r", "s")
    with torch.inference_mode():
        logits = load_model(tmp_path / "two")(torch.tensor([[*PROMPT, *got.token_ids]]))[
            0, len(PROMPT) - 1 : -1
        ]
    assert tuple(logits.argmax(-1).tolist()) == got.token_ids
    assert got.versions == (1,) * 10


async def test_misfit_weights_are_a_400_and_the_old_ones_serve_on(running: Running):
    weights = random_weights(2)
    weights["model.norm.weight"] = torch.ones(3)
    status, answer = await running.post(
        "/update_weights", params={"version": 7}, data=weights_to_bytes(weights)
    )
    assert status == 400
    assert "model.norm.weight has shape (3,)" in answer["error"]["message"]
    status, answer = await running.post("/update_weights", params={"version": 7}, data=bytes(3 * 2**20))
    assert status == 400
    assert "exceed" in answer["error"]["message"]
    for bad in ("", "-1", "x", "9" * 30):
        status, answer = await running.post("/update_weights", params={"version": bad}, data=b"")
        assert (status, "whole number" in answer["error"]["message"]) == (400, True)
    assert (await running.client.generate(PROMPT, SamplingParams(max_tokens=2), "r", "s")).versions == (0, 0)


async def test_raw_abort_answers_the_partial_tokens(running: Running):
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1500}}
    task = asyncio.create_task(running.post("/inference/v1/generate", json=asked))
    await until(lambda: sampled(running.engine) >= 5)
    await running.engine.pause("abort")
    status, answer = await task
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "abort")
    assert 5 <= len(choice["token_ids"]) < 1500
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_pause_wait_lets_running_requests_finish(running: Running):
    task = running.start(400)
    await until(lambda: sampled(running.engine) >= 5)
    await running.engine.pause("wait")
    assert running.engine.counters.sampled_tokens == 400
    assert len((await task).token_ids) == 400


async def test_pause_keep_freezes_and_resumes_the_same_generation(running: Running):
    undisturbed = await running.client.generate(PROMPT, SamplingParams(max_tokens=600, seed=5), "r", "s")
    task = running.start(600, seed=5)
    await until(lambda: sampled(running.engine) >= 20)
    async with running.http.get("/is_paused") as response:
        assert await response.json() == {"is_paused": False}
    await running.engine.pause("keep")
    async with running.http.get("/is_paused") as response:
        assert await response.json() == {"is_paused": True}
    frozen = sampled(running.engine)
    joined = running.start(3)
    await until(lambda: len(running.engine.scheduler.waiting) == 1)
    assert sampled(running.engine) == frozen < 600
    await running.engine.resume()
    assert (await task).token_ids == undisturbed.token_ids
    assert len((await joined).token_ids) == 3


async def test_a_vanished_client_leaves_the_batch(running: Running):
    task = running.start(1900)
    await until(lambda: sampled(running.engine) >= 5)
    task.cancel()
    await until(lambda: not running.engine.scheduler.running)
    assert running.engine.counters.sampled_tokens < 1900
    assert running.engine.scheduler.free_blocks == 2048


async def test_the_loop_answers_while_the_model_computes(running: Running):
    tasks = [running.start(800) for _ in range(32)]
    await until(lambda: sampled(running.engine) > 0)
    slowest = 0.0
    for _ in range(20):
        began = time.perf_counter()
        assert await running.client.healthy()
        slowest = max(slowest, time.perf_counter() - began)
    assert running.engine.scheduler.running
    assert slowest < 1.0
    for task in tasks:
        task.cancel()


async def test_metrics_and_models(running: Running):
    await running.client.generate(PROMPT, SamplingParams(max_tokens=4), "r", "s")
    async with running.http.get("/metrics") as response:
        text = await response.text()
    for line in (
        "packtrain_engine_requests_total 1.0",
        "packtrain_engine_sampled_tokens_total 4.0",
        "packtrain_engine_prompt_tokens_total 3.0",
        "packtrain_engine_requests_running 0.0",
        "packtrain_engine_weight_version 0.0",
    ):
        assert line in text
    async with running.http.get("/v1/models") as response:
        assert (await response.json())["data"][0]["max_model_len"] == 2048


async def test_version_can_be_renamed(running: Running):
    status, answer = await running.post("/update_weight_version", json={"new_version": "12"})
    assert (status, answer) == (200, {"success": True, "new_version": "12"})
    async with running.http.get("/weight_version") as response:
        assert await response.json() == {"weight_version": "12"}
    assert (await running.post("/update_weight_version", json={"new_version": "best"}))[0] == 400
    assert (await running.post("/pause", params={"mode": "soon"}))[0] == 400


async def test_a_token_is_asked_of_everything_but_health(policy: Path):
    engine = TinyEngine(policy)
    runner, port = await serve(create_app(engine, token="sesame"), "127.0.0.1", 0, "sesame")
    url = f"http://127.0.0.1:{port}"
    async with EngineClient(url) as stranger, EngineClient(url, token="sesame") as friend:
        assert await stranger.healthy()
        with pytest.raises(EngineUnavailable, match="401"):
            await stranger.generate(PROMPT, SamplingParams(max_tokens=1), "r", "s")
        with pytest.raises(EngineUnavailable):
            await stranger.version()
        assert len((await friend.generate(PROMPT, SamplingParams(max_tokens=2), "r", "s")).token_ids) == 2
    async with aiohttp.ClientSession() as http, http.post(f"{url}/update_weights") as response:
        assert response.status == 401
    await runner.cleanup()


async def test_shutting_down_answers_what_is_in_flight_at_once(policy: Path):
    engine = TinyEngine(policy)
    runner, port = await serve(create_app(engine), "127.0.0.1", 0, None)
    server = Running(engine, f"http://127.0.0.1:{port}")
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2000}}
    task = asyncio.create_task(server.post("/inference/v1/generate", json=asked))
    await until(lambda: sampled(engine) >= 5)
    async with asyncio.timeout(10):
        await runner.cleanup()
    status, answer = await task
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert len(answer["choices"][0]["token_ids"]) >= 5
    with pytest.raises(EngineDead, match="not running"):
        await engine.generate(PROMPT, SamplingParams(max_tokens=1))
    await server.http.close()


async def test_an_open_port_without_a_token_is_refused(policy: Path):
    with pytest.raises(ValueError, match="no token"):
        await serve(create_app(TinyEngine(policy)), "0.0.0.0", 0, None)


async def test_a_failed_step_fails_requests_and_health(running: Running, monkeypatch: pytest.MonkeyPatch):
    def broken(batch):
        raise FloatingPointError("not finite")

    monkeypatch.setattr(running.engine._runner, "step", broken)
    with pytest.raises(EngineDead, match="not finite"):
        await running.engine.generate(PROMPT, SamplingParams(max_tokens=1))
    assert not await running.client.healthy()
    assert (await running.post("/inference/v1/generate", json={"token_ids": [1]}))[0] == 500


async def test_whoever_waits_for_a_pause_may_leave_and_takes_no_generation_along(running: Running):
    task = running.start(400)
    await until(lambda: sampled(running.engine) >= 5)
    pausing = asyncio.create_task(running.engine.pause("wait"))
    await until(lambda: running.engine.paused == "wait")
    pausing.cancel()
    got = await task
    assert (len(got.token_ids), got.resumed) == (400, 0)


async def test_a_weight_load_that_is_given_up_while_it_waits_leaves_the_engine_running(running: Running):
    task = running.start(800)
    await until(lambda: sampled(running.engine) >= 5)
    async with asyncio.timeout(10):
        blob = weights_to_bytes(random_weights(2))
        loading = asyncio.create_task(running.engine.load_weights(blob, 1, "wait"))
        await until(lambda: running.engine.paused == "wait")
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    assert running.engine.paused is None
    assert len((await running.start(3)).token_ids) == 3
    assert set((await task).versions) == {0}


async def test_a_stop_waits_neither_for_a_long_step_nor_for_a_stalled_upload(
    policy: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = TinyEngine(policy)
    runner, port = await serve(create_app(engine), "127.0.0.1", 0, None)
    server = Running(engine, f"http://127.0.0.1:{port}")
    computing, release = threading.Event(), threading.Event()

    def slow(batch):
        computing.set()
        release.wait(60)
        raise RuntimeError("nobody waits for this")

    async def stalled():
        yield b"x"
        await asyncio.sleep(60)

    monkeypatch.setattr(engine._runner, "step", slow)
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20}}
    task = asyncio.create_task(server.post("/inference/v1/generate", json=asked))
    upload = asyncio.create_task(server.post("/update_weights?version=1", data=stalled()))
    try:
        await asyncio.to_thread(computing.wait, 20)
        began = time.monotonic()
        await runner.cleanup()
        assert time.monotonic() - began < 8
        status, answer = await task
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    finally:
        release.set()
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        await server.http.close()
