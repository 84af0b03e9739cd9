"""Parts for tests of rollout hosts: their services over a real broker, store and HTTP, around a scripted engine double."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tomli_w
from nats.js.errors import NotFoundError

from pipeline.harnesses.base import Trial, Verdict
from pipeline.harnesses.environments.base import Outcome, Task
from pipeline.harnesses.environments.calculator import Calculator
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker, RunConfig
from schemas.facts import Fact, SequenceDispatched, SequenceFailed, SequenceFinished
from schemas.names import sample_id, sequence_id
from services.process import Context
from tests.capture_parts import Script, ScriptedEngine, served

ROOT = Path(__file__).resolve().parents[1]
KEY = b"0123456789abcdef0123456789abcdef"


class Hopeless:
    """An adapter whose agent raises, with a secret and what is no UTF-8 in its words."""

    async def run(self, trial: Trial) -> Verdict:
        raise RuntimeError(f"cannot reach {trial.session_url} \udcff")


class Quitter:
    """An adapter that ends the process, as a script's `sys.exit` does."""

    async def run(self, trial: Trial) -> Verdict:
        raise SystemExit(1)


class Misnamer:
    """An adapter whose verdict cannot be an event."""

    async def run(self, trial: Trial) -> Verdict:
        return Verdict(1.0, "ran out of turns!")


class Stuck:
    """An adapter that never ends."""

    async def run(self, trial: Trial) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Blocked(Calculator):
    """An environment whose verifier never returns; it leaves a mark when it begins."""

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        super().__init__(seed, {})
        self._mark = Path(options["mark"])

    def verify(self, task: Task, outcome: Outcome) -> float:
        self._mark.touch()
        threading.Event().wait()
        raise AssertionError("unreachable")


class Awaited(Calculator):
    """An environment whose verifier says that it has begun, and ends when it is let."""

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        super().__init__(seed, {})
        self._mark = Path(options["mark"])

    def verify(self, task: Task, outcome: Outcome) -> float:
        self._mark.touch()
        deadline = time.monotonic() + 60
        while not self._mark.with_suffix(".go").exists():
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)
        return super().verify(task, outcome)


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
                group_size=256,
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
    here = "tests.rollout_stage"
    sources = [
        {"name": "calc", "pool": "tools", "groups": 1, "environment": {"kind": "calculator"}},
        {"name": "sums", "pool": "chats", "groups": 1, "environment": {"kind": "arithmetic"}},
        {"name": "hopeless", "pool": "hopeless", "groups": 1, "environment": {"kind": "calculator"}},
        {"name": "quitter", "pool": "quitter", "groups": 1, "environment": {"kind": "calculator"}},
        {"name": "misnamer", "pool": "misnamer", "groups": 1, "environment": {"kind": "calculator"}},
        {"name": "stuck", "pool": "stuck", "groups": 1, "environment": {"kind": "calculator"}},
        {
            "name": "blocked",
            "pool": "blocked",
            "groups": 1,
            "environment": {"kind": f"{here}:Blocked", "options": {"mark": str(tmp_path / "blocked")}},
        },
    ]
    sources.append(
        {
            "name": "awaited",
            "pool": "tools",
            "groups": 1,
            "environment": {"kind": f"{here}:Awaited", "options": {"mark": str(tmp_path / "verifying")}},
        }
    )
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
                "journal_dir": str(tmp_path / "journal"),
                "max_attempts": 2,
                "ack_wait_s": 1.5,
                "trial_budget_s": 30.0,
                "queue_s": 0.0,
                **agent_loop_,
            },
            "pools": [
                {"name": "tools", "harness": "tool"},
                {"name": "chats", "harness": "chat"},
                {"name": "hopeless", "harness": f"{here}:Hopeless"},
                {"name": "quitter", "harness": f"{here}:Quitter"},
                {"name": "misnamer", "harness": f"{here}:Misnamer"},
                {"name": "stuck", "harness": f"{here}:Stuck"},
                {"name": "blocked", "harness": "chat"},
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


@asynccontextmanager
async def staged(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore, script: Script
) -> AsyncIterator[Callable[..., Stage]]:
    """Makes stages around one engine double that plays `script`; the arguments are `agent_loop` settings."""
    engine = ScriptedEngine(script)
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
