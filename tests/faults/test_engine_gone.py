"""An engine that is gone for a while, a full pool, and many trials at once: none of it is the policy's doing.

`PACKTRAIN_OUTAGE_S=60` makes the outage as long as one that people would see.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web

from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker
from schemas.envelope import Event
from schemas.facts import SequenceFailed, SequenceFinished, SequenceOpened, SequenceVerified
from services import agent_loop, harness
from services.agent_loop import host as hosts
from services.agent_loop.readiness import ANSWERED_S
from services.cli.embedded import free_port
from tests.capture_parts import ScriptedEngine
from tests.rollout_stage import Stage, configuration, staged, write_policy

OUTAGE_S = float(os.environ.get("PACKTRAIN_OUTAGE_S", "3"))
pytestmark = pytest.mark.timeout(60 + 10 * OUTAGE_S)


def answer(prompt: str) -> str:
    return "12"


@pytest.fixture
async def stage(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> AsyncIterator[Callable[..., Stage]]:
    async with staged(tmp_path, broker, run_name, log, store, answer) as make:
        yield make


@asynccontextmanager
async def listening(engine: ScriptedEngine, port: int) -> AsyncIterator[None]:
    """The engine's server; in the end its connections are broken off, whatever is under way, and nobody listens."""
    runner = web.AppRunner(engine.application(), access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def events(stage: Stage) -> list[Event]:
    head = await stage.log.head()
    found: list[Event] = []
    async for event in stage.log.subscribe():
        found.append(event)
        if event.seq >= head:
            break
    return found


async def passed(moment: datetime) -> None:
    async with asyncio.timeout(OUTAGE_S + 60):
        while datetime.now(UTC) < moment:
            await asyncio.sleep(0.05)


async def all_finished(stage: Stage, sequences: list[str], within_s: float = 60) -> list[SequenceFinished]:
    """Their ends, none of which is a failure."""
    found: list[SequenceFinished] = []
    async with asyncio.timeout(within_s):
        async for event in stage.log.subscribe(source="sums"):
            assert not isinstance(event.fact, SequenceFailed), event.fact
            if isinstance(event.fact, SequenceFinished) and event.fact.sequence in sequences:
                found.append(event.fact)
            if len(found) == len(sequences):
                break
    return found


async def test_an_engine_that_is_gone_for_a_while_costs_no_sequence(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    """Longer than a trial's budget: what it interrupts is tried again, once; what comes meanwhile waits, and is no attempt."""
    engine, port = ScriptedEngine(answer), free_port()
    budget = 0.6 * OUTAGE_S
    config = configuration(
        tmp_path, broker, run_name, f"http://127.0.0.1:{port}", trial_budget_s=budget, queue_s=60.0
    )
    write_policy(config, engine)
    s = Stage(config, log, store, engine)
    async with s.running((agent_loop.serve, ""), (harness.serve, "chats")):
        async with listening(engine, port):
            early = [await s.dispatch("sums", member) for member in range(8)]
            await all_finished(s, early)
            engine.gate.clear()
            held = [await s.dispatch("sums", member) for member in range(8, 16)]
            await engine.wait_for_prompts(16)
        gone = datetime.now(UTC)
        engine.gate.set()
        late = [await s.dispatch("sums", member) for member in range(16, 24)]
        await passed(gone + timedelta(seconds=OUTAGE_S))
        back = datetime.now(UTC)
        async with listening(engine, port):
            finished = await all_finished(s, held + late)
    assert {fact.attempt for fact in finished} <= {1, 2}
    assert {fact.termination for fact in finished} == {"completed"}
    told = await events(s)
    settled = gone + timedelta(seconds=ANSWERED_S + 0.5)
    opened = [e.fact.id() for e in told if isinstance(e.fact, SequenceOpened) and settled < e.time < back]
    assert opened == [], "attempts were opened while the engine was known to be away"
    attempts = Counter(e.fact.sequence for e in told if isinstance(e.fact, SequenceOpened))
    assert all(attempts[sequence] == 2 for sequence in held), "the outage was to be longer than their budget"
    judged = [e.fact for e in told if isinstance(e.fact, SequenceFinished)]
    assert len(judged) == 24, "and each is there once"


async def test_two_hundred_trials_that_start_at_once_all_come_to_an_end(stage: Callable[..., Stage]) -> None:
    s = stage(tenants=200, trial_budget_s=120.0)
    pools = [p.model_copy(update={"tenants": 200}) if p.name == "chats" else p for p in s.config.pools]
    s.config = s.config.model_copy(update={"pools": tuple(pools)})
    s.engine.gate.clear()
    sequences = [await s.dispatch("sums", member) for member in range(200)]
    async with s.running((agent_loop.serve, ""), (harness.serve, "chats")):
        async with asyncio.timeout(60), s.engine.arrived:
            await s.engine.arrived.wait_for(lambda: len(s.engine.prompts) >= 200)
        # All of them are in their first model call.
        s.engine.gate.set()
        finished = await all_finished(s, sequences)
        told = await events(s)
    assert {(fact.attempt, fact.turns) for fact in finished} == {(1, 1)}
    assert len({fact.sequence for fact in finished}) == 200
    assert [e.fact for e in told if isinstance(e.fact, SequenceVerified) and e.fact.failure] == []


async def test_time_in_a_full_pools_queue_is_not_taken_from_the_trial(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.2)
    budget = 2.0
    s = stage(trial_budget_s=budget, queue_s=120.0, max_attempts=1)
    async with s.running((agent_loop.serve, "")):
        sequences = [await s.dispatch("sums", member) for member in range(3)]
        async with asyncio.timeout(20):
            while len(opened := [e for e in await events(s) if isinstance(e.fact, SequenceOpened)]) < 3:
                await asyncio.sleep(0.02)
        assert [e.fact.budget_s for e in opened if isinstance(e.fact, SequenceOpened)] == [budget] * 3
        await passed(max(e.time for e in opened) + timedelta(seconds=budget + 0.3))
        async with s.running((harness.serve, "chats")):
            finished = await all_finished(s, sequences)
    assert {fact.termination for fact in finished} == {"completed"}


async def test_a_pool_has_its_own_budget_of_time_where_a_source_gives_one(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.2)
    s = stage(trial_budget_s=600.0, max_attempts=1)
    quick = s.config.source("sums").model_copy(
        update={"timeouts": s.config.source("sums").timeouts.model_copy(update={"trial_s": 0.4})}
    )
    sources = [quick if source.name == "sums" else source for source in s.config.sources]
    s.config = s.config.model_copy(update={"sources": tuple(sources)})
    async with s.running((agent_loop.serve, "")):
        failed = await s.outcome("sums", await s.dispatch("sums"))
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.reason == "harness_timeout"
