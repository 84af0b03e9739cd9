"""Agent-loop and harness hosts over a real broker, store and HTTP, with a scripted double of an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

import schemas.envelope
from pipeline.capture.journal import HostJournal
from pipeline.capture.secret import session_secret
from pipeline.capture.server import Capture
from pipeline.capture.uploads import Uploads
from pipeline.engines.client import EngineClient
from pipeline.log import Delivery, Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker
from schemas.facts import (
    Failure,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
)
from schemas.names import attempt_id
from services import agent_loop, harness
from services.agent_loop import host as hosts
from services.agent_loop import readiness
from services.process import Context
from tests.integration.test_harness_trials import act
from tests.rollout_stage import KEY, Stage, by_expression, staged


@pytest.fixture
async def stage(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> AsyncIterator[Callable[..., Stage]]:
    async with staged(tmp_path, broker, run_name, log, store, act) as make:
        yield make


async def test_sequences_are_captured_verified_and_stored(stage: Callable[..., Stage]) -> None:
    s = stage()
    s.engine.script = by_expression
    s.engine.version_number = 3
    async with s.running(
        (agent_loop.serve, ""), (agent_loop.serve, ""), (harness.serve, "tools"), (harness.serve, "tools")
    ):
        sequences = [await s.dispatch("calc", member, version=3) for member in range(8)]
        finished = [await s.outcome("calc", sequence) for sequence in sequences]
    for fact in finished:
        assert isinstance(fact, SequenceFinished), fact
        assert (fact.reward, fact.termination, fact.turns, fact.attempt) == (1.0, "completed", 2, 1)
        (context,) = fact.contexts
        assert (context.min_version, context.max_version, len(context.loss_spans)) == (3, 3, 2)
        columns = await read_columns(s.store, fact.payload, ["tokens", "loss_mask", "logprobs", "segments"])
        prompt_and_turns = [
            list(prompt) + list(generation.token_ids)
            for prompt, generation in zip(s.engine.prompts, s.engine.generations, strict=True)
        ]
        assert columns["tokens"].tolist() in prompt_and_turns
        assert int(columns["loss_mask"].sum()) == context.generated
        assert np.all(columns["logprobs"][columns["loss_mask"] == 0] == 0)
    text = json.dumps([fact.model_dump(mode="json") for fact in await s.facts("sequence.opened")])
    for sequence in sequences:
        assert session_secret(KEY, attempt_id(sequence, 1)) not in text


async def test_infra_failures_are_new_attempts_and_then_a_failed_sequence(
    stage: Callable[..., Stage],
) -> None:
    s = stage()
    async with s.running((agent_loop.serve, ""), (harness.serve, "hopeless"), (harness.serve, "tools")):
        sequence = await s.dispatch("hopeless")
        healthy = await s.dispatch("calc")
        failed = await s.outcome("hopeless", sequence)
        finished = await s.outcome("calc", healthy)
    assert isinstance(failed, SequenceFailed)
    assert (failed.attempts, failed.failure.kind, failed.failure.reason) == (2, "infra", "harness_error")
    assert "RuntimeError" in failed.failure.detail
    assert session_secret(KEY, attempt_id(sequence, 2)) not in failed.failure.detail
    opened = [
        fact
        for fact in await s.facts("sequence.opened")
        if isinstance(fact, SequenceOpened) and fact.source == "hopeless"
    ]
    assert [fact.attempt for fact in opened] == [1, 2]
    assert isinstance(finished, SequenceFinished), "another tenant is untouched"


async def test_deliveries_that_came_to_no_attempt_use_up_none(stage: Callable[..., Stage]) -> None:
    """A broker that restarts, a host that is told to stop: the dispatch was on its way, and nobody began with it."""
    s = stage(max_attempts=2)
    sequence = await s.dispatch("calc")
    work = await s.log.work(agent_loop.WORK, "sequence.dispatched", ack_wait_s=30)
    for number in range(1, 5):
        [delivery] = await work.fetch(1, 10)
        assert delivery.attempt == number
        await delivery.retry(0)
    await work.close()
    s.engine.script = by_expression
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        finished = await s.outcome("calc", sequence)
    assert isinstance(finished, SequenceFinished), finished
    assert finished.attempt == 1


def opened_elsewhere(sequence: str, number: int, budget_s: float) -> SequenceOpened:
    return SequenceOpened(
        source="calc",
        sample=sequence.rpartition("-")[0],
        sequence=sequence,
        attempt=number,
        pool="tools",
        task_index=0,
        host="elsewhere",
        base_url="http://127.0.0.1:1",
        session=attempt_id(sequence, number),
        budget_s=budget_s,
    )


async def test_attempts_whose_hosts_were_lost_are_bounded_by_the_log(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fail the sequence only when the last of them can come to nothing any more."""
    monkeypatch.setattr(hosts, "GRACE_S", 0.2)
    s = stage(max_attempts=2)
    sequence = await s.dispatch("calc")
    for number in (1, 2):
        await s.log.publish(opened_elsewhere(sequence, number, 2.0))
    began = time.monotonic()
    async with s.running((agent_loop.serve, "")):
        failed = await s.outcome("calc", sequence)
    assert isinstance(failed, SequenceFailed)
    assert (failed.attempts, failed.failure.reason) == (2, "attempts_lost")
    assert time.monotonic() - began > 1.5


