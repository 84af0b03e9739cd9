"""Rollout hosts as processes of their own: killed, and told to stop in the middle of their work."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.capture.secret import session_url
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker
from schemas.facts import SequenceFailed, SequenceFinished, SequenceOpened, SequenceVerified
from services import agent_loop, harness
from tests.integration.test_harness_trials import act
from tests.rollout_stage import KEY, Stage, by_expression, spawn, staged, write_config


@pytest.fixture
async def stage(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> AsyncIterator[Callable[..., Stage]]:
    async with staged(tmp_path, broker, run_name, log, store, act) as make:
        yield make


async def test_a_killed_harness_host_costs_an_attempt_not_the_sequence(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage()
    s.engine.script = by_expression
    file = write_config(s.config, tmp_path)
    s.engine.gate.clear()
    victim = spawn(file, "harness", "--pool", "tools")
    try:
        async with s.running((agent_loop.serve, "")):
            sequence = await s.dispatch("calc")
            await s.engine.wait_for_prompts(1)
            victim.kill()
            victim.wait()
            s.engine.gate.set()
            async with s.running((harness.serve, "tools")):
                finished = await s.outcome("calc", sequence)
    finally:
        victim.kill()
        victim.wait()
    assert isinstance(finished, SequenceFinished), finished
    assert (finished.attempt, finished.reward) == (2, 1.0)
    lost = [
        fact
        for fact in await s.facts("sequence.verified")
        if isinstance(fact, SequenceVerified) and fact.failure
    ]
    assert [fact.failure.reason for fact in lost if fact.failure] == ["harness_lost"]


async def test_a_killed_agent_loop_host_costs_an_attempt_not_the_sequence(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage()
    s.engine.script = by_expression
    file = write_config(s.config, tmp_path)
    s.engine.gate.clear()
    victim = spawn(file, "agent-loop")
    try:
        async with s.running((harness.serve, "tools")):
            sequence = await s.dispatch("calc")
            await s.engine.wait_for_prompts(1)
            victim.kill()
            victim.wait()
            s.engine.gate.set()
            async with s.running((agent_loop.serve, "")):
                finished = await s.outcome("calc", sequence)
    finally:
        victim.kill()
        victim.wait()
    assert isinstance(finished, SequenceFinished), finished
    assert (finished.attempt, finished.reward) == (2, 1.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_an_agents_work_outlives_the_host_that_captured_it(
    stage: Callable[..., Stage], tmp_path: Path, how: signal.Signals
) -> None:
    s = stage()
    s.engine.script = by_expression
    victim = spawn(write_config(s.config, tmp_path), "agent-loop")
    try:
        async with s.running((harness.serve, "tools")):
            sequence = await s.dispatch("awaited")
            async with asyncio.timeout(30):
                while not (tmp_path / "verifying").exists():
                    await asyncio.sleep(0.02)
            # A request that never ends keeps a host that was told to stop, and the other host stands by: what is handed
            # back comes to it at once.
            (opened,) = await s.facts("sequence.opened")
            assert isinstance(opened, SequenceOpened)
            url = urlsplit(session_url(opened.base_url, KEY, opened.session))
            _, held = await asyncio.open_connection(url.hostname, url.port)
            held.write(f"POST {url.path}/responses HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n".encode())
            async with s.running((agent_loop.serve, "")):
                victim.send_signal(how)
                await asyncio.to_thread(victim.wait, 10)
                sampled = [token for generation in s.engine.generations for token in generation.token_ids]
                (tmp_path / "verifying.go").touch()
                finished = await s.outcome("awaited", sequence)
    finally:
        victim.kill()
        victim.wait()
    assert isinstance(finished, SequenceFinished), finished
    assert (finished.attempt, finished.reward, finished.turns) == (1, 1.0, 2)
    columns = await read_columns(s.store, finished.payload, ["tokens", "loss_mask", "logprobs"])
    trained = columns["loss_mask"] == 1
    assert columns["tokens"][trained].tolist() == sampled
    assert columns["logprobs"][trained].tolist() == [p for g in s.engine.generations for p in g.logprobs]
    assert list((tmp_path / "journal").iterdir()) == []


async def test_a_sequence_that_fails_keeps_the_tokens_of_its_last_attempt(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage(max_attempts=1, trial_budget_s=2.0)
    s.engine.script = by_expression
    async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
        sequence = await s.dispatch("awaited")
        failed = await s.outcome("awaited", sequence)
        (tmp_path / "verifying.go").touch()
    assert isinstance(failed, SequenceFailed), failed
    assert failed.failure.reason == "harness_timeout"
    assert failed.payload is not None
    columns = await read_columns(s.store, failed.payload, ["tokens", "loss_mask"])
    sampled = [token for generation in s.engine.generations for token in generation.token_ids]
    assert columns["tokens"][columns["loss_mask"] == 1].tolist() == sampled
    assert sum(context.generated for context in failed.contexts) == len(sampled)


async def test_a_harness_host_told_to_stop_hands_back_at_once(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage(max_attempts=1)
    host = spawn(write_config(s.config, tmp_path), "harness", "--pool", "stuck")
    try:
        async with s.running((agent_loop.serve, "")):
            sequence = await s.dispatch("stuck")
            async with asyncio.timeout(30):
                async for _event in s.log.subscribe("sequence.opened"):
                    break
                while await s.pending("harness-stuck") == 0:
                    await asyncio.sleep(0.02)
            host.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(host.wait, 10) == 0
            async with s.running((harness.serve, "stuck")):
                failed = await s.outcome("stuck", sequence)
    finally:
        host.kill()
        host.wait()
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.reason == "harness_lost"


async def test_a_harness_host_stops_under_an_environment_that_is_blocked(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage(max_attempts=1)
    host = spawn(write_config(s.config, tmp_path), "harness", "--pool", "blocked")
    try:
        async with s.running((agent_loop.serve, "")):
            await s.dispatch("blocked")
            async with asyncio.timeout(30):
                while not (tmp_path / "blocked").exists():
                    await asyncio.sleep(0.02)
            host.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(host.wait, 10) == 0
    finally:
        host.kill()
        host.wait()


async def test_an_agent_loop_host_stops_under_an_engine_that_does_not_answer(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage()
    s.engine.gate.clear()
    host = spawn(write_config(s.config, tmp_path), "agent-loop")
    try:
        async with s.running((harness.serve, "tools")):
            await s.dispatch("calc")
            await s.engine.wait_for_prompts(1)
            host.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(host.wait, 10) == 0
    finally:
        host.kill()
        host.wait()
