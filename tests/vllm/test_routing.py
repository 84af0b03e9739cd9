"""Routed experts and candidate sets of a real vLLM, against another implementation of the same model.

CPUs have no compiled kernels of the model runner that returns them, so Triton's interpreter runs it: a token takes about
half a second, and the turns are short.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from pipeline.engines.client import EngineClient
from pipeline.engines.vllm import VllmReplica
from pipeline.engines.wire import SamplingParams
from tests.vllm.scoring import TOLERANCE, apart
from tests.vllm.server import VllmServer

PROMPT = tuple(range(100, 110))
LENGTH = 8
# vLLM returns masks only where they are bounded, and refuses other requests.
TOP_K = 4


@pytest.fixture
async def engine(moe: VllmServer) -> AsyncIterator[EngineClient]:
    async with EngineClient(moe.url, timeout=200) as client:
        yield client


async def reference(server: VllmServer, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
    """What `reference.py` says of a sequence."""
    process = await asyncio.create_subprocess_exec(
        *server.reference(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await process.communicate(json.dumps(list(token_ids)).encode())
    return dict(np.load(io.BytesIO(out)))


async def experts(server: VllmServer, token_ids: Sequence[int]) -> np.ndarray:
    return (await reference(server, token_ids))["experts"]


def sampling(max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, top_k=TOP_K)


async def test_row_t_is_what_token_t_was_routed_to(engine: EngineClient, moe: VllmServer) -> None:
    made = await engine.generate(PROMPT, sampling(LENGTH, 1), "first", "s")
    ids = [*PROMPT, *made.token_ids]
    expected = await experts(moe, ids)
    assert made.routing is not None
    assert made.routing.start == 0
    assert made.routing.rows.dtype == np.uint8
    # The last token has been no input yet.
    assert np.array_equal(made.routing.rows, expected[:-1])
    assert len(np.unique(expected)) > 4

    # The next turn asks for what it does not have: from the row of the last token on.
    tool = [7, 9, 11]
    known = len(ids) - 1
    again = await engine.generate([*ids, *tool], sampling(4, 2), "second", "s", routed_from=known)
    assert again.routing is not None
    assert again.routing.start == known
    whole = await experts(moe, [*ids, *tool, *again.token_ids])
    assert np.array_equal(np.concatenate((made.routing.rows, again.routing.rows)), whole[:-1])


async def test_a_turn_that_was_interrupted_has_every_row_once(engine: EngineClient, moe: VllmServer) -> None:
    seen = 0
    enough = asyncio.Event()

    def watch(token_ids: Sequence[int]) -> None:
        nonlocal seen
        seen += len(token_ids)
        if seen >= 3:
            enough.set()

    turn = asyncio.create_task(engine.generate(PROMPT, sampling(LENGTH, 3), "r", "s", watch=watch))
    await enough.wait()
    control = VllmReplica(moe.url)
    await control.pause("abort")
    await control.resume()
    await control.close()
    made = await turn
    assert (made.resumed, len(made.token_ids)) == (1, LENGTH)
    expected = await experts(moe, [*PROMPT, *made.token_ids])
    assert made.routing is not None
    assert np.array_equal(made.routing.rows, expected[:-1])


async def test_a_turn_that_a_watcher_ends_has_the_rows_of_what_was_kept(
    engine: EngineClient, moe: VllmServer
) -> None:
    seen = 0

    def watch(token_ids: Sequence[int]) -> int | None:
        nonlocal seen
        seen += len(token_ids)
        return len(token_ids) - (seen - 4) if seen >= 4 else None

    made = await engine.generate(PROMPT, sampling(60, 5), "r", "s", watch=watch)
    assert (len(made.token_ids), made.finish_reason) == (4, "stop")
    expected = await experts(moe, [*PROMPT, *made.token_ids])
    assert made.routing is not None
    assert np.array_equal(made.routing.rows, expected[:-1])


async def test_candidates_are_what_top_k_left_open(engine: EngineClient, moe: VllmServer) -> None:
    made = await engine.generate(PROMPT, sampling(LENGTH, 4), "r", "s")
    ids = [*PROMPT, *made.token_ids]
    # Row t is of what follows token t.
    rows = (await reference(moe, ids))["logprobs"][len(PROMPT) - 1 : -1]
    open_ = np.argsort(-rows, axis=1)[:, :TOP_K]
    assert [set(c) for c in made.candidates] == [set(map(int, row)) for row in open_]
    mass = np.log(np.exp(np.take_along_axis(rows, open_, 1)).sum(axis=1))
    expected = rows[np.arange(LENGTH), list(made.token_ids)] - mass
    assert apart(made.logprobs, expected).max() < TOLERANCE
