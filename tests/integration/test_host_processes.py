"""Rollout hosts as processes of their own: killed, and told to stop in the middle of their work."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from rich.console import Console

from pipeline.capture.secret import session_url
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker, Metrics, RunConfig
from schemas.facts import SequenceFailed, SequenceFinished, SequenceOpened, SequenceVerified
from services import agent_loop, harness
from services.cli import status
from services.cli.where import Where
from tests.integration.test_harness_trials import act
from tests.log_parts import until
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
                # A host that is told to stop does not wait for what its tenants still have to tidy up.
                await until(lambda: len(list((tmp_path / "journal").iterdir())) <= 1)
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


def draining(s: Stage, drain_s: float) -> RunConfig:
    """The stage's configuration, with pools that drain and processes that serve metrics."""
    pools = tuple(pool.model_copy(update={"drain_s": drain_s}) for pool in s.config.pools)
    return s.config.model_copy(update={"pools": pools, "metrics": Metrics(bind="127.0.0.1:0")})


async def told(s: Stage, config: Path, host: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `packtrain status` says of a host, once it is as wanted."""
    async with asyncio.timeout(30):
        while True:
            said: list[str] = []
            where = Where(config=config)
            await asyncio.to_thread(status.show, where, True, False, Console(), said.append)
            lines = [orjson.loads(line) for line in said]
            assert lines[-1]["run"] == s.config.run
            for line in lines[:-1]:
                if line["host"] == host and wanted(line):
                    return line
            await asyncio.sleep(0.05)


async def test_a_host_told_to_stop_lets_its_trials_end_and_status_tells_of_it(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    # The trial waits for all that is looked at meanwhile, however busy the machine is.
    s = stage(max_attempts=1, trial_budget_s=120.0)
    s.engine.script = by_expression
    file = write_config(draining(s, 120.0), tmp_path)
    host = spawn(file, "harness", "--pool", "tools", "--index", "0")
    try:
        async with s.running((agent_loop.serve, "")):
            sequence = await s.dispatch("awaited")
            async with asyncio.timeout(30):
                while not (tmp_path / "verifying").exists():
                    await asyncio.sleep(0.02)
            serving = await told(s, file, "harness-tools-0", lambda line: line.get("tenants") == 1)
            async with aiohttp.ClientSession() as session, session.get(serving["metrics"]) as response:
                assert 'packtrain_host_tenants{pool="tools"} 1.0' in await response.text()
            assert (await told(s, file, "harness-chats-0", lambda line: True))["silent"] is True
            host.send_signal(signal.SIGTERM)
            await told(s, file, "harness-tools-0", lambda line: line["state"] == "draining")
            assert host.poll() is None
            (tmp_path / "verifying.go").touch()
            finished = await s.outcome("awaited", sequence)
            assert await asyncio.to_thread(host.wait, 30) == 0
    finally:
        host.kill()
        host.wait()
    assert isinstance(finished, SequenceFinished), finished
    assert (finished.attempt, finished.reward) == (1, 1.0)
    assert (await told(s, file, "harness-tools-0", lambda line: True))["state"] == "stopped"


async def test_told_to_stop_again_a_host_hands_back_at_once(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    s = stage(max_attempts=1)
    file = write_config(draining(s, 600.0), tmp_path)
    host = spawn(file, "harness", "--pool", "stuck", "--index", "0")
    try:
        async with s.running((agent_loop.serve, "")):
            sequence = await s.dispatch("stuck")
            await told(s, file, "harness-stuck-0", lambda line: line.get("tenants") == 1)
            host.send_signal(signal.SIGTERM)
            await told(s, file, "harness-stuck-0", lambda line: line["state"] == "draining")
            host.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(host.wait, 10) == 0
            async with s.running((harness.serve, "stuck")):
                failed = await s.outcome("stuck", sequence)
    finally:
        host.kill()
        host.wait()
    assert isinstance(failed, SequenceFailed)
    assert failed.failure.reason == "harness_lost"
