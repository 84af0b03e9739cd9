"""The client's promises, against our engine and against answers as vLLM gives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from aiohttp import web

from pipeline.engines.base import EngineRefused, EngineUnavailable
from pipeline.engines.client import EngineClient
from pipeline.engines.tiny.model import Llama, load_model, weights_to_bytes
from pipeline.engines.tiny.sampling import processed_logprobs
from pipeline.engines.tiny.server import serve
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


async def test_client_logprobs_are_those_of_the_policy(running: Running, policy: Path):
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
    got = await running.client.generate(PROMPT, params, "r", "s")
    with torch.inference_mode():
        logits = load_model(policy)(torch.tensor([[*PROMPT, *got.token_ids]]))[0, len(PROMPT) - 1 : -1]
    scored = processed_logprobs(logits, [params] * 40)
    assert [scored[i, t].item() for i, t in enumerate(got.token_ids)] == pytest.approx(got.logprobs, abs=1e-4)
    assert got.versions == (0,) * 40
    again = await running.client.generate(PROMPT, params, "r2", "s")
    assert again.token_ids == got.token_ids


async def test_client_raises_refusals_at_once_with_the_reason(running: Running):
    with pytest.raises(EngineRefused, match="outside the vocabulary"):
        await running.client.generate((99,), SamplingParams(max_tokens=1), "r", "s")


async def test_an_aborted_generation_is_resumed_from_its_own_tokens(running: Running):
    task = running.start(1500, seed=1)
    await until(lambda: sampled(running.engine) >= 50)
    status, _ = await running.post("/pause", params={"mode": "abort"})
    assert status == 200
    assert not running.engine.scheduler.running
    await running.engine.load_weights(weights_to_bytes(random_weights(2)), 3)
    await running.post("/resume")
    got = await task
    switch = got.versions.index(3)
    assert 50 <= switch < 1500
    assert got.versions == (0,) * switch + (3,) * (1500 - switch)
    assert len(got.token_ids) == len(got.logprobs) == 1500
    assert got.resumed == 1
    # Both parts are scored by the weights that sampled them, the second on a context of its own tokens.
    for start, end, seed in ((0, switch, 1), (switch, 1500, 2)):
        model = Llama(CONFIG)
        model.load_state_dict(random_weights(seed))
        with torch.inference_mode():
            scored = model(torch.tensor([[*PROMPT, *got.token_ids]])).log_softmax(-1)[0, len(PROMPT) - 1 : -1]
        expected = [scored[i, got.token_ids[i]].item() for i in range(start, end)]
        assert expected == pytest.approx(got.logprobs[start:end], abs=2e-4)


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_requests_during_such_a_pause_get_503_and_the_client_waits(running: Running, mode: str):
    await running.post("/pause", params={"mode": mode})
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
    async with running.http.post("/inference/v1/generate", json=asked) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
    with pytest.raises(EngineUnavailable, match="engine_paused"):
        await running.client.generate(PROMPT, SamplingParams(max_tokens=3), "r", "s", within=0.3)
    waiting = running.start(3)
    await running.post("/resume")
    assert len((await waiting).token_ids) == 3


async def test_an_engine_that_is_not_there_is_unavailable_and_not_healthy(unused_tcp_port: int):
    async with EngineClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(EngineUnavailable, match="deadline"):
            await client.generate(PROMPT, SamplingParams(max_tokens=1), "r", "s", within=0.3)
        assert not await client.healthy()
        with pytest.raises(EngineUnavailable):
            await client.version()


VLLM = {"index": 0, "token_ids": [4, 5], "finish_reason": "stop"}


def content(*logprobs: float) -> dict:
    return {
        "content": [
            {"token": f"token_id:{i}", "logprob": p, "top_logprobs": []} for i, p in enumerate(logprobs)
        ]
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({**VLLM, "logprobs": content(-1.0, -2.0)}, (0, 0)),
        (
            {
                **VLLM,
                "logprobs": content(-1.0, -2.0),
                "weight_versions": [{"version": "default", "start": 0, "end": 2}],
            },
            (0, 0),
        ),
        (
            {
                **VLLM,
                "logprobs": content(-1.0, -2.0),
                "weight_versions": [
                    {"version": "7", "start": 0, "end": 1},
                    {"version": "8", "start": 1, "end": 2},
                ],
            },
            (7, 8),
        ),
        ({**VLLM, "logprobs": None}, "0 logprobs for 2 tokens"),
        ({**VLLM, "logprobs": content(-1.0, -9999.0)}, "log-probability -9999"),
        (
            {
                **VLLM,
                "logprobs": content(-1.0, -2.0),
                "weight_versions": [{"version": "7", "start": 0, "end": 1}],
            },
            "1 of 2 tokens",
        ),
        (
            {
                **VLLM,
                "logprobs": content(-1.0, -2.0),
                "weight_versions": [{"version": "best", "start": 0, "end": 2}],
            },
            "'best'",
        ),
        ({**VLLM, "logprobs": content(-1.0, -2.0), "finish_reason": "error"}, "unknown finish reason"),
    ],
    ids=["bare", "default", "spans", "no-logprobs", "minus-inf", "short-spans", "odd-version", "odd-reason"],
)
async def test_the_client_reads_vllms_answers_and_refuses_holes(choice: dict, expected):
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["sampling_params"]["logprobs"] == 0
        assert not body["stream"]
        assert request.headers["X-Session-ID"] == "session-1"
        return web.json_response(
            {"request_id": body["request_id"], "choices": [choice], "kv_transfer_params": None}
        )

    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    runner, port = await serve(app, "127.0.0.1", 0, None)
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        asked = client.generate(PROMPT, SamplingParams(logprobs=None), "r", "session-1")
        if isinstance(expected, str):
            with pytest.raises(EngineUnavailable, match=expected):
                await asked
        else:
            got = await asked
            assert (got.token_ids, got.logprobs, got.versions) == ((4, 5), (-1.0, -2.0), expected)
    await runner.cleanup()
