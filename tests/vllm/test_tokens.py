"""Tokens and log-probabilities of a real vLLM: what it sampled, from the distribution that it says, no more than wanted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from pipeline.engines.base import EngineRefused, EngineUnavailable
from pipeline.engines.client import EngineClient
from pipeline.engines.wire import SamplingParams
from tests.vllm.scoring import TOLERANCE, apart, rescored
from tests.vllm.server import CONTEXT, VllmServer

PROMPT = tuple(range(100, 110))
EOS = 2
LONG = CONTEXT - 100


@pytest.fixture
async def engine(tiny: VllmServer) -> AsyncIterator[EngineClient]:
    async with EngineClient(tiny.url, timeout=60) as client:
        yield client


async def idle(server: VllmServer) -> None:
    """Until the server has no request."""
    deadline = time.monotonic() + 10
    while await asyncio.to_thread(server.metric, "vllm:num_requests_running"):
        assert time.monotonic() < deadline, "vLLM still works on a request that nobody waits for"
        await asyncio.sleep(0.02)


async def test_logprobs_are_those_of_the_ids_scored_again(engine: EngineClient) -> None:
    async def one(i: int) -> float:
        prompt = [*PROMPT, i]
        params = SamplingParams(max_tokens=150 + 10 * i, seed=i)
        made = await engine.generate(prompt, params, f"r{i}", f"s{i}")
        assert len(made.token_ids) == len(made.logprobs) == len(made.versions) == 150 + 10 * i
        return float(apart(made.logprobs, await rescored(engine, prompt, made)).max())

    # Eight at once, so that they share batches.
    assert max(await asyncio.gather(*map(one, range(8)))) < TOLERANCE


async def test_logprobs_are_of_the_distribution_after_temperature_and_top_k(engine: EngineClient) -> None:
    heat, k = 0.7, 5
    params = SamplingParams(max_tokens=100, seed=1, temperature=heat, top_k=k)
    made = await engine.generate(PROMPT, params, "r", "s")
    # Scores are at temperature 1 over the whole vocabulary; the five likeliest are all that was open.
    scores = await engine.score([*PROMPT, *made.token_ids], k, "scored")
    own, top = scores.logprobs[len(PROMPT) :] / heat, scores.top_logprobs[len(PROMPT) :] / heat
    expected = own - np.log(np.exp(top).sum(axis=1))
    assert apart(made.logprobs, expected).max() < TOLERANCE
    assert np.all([t in row for t, row in zip(made.token_ids, scores.top_ids[len(PROMPT) :], strict=True)])


async def test_tokens_as_they_come_are_those_of_the_whole_answer(engine: EngineClient) -> None:
    pieces: list[list[int]] = []

    def watch(token_ids: Sequence[int]) -> None:
        pieces.append(list(token_ids))

    params = SamplingParams(max_tokens=200, seed=5)
    whole = await engine.generate(PROMPT, params, "whole", "s")
    streamed = await engine.generate(PROMPT, params, "streamed", "s", watch=watch)
    assert streamed.token_ids == whole.token_ids == tuple(t for piece in pieces for t in piece)
    assert len(pieces) > 10
    assert streamed.versions == whole.versions == (0,) * 200
    assert streamed.finish_reason == whole.finish_reason == "length"
    assert apart(streamed.logprobs, np.array(whole.logprobs, np.float32)).max() < TOLERANCE


async def test_a_watcher_that_ends_a_turn_ends_it_in_the_engine(
    engine: EngineClient, tiny: VllmServer
) -> None:
    before = tiny.metric("vllm:generation_tokens_total")
    seen = 0

    def watch(token_ids: Sequence[int]) -> int | None:
        nonlocal seen
        seen += len(token_ids)
        return len(token_ids) - (seen - 30) if seen >= 30 else None

    made = await engine.generate(PROMPT, SamplingParams(max_tokens=LONG, seed=2), "r", "s", watch=watch)
    assert (len(made.token_ids), made.finish_reason) == (30, "stop")
    assert made.versions == (0,) * 30
    assert apart(made.logprobs, await rescored(engine, PROMPT, made)).max() < TOLERANCE
    await idle(tiny)
    # The engine is ahead of what its server has sent, the more so on a busy machine.
    assert tiny.metric("vllm:generation_tokens_total") - before < LONG


async def test_a_caller_that_goes_away_ends_its_request_in_the_engine(
    engine: EngineClient, tiny: VllmServer
) -> None:
    before = tiny.metric("vllm:generation_tokens_total")
    going = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=LONG), "r", "s"))
    while not await asyncio.to_thread(tiny.metric, "vllm:num_requests_running"):
        await asyncio.sleep(0.01)
    going.cancel()
    await idle(tiny)
    assert tiny.metric("vllm:generation_tokens_total") - before < LONG
    assert going.cancelled()


async def test_a_turn_ends_with_the_id_that_stopped_it(engine: EngineClient) -> None:
    free = await engine.generate(PROMPT, SamplingParams(max_tokens=50, seed=3), "r", "s")
    at = free.token_ids[20]
    stopped = await engine.generate(
        PROMPT, SamplingParams(max_tokens=50, seed=3, stop_token_ids=(at,)), "r", "s"
    )
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(at) + 1]
    assert stopped.finish_reason == "stop"
    # The end of turn that the model's configuration names needs no asking.
    biased = SamplingParams.model_validate({"max_tokens": 5, "logit_bias": {str(EOS): 100.0}})
    ended = await engine.generate(PROMPT, biased, "r", "s")
    assert (ended.token_ids, ended.finish_reason) == ((EOS,), "stop")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("prompt", "named"),
    [([5] * (CONTEXT + 1), "longer than"), ([5] * CONTEXT, "longer than"), ([5, 99_999_999], "vocabulary")],
    ids=["over-length", "no room for a token", "out of vocabulary"],
)
async def test_what_cannot_be_sampled_is_refused_at_once(
    engine: EngineClient, prompt: list[int], named: str, streamed: bool
) -> None:
    # vLLM answers a stream with 200 and says what is wrong inside.
    watch = (lambda token_ids: None) if streamed else None
    with pytest.raises(EngineRefused, match=named):
        await engine.generate(prompt, SamplingParams(max_tokens=2), "r", "s", watch=watch, within=10)


async def test_a_turn_that_reaches_the_end_of_the_context_is_cut_there(engine: EngineClient) -> None:
    made = await engine.generate([5] * (CONTEXT - 3), SamplingParams(max_tokens=50, seed=1), "r", "s")
    assert (len(made.token_ids), made.finish_reason) == (3, "length")


async def test_health_and_an_engine_that_is_not_there(engine: EngineClient) -> None:
    assert await engine.healthy()
    async with EngineClient("http://127.0.0.1:9", timeout=1) as absent:
        assert not await absent.healthy()
        with pytest.raises(EngineUnavailable):
            await absent.generate(PROMPT, SamplingParams(max_tokens=1), "r", "s")