async def test_a_host_that_stops_between_a_result_and_its_acknowledgement_leaves_nothing_to_do(
    stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handlers are cancelled wherever they are: the next host finds the result, and opens no second attempt."""
    s = stage()
    s.engine.script = by_expression
    acknowledge, reached = Delivery.ack, asyncio.Event()

    async def never(delivery: Delivery) -> None:
        if isinstance(delivery.event.fact, SequenceDispatched):
            reached.set()
            await asyncio.Event().wait()
        await acknowledge(delivery)

    monkeypatch.setattr(Delivery, "ack", never)
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        sequence = await s.dispatch("calc")
        assert isinstance(await s.outcome("calc", sequence), SequenceFinished)
        await asyncio.wait_for(reached.wait(), 20)
    monkeypatch.setattr(Delivery, "ack", acknowledge)
    assert await s.pending("agent-loop") == 1
    async with s.running((agent_loop.serve, "")), asyncio.timeout(20):
        while await s.pending("agent-loop"):
            await asyncio.sleep(0.02)
    assert [len(await s.facts(type_)) for type_ in ("sequence.opened", "sequence.finished")] == [1, 1]
    assert list((tmp_path / "journal").iterdir()) == []


@pytest.mark.parametrize("known", ["its host is dead", "its trial has failed"])
async def test_the_last_attempt_of_a_lost_host_is_not_waited_for_where_it_comes_to_nothing(
    stage: Callable[..., Stage], tmp_path: Path, known: str
) -> None:
    """As the trial may have waited in its pool's queue, that would be a quarter of an hour."""
    s = stage(max_attempts=1, trial_budget_s=600.0, queue_s=600.0)
    sequence = await s.dispatch("calc")
    opened = opened_elsewhere(sequence, 1, 600.0)
    await s.log.publish(opened)
    if known == "its host is dead":
        os.close(HostJournal(tmp_path / "journal", opened.host)._lock)  # as the kernel does
    else:
        lost = Failure(kind="infra", reason="harness_lost")
        verdict = opened.model_dump(include={"source", "sample", "sequence", "attempt", "host"})
        await s.log.publish(SequenceVerified(**verdict, reward=None, termination="failed", failure=lost))
    async with s.running((agent_loop.serve, "")):
        failed = await s.outcome("calc", sequence, within_s=20)
    assert isinstance(failed, SequenceFailed)
    assert (failed.attempts, failed.failure.reason) == (1, "attempts_lost")


async def test_an_engine_that_stays_old_fails_the_sequence_by_name(stage: Callable[..., Stage]) -> None:
    s = stage(trial_budget_s=0.1, max_attempts=1)
    async with s.running((agent_loop.serve, "")):
        failed = await s.outcome("calc", await s.dispatch("calc", version=5))
    assert isinstance(failed, SequenceFailed)
    assert (failed.attempts, failed.failure.reason) == (0, "policy_version")


async def test_no_verdict_within_the_budget_is_infra(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.2)
    s = stage(trial_budget_s=0.5, max_attempts=1)
    async with s.running((agent_loop.serve, "")):
        failed = await s.outcome("calc", await s.dispatch("calc"))
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.reason == "harness_timeout"


async def test_an_engine_that_is_down_is_never_a_reward(stage: Callable[..., Stage]) -> None:
    s = stage(trial_budget_s=3.0, max_attempts=1)
    s.engine.down = True
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        failed = await s.outcome("calc", await s.dispatch("calc"))
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.kind == "infra"
    assert failed.failure.reason in ("engine_timeout", "engine_unavailable")


async def test_a_sequence_waits_for_its_policy_version(stage: Callable[..., Stage]) -> None:
    s = stage()
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        waiting = await s.dispatch("calc", 0, version=5)
        ready = await s.dispatch("calc", 1)
        assert isinstance(await s.outcome("calc", ready), SequenceFinished)
        assert await s.log.last("sequence.opened", "tools", attempt_id(waiting, 1)) is None
        s.engine.version_number = 5
        finished = await s.outcome("calc", waiting)
    assert isinstance(finished, SequenceFinished)
    assert finished.contexts[0].min_version == 5


async def test_what_is_decided_is_not_run_again(stage: Callable[..., Stage]) -> None:
    s = stage()
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        sequence = await s.dispatch("calc")
        await s.outcome("calc", sequence)
    # The same dispatch for another consumer group: a delivery that was never acknowledged.
    work = await s.log.work("again", "sequence.dispatched", ack_wait_s=5)
    (delivery,) = await work.fetch(1, 5)
    prompts = len(s.engine.prompts)
    host = hosts.Host(
        Context(s.config, "x", s.log, s.store, asyncio.Event(), logging.getLogger("packtrain.test")),
        "al-x",
        "http://x",
        Capture(KEY, s.engine.renderer, s.engine, 2000),
        EngineClient(s.config.engine.url),
        Uploads(s.store, s.config.run),
    )
    await host.handle(delivery)
    assert delivery.settled
    assert len(s.engine.prompts) == prompts


@pytest.mark.parametrize("source", ["quitter", "misnamer"])
async def test_what_an_adapter_does_wrong_is_its_own_failure_by_name(
    stage: Callable[..., Stage], source: str
) -> None:
    s = stage(max_attempts=1)
    async with s.running((agent_loop.serve, ""), (harness.serve, source)):
        failed = await s.outcome(source, await s.dispatch(source))
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.reason == "harness_error"


async def test_an_event_that_would_be_too_large_is_a_failure_by_name(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(max_attempts=1)
    monkeypatch.setattr(schemas.envelope, "MAX_BODY", 700)
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        failed = await s.outcome("calc", await s.dispatch("calc"))
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.reason == "event_too_large"


async def test_one_tenant_asks_the_engines_version_for_all_that_wait(stage: Callable[..., Stage]) -> None:
    s = stage()
    for member in range(16):
        await s.dispatch("calc", member, version=5)
    async with s.running((agent_loop.serve, "")):
        async with asyncio.timeout(20):
            while s.engine.version_asked == 0:
                await asyncio.sleep(0.01)
            began, asked = time.monotonic(), s.engine.version_asked
            while s.engine.version_asked < asked + 20:
                await asyncio.sleep(0.01)
        assert time.monotonic() - began > 10 * readiness.VERSION_POLL_S
