"""The whole path with a real model: the official client, the capture proxy, a real vLLM, and back to columns that train."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.secret import session_url
from pipeline.capture.server import Capture
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.client import EngineClient
from pipeline.engines.vllm import VllmReplica
from schemas.config import Behaviour
from tests.capture_parts import served
from tests.vllm.scoring import TOLERANCE, apart
from tests.vllm.server import CONTEXT, VllmServer

KEY = b"k" * 32
VERSION = 3
QUESTIONS = ("What is the capital of France?", "Count to five.", "Name a colour.", "Say hello in Spanish.")
NEXT = "And another?"


@pytest.fixture
async def engine(smollm2: VllmServer) -> AsyncIterator[EngineClient]:
    replica = VllmReplica(smollm2.url)
    await replica.rename(VERSION)
    await replica.close()
    async with EngineClient(smollm2.url, timeout=200) as client:
        yield client


async def talk(client: openai.AsyncOpenAI, question: str) -> tuple[list[str], int]:
    """Two turns, the second one streamed: the answers, and the tokens that the usage says were sampled."""
    messages: list[Any] = [{"role": "user", "content": question}]
    first = await client.chat.completions.create(model="policy", messages=messages)
    told = first.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": told}, {"role": "user", "content": NEXT}]
    assert first.usage is not None
    sampled, pieces = first.usage.completion_tokens, list[str]()
    stream = await client.chat.completions.create(
        model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        if chunk.usage is not None:
            sampled += chunk.usage.completion_tokens
    assert len(list(filter(None, pieces))) > 1
    return [told, "".join(pieces)], sampled


async def test_what_the_agent_saw_is_what_was_sampled_and_what_will_be_trained(
    engine: EngineClient, smollm2: VllmServer
) -> None:
    capture = Capture(KEY, load_renderer(smollm2.model), engine, CONTEXT)
    sessions = [capture.open(f"s{i}", Behaviour(max_turns=2, max_tokens=24)) for i in range(len(QUESTIONS))]
    async with served(capture) as base:
        clients = [
            openai.AsyncOpenAI(base_url=session_url(base, KEY, session.id), api_key="x", timeout=200)
            for session in sessions
        ]
        # At once, so that the turns share batches.
        talks = await asyncio.gather(*map(talk, clients, QUESTIONS))
        for client in clients:
            await client.close()
    tokenizer = PolicyTokenizer.load(smollm2.model)
    for session, question, (answers, sampled) in zip(sessions, QUESTIONS, talks, strict=True):
        made = session.export()
        (context,) = made.contexts
        tokens, loss = made.columns["tokens"], made.columns["loss_mask"].astype(bool)
        assert (len(tokens), int(loss.sum())) == (context.tokens, sampled)
        # The dialogue that the agent saw, in the order in which the model had it.
        text = tokenizer.decode([int(t) for t in tokens], keep_special=True)
        at = 0
        for part in (question, answers[0], NEXT, answers[1]):
            at = text.index(part.strip(), at) + len(part.strip())
        assert not any("<|im_" in answer for answer in answers)
        # And every sampled token with the log-probability that the model gives it in that very context.
        scores = await engine.score(tokens.astype(np.int32), 0, "scored")
        logprobs = made.columns["logprobs"]
        assert apart(list(map(float, logprobs[loss])), scores.logprobs[loss]).max() < TOLERANCE
        assert not logprobs[~loss].any()
        assert set(made.columns["policy_version"][loss].tolist()) == {VERSION}
