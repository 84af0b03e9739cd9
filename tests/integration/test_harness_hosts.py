"""Agent-loop and harness hosts over a real broker, store and HTTP, with a scripted double of an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from nats.js.errors import NotFoundError

from pipeline.capture.secret import session_secret
from pipeline.capture.server import Capture
from pipeline.engines.client import EngineClient
from pipeline.harnesses.base import Trial, Verdict
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker, RunConfig
from schemas.facts import (
    Fact,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
)
from schemas.names import attempt_id, sample_id, sequence_id
from services import agent_loop, harness
from services.process import Context
from tests.capture_parts import ScriptedEngine, served
from tests.integration.test_harness_trials import act

ROOT = Path(__file__).resolve().parents[2]
KEY = b"0123456789abcdef0123456789abcdef"


class Hopeless:
    """An adapter whose agent raises."""

    async def run(self, trial: Trial) -> Verdict:
        raise RuntimeError(f"cannot reach {trial.session_url}")


class Stuck:
    """An adapter that never ends."""

    async def run(self, trial: Trial) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Stage:
    def __init__(self, config: RunConfig, log: Log, store: ObjectStore, engine: ScriptedEngine) -> None:
        self.config = config
        self.log = log
        self.store = store
        self.engine = engine
        self.tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(
        self, *services: tuple[Callable[[Context], Coroutine[None, None, None]], str]
    ) -> AsyncIterator[asyncio.Event]:
        """The services on this event loop; yields the event that stops them."""
        stop = asyncio.Event()
        logs = [
            await Log.connect(self.config.broker, self.config.run, f"service-{i}")
            for i in range(len(services))
        ]
        logger = logging.getLogger("packtrain.test")
        tasks = [
            asyncio.create_task(
                serve(Context(self.config, f"host-{i}", logs[i], self.store, stop, logger, i, pool))
            )
            for i, (serve, pool) in enumerate(services)
        ]
        self.tasks |= set(tasks)
        try:
            yield stop
            stop.set()
            async with asyncio.timeout(20):
                await asyncio.gather(*tasks)
        finally:
            self.tasks -= set(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for log in logs:
                await log.close()

    async def dispatch(self, source: str, member: int = 0, pool: str = "", version: int = 0) -> str:
        sample = sample_id(source, 0)
        sequence = sequence_id(sample, member)
        await self.log.publish(
            SequenceDispatched(
                source=source,
                sample=sample,
                sequence=sequence,
                member=member,
                group_size=64,
                pool=pool or self.config.source(source).pool,
                task_index=member,
                min_policy_version=version,
            )
        )
        return sequence

    async def outcome(
        self, source: str, sequence: str, within_s: float = 40
    ) -> SequenceFinished | SequenceFailed:
        """Waits for the sequence's end; fails when a service ends first."""
        ending = asyncio.create_task(self._ending(source, sequence))
        await asyncio.wait({ending, *self.tasks}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in self.tasks:
            assert not task.done(), task
        assert ending.done(), f"{sequence} has not ended in {within_s} s"
        return ending.result()

    async def _ending(self, source: str, sequence: str) -> SequenceFinished | SequenceFailed:
        async for event in self.log.subscribe("*", source=source):
            if isinstance(event.fact, SequenceFinished | SequenceFailed) and event.fact.sequence == sequence:
                return event.fact
        raise AssertionError("unreachable")

    async def pending(self, work: str) -> int:
        """Deliveries of a work consumer that wait for an acknowledgement."""
        try:
            return (await self.log._js.consumer_info(self.log.stream, work)).num_ack_pending or 0
        except NotFoundError:
            return 0

    async def facts(self, type_: str) -> list[Fact]:
        """Every fact of that type so far."""
        head = await self.log.head()
        found: list[Fact] = []
        async for event in self.log.subscribe("*"):
            if event.fact.type == type_:
                found.append(event.fact)
            if event.seq >= head:
                return found
        raise AssertionError("unreachable")


def configuration(
    tmp_path: Path, broker: Broker, run: str, engine_url: str, **agent_loop_: object
) -> RunConfig:
    policy = tmp_path / "policy"
    policy.mkdir(exist_ok=True)
    (tmp_path / "run.key").write_bytes(KEY)
    here = "tests.integration.test_harness_hosts"
    sources = [
        {"name": "calc", "pool": "tools", "groups": 1, "environment": {"kind": "calculator"}},
        {"name": "sums", "pool": "chats", "groups": 1, "environment": {"kind": "arithmetic"}},
        {"name": "hopeless", "pool": "hopeless", "groups": 1, "environment": {"kind": "calculator"}},
        {"name": "stuck", "pool": "stuck", "groups": 1, "environment": {"kind": "calculator"}},
    ]
    for source in sources:
        source["behaviour"] = {"max_tokens": 200}
    return RunConfig.model_validate(
        {
            "run": run,
            "broker": broker.model_dump(),
            "store": {"url": f"file://{tmp_path}/objects"},
            "engine": {"url": engine_url, "policy": str(policy), "max_context": 2000},
            "agent_loop": {
                "run_key_file": str(tmp_path / "run.key"),
                "max_attempts": 2,
                "ack_wait_s": 1.5,
                "trial_budget_s": 30.0,
                **agent_loop_,
            },
            "pools": [
                {"name": "tools", "harness": "tool"},
                {"name": "chats", "harness": "chat"},
                {"name": "hopeless", "harness": f"{here}:Hopeless"},
                {"name": "stuck", "harness": f"{here}:Stuck"},
            ],
            "sources": sources,
        }
    )


def write_policy(config: RunConfig, engine: ScriptedEngine) -> None:
    """A policy directory that holds only what a rollout host reads."""
    directory = Path(config.engine.policy)
    engine.renderer.tokenizer._backend.save(str(directory / "tokenizer.json"))
    for name in ("config.json", "model.safetensors"):
        (directory / name).touch()


@pytest.fixture
async def stage(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> AsyncIterator[Callable[..., Stage]]:
    engine = ScriptedEngine(act)
    async with served(engine.application()) as engine_url:

        def make(**agent_loop_: object) -> Stage:
            config = configuration(tmp_path, broker, run_name, engine_url, **agent_loop_)
            write_policy(config, engine)
            return Stage(config, log, store, engine)

        yield make


def by_expression(prompt: str) -> str:
    """Plays the calculator policy for whatever task the prompt holds."""
    tail = prompt.rsplit("<|im_start|>tool\n", 1)
    if len(tail) == 2:
        return tail[1].split("<|im_end|>")[0]
    found = re.search(r"compute (.*)\.<\|im_end\|>", prompt)
    assert found is not None
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{found[1]}"}}}}</tool_call>'


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


async def test_no_verdict_within_the_budget_is_infra(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, "GRACE_S", 0.2)
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
    host = agent_loop.Host(
        Context(s.config, "x", s.log, s.store, asyncio.Event(), logging.getLogger("packtrain.test")),
        "al-x",
        "http://x",
        Capture(KEY, s.engine.renderer, s.engine, 2000),
        EngineClient(s.config.engine.url),
    )
    await host.handle(delivery)
    assert delivery.settled
    assert len(s.engine.prompts) == prompts


def spawn(config_file: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "service", *arguments, "--config", str(config_file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=(config_file.parent / f"{arguments[0]}.log").open("ab"),
    )


def write_config(config: RunConfig, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(config.model_dump(mode="json")))
    return path


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
