"""New weights, pauses and a lost connection in the middle of a turn of a real vLLM: every token keeps the version that
sampled it and the log-probability of those weights, and the turn goes on from its own tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipeline.engines.base import EngineUnavailable, Generation
from pipeline.engines.client import EngineClient
from pipeline.engines.replicas import Replicas
from pipeline.engines.vllm import VllmReplica
from pipeline.engines.wire import SamplingParams
from tests.vllm.relay import Relay
from tests.vllm.scoring import OTHER, TOLERANCE, apart, rescored
from tests.vllm.server import VllmServer

# Long enough that vLLM caches it, in blocks of 128: what the old weights left there must not be used under the new.
PROMPT = tuple(range(100, 400))
# vLLM samples ahead of what its server has sent, by hundreds of tokens on a busy machine: the turn must still be under
# way when a test that has seen some of it acts.
LENGTH = 2000
PARAMS = SamplingParams(max_tokens=LENGTH, seed=4)
OLD, NEW = 7, 8


@pytest.fixture
async def engine(tiny: VllmServer) -> AsyncIterator[EngineClient]:
    async with EngineClient(tiny.url, timeout=90) as client:
        yield client


@pytest.fixture
async def control(tiny: VllmServer) -> AsyncIterator[VllmReplica]:
    replica = VllmReplica(tiny.url)
    await replica.rename(OLD)
    yield replica
    await replica.close()


class Progress:
    """Counts a turn's tokens as they come."""

    def __init__(self) -> None:
        self.seen = 0
        self._more = asyncio.Event()

    def __call__(self, token_ids: Sequence[int]) -> None:
        self.seen += len(token_ids)
        self._more.set()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.seen < count:
                self._more.clear()
                await self._more.wait()


async def both_scores(
    engine: EngineClient, control: VllmReplica, tiny: VllmServer, made: Generation
) -> tuple[np.ndarray, np.ndarray]:
    """How far the turn's log-probabilities are from those of the old weights, and of the new."""
    after = apart(made.logprobs, await rescored(engine, PROMPT, made))
    await control.update(str(tiny.model), NEW + 1)
    return apart(made.logprobs, await rescored(engine, PROMPT, made)), after


def edge(versions: Sequence[int]) -> int:
    """Where the second version begins; there are two, the older first."""
    assert set(versions) == {OLD, NEW}
    assert all(a <= b for a, b in pairwise(versions))
    return versions.index(NEW)


async def test_new_weights_in_the_middle_of_a_turn(
    engine: EngineClient, control: VllmReplica, tiny: VllmServer, models: Path
) -> None:
    progress = Progress()
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS, "r", "s", watch=progress))
    await progress.reach(60)
    await control.update(str(models / "tiny-next"), NEW)
    made = await turn
    assert await engine.version() == NEW
    assert (len(made.token_ids), made.resumed, made.finish_reason) == (LENGTH, 1, "length")
    at = edge(made.versions)
    assert at >= 60
    old, new = await both_scores(engine, control, tiny, made)
    assert old[:at].max() < TOLERANCE
    assert new[at:].max() < TOLERANCE
    # And not because all weights say the same.
    assert min(old[at:].mean(), new[:at].mean()) > OTHER


async def test_a_whole_answer_is_continued_under_new_weights_too(
    engine: EngineClient, control: VllmReplica, tiny: VllmServer, models: Path
) -> None:
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS, "r", "s"))
    await sampled(tiny, 30)
    await control.update(str(models / "tiny-next"), NEW)
    made = await turn
    at = edge(made.versions)
    assert (len(made.token_ids), made.resumed) == (LENGTH, 1)
    old, new = await both_scores(engine, control, tiny, made)
    assert old[:at].max() < TOLERANCE
    assert new[at:].max() < TOLERANCE


async def test_turns_that_are_frozen_over_new_weights_are_not_sent_again(
    engine: EngineClient, control: VllmReplica, tiny: VllmServer, models: Path
) -> None:
    progress = Progress()
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS, "r", "s", watch=progress))
    await progress.reach(60)
    await control.pause("keep")
    tiny.load(models / "tiny-next")
    await control.rename(NEW)
    await control.resume()
    made = await turn
    assert (len(made.token_ids), made.resumed) == (LENGTH, 0)
    at = edge(made.versions)
    old, new = await both_scores(engine, control, tiny, made)
    assert old[:at].max() < TOLERANCE
    assert new[at:].max() < TOLERANCE


async def test_a_new_name_alone_divides_a_turn(engine: EngineClient, control: VllmReplica) -> None:
    progress = Progress()
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS, "r", "s", watch=progress))
    await progress.reach(60)
    await control.rename(NEW)
    made = await turn
    assert edge(made.versions) >= 60
    assert made.resumed == 0
    assert apart(made.logprobs, await rescored(engine, PROMPT, made)).max() < TOLERANCE


async def test_a_paused_turn_goes_on_from_its_own_tokens(engine: EngineClient, control: VllmReplica) -> None:
    progress = Progress()
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS, "r", "s", watch=progress))
    await progress.reach(60)
    await control.pause("abort")
    # What is left waits for the engine: it is sent again, and vLLM keeps it until it resumes.
    assert not (await asyncio.wait([turn], timeout=0.5))[0]
    kept = progress.seen
    await control.resume()
    made = await turn
    assert (len(made.token_ids), made.resumed, made.finish_reason) == (LENGTH, 1, "length")
    assert kept < LENGTH
    assert progress.seen == LENGTH
    assert set(made.versions) == {OLD}
    assert apart(made.logprobs, await rescored(engine, PROMPT, made)).max() < TOLERANCE


async def test_a_turn_that_is_sent_while_paused_waits_or_is_unavailable(
    engine: EngineClient, control: VllmReplica
) -> None:
    await control.pause("wait")
    assert await engine.healthy()
    began = time.monotonic()
    with pytest.raises(EngineUnavailable):
        await engine.generate(PROMPT, PARAMS, "late", "s", within=1)
    assert time.monotonic() - began < 5
    turn = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=20), "r", "s"))
    assert not (await asyncio.wait([turn], timeout=0.5))[0]
    await control.resume()
    assert len((await turn).token_ids) == 20


async def test_a_turn_whose_replica_is_lost_goes_on_elsewhere(
    engine: EngineClient, control: VllmReplica, tiny: VllmServer
) -> None:
    # Two ways to one server: what is lost is the connection, and what it leads to.
    async with (
        Relay(tiny.port) as relay,
        Replicas([VllmReplica(relay.url), VllmReplica(tiny.url)], 60) as two,
    ):
        progress = Progress()
        turn = asyncio.create_task(two.generate(PROMPT, PARAMS, "r", "s", watch=progress))
        await progress.reach(60)
        assert relay.connections
        await relay.close()
        made = await turn
    assert (len(made.token_ids), made.resumed) == (LENGTH, 1)
    assert progress.seen == LENGTH
    assert set(made.versions) == {OLD}
    assert apart(made.logprobs, await rescored(engine, PROMPT, made)).max() < TOLERANCE


async def sampled(server: VllmServer, more: int) -> None:
    """Until the server has sampled so many tokens more."""
    before = server.metric("vllm:generation_tokens_total")
    async with asyncio.timeout(60):
        while await asyncio.to_thread(server.metric, "vllm:generation_tokens_total") < before + more:
            await asyncio.sleep(0.01)
