"""A whole run as a user starts it, for tests: the launcher as a process, its run's log from outside, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from pipeline.config import load
from pipeline.log import Log
from pipeline.replay.rerun import Rerun
from pipeline.replay.service import SERVICES
from pipeline.store import ObjectStore
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    PolicyPublished,
    RunStopped,
    SampleRejected,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    StepTrained,
)
from schemas.plan import Plan

SMALL = """
run = "small"
steps = 2

[batch]
dp = 2

[agent_loop]
ack_wait_s = 2.0

[[pools]]
name = "chat"
harness = "chat"

[[pools]]
name = "tool"
harness = "tool"

[[sources]]
name = "arithmetic"
pool = "chat"
groups = 2
group_size = 4
[sources.behaviour]
max_tokens = 16
max_turns = 1
[sources.environment]
kind = "arithmetic"

[[sources]]
name = "calculator"
pool = "tool"
groups = 2
group_size = 4
[sources.behaviour]
max_tokens = 64
[sources.environment]
kind = "calculator"
"""

CHAT_ONLY = """
run = "small"
steps = 2
[batch]
dp = 1
[[pools]]
name = "chat"
harness = "chat"
[[sources]]
name = "arithmetic"
pool = "chat"
groups = 2
group_size = 4
[sources.behaviour]
max_tokens = 16
max_turns = 1
[sources.environment]
kind = "arithmetic"
"""
"""The smallest run: one source, one rank, no tool."""


class Launched:
    """`packtrain run FILE --plain`, or another `command`, in a directory of its own.

    `wrap` goes before its command line (a namespace to run it in), which sees as `state` what is `seen` from here.
    """

    def __init__(
        self,
        directory: Path,
        text: str = SMALL,
        run: str = "small",
        *,
        wrap: Sequence[str] = (),
        state: Path | None = None,
        seen: Path | None = None,
        command: str = "run",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.run = run
        self.file = directory / "run.toml"
        self.file.write_text(text)
        self._wrap = list(wrap)
        self._command = command
        self._environment = environment
        self.state = state or directory / "state"
        self.seen = seen or self.state
        self.home = self.seen / "runs" / run
        self.output = directory / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        argv = [sys.executable, "-P", "-m", "services.cli.main", self._command, str(self.file)]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._wrap, *argv, "--plain", *arguments, "--directory", str(self.state)],
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env=self._environment,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def finish(self, deadline_s: float) -> int:
        """The launcher's exit status; kills it and fails after the deadline."""
        assert self._process is not None
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"the run did not end in {deadline_s} s; output:\n{self.told()}") from None

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that failed leaves no launcher, and so none of what it started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def told(self) -> str:
        return self.output.read_text()

    def pids(self) -> dict[str, int]:
        """Running processes by name; empty before the first start."""
        try:
            return orjson.loads((self.home / "processes.json").read_bytes())["pids"]
        except FileNotFoundError:
            return {}

    def restarts(self) -> dict[str, int]:
        return orjson.loads((self.home / "processes.json").read_bytes())["restarts"]

    def actors(self) -> dict[str, tuple[str, int]]:
        """(node, process) of rollout hosts that are Ray actors, by name."""
        return orjson.loads((self.home / "processes.json").read_bytes())["actors"]

    async def pid(self, name: str) -> int:
        """The process of a service, once it runs."""
        return await self._wait(lambda: self.pids().get(name), f"{name} to run")

    async def log(self) -> Log:
        """A connection to the run's log, once there is one."""
        await self._wait(lambda: (self.home / "config.toml").exists() or None, "the run's configuration")
        await self.pid("sampler")
        broker = load(self.home / "config.toml").broker
        token = Path(broker.token_file)
        if token.is_relative_to(self.state):
            token = self.seen / token.relative_to(self.state)
        return await Log.connect(broker.model_copy(update={"token_file": str(token)}), self.run, "test", 20)

    async def _wait(self, look, what: str, deadline_s: float = 120.0):
        deadline = time.monotonic() + deadline_s
        while (found := look()) is None:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}; output:\n{self.told()}")
            await asyncio.sleep(0.02)
        return found


async def history(launched: Launched, log: Log) -> list[Event]:
    """Every event of the run, from the first to its end."""
    events: list[Event] = []
    async for event in log.subscribe():
        events.append(event)
        if isinstance(event.fact, RunStopped):
            return events
    raise AssertionError("the log ended before the run")


async def check_history(events: list[Event], store: ObjectStore, steps: int) -> None:
    """What must hold of every run, whatever was killed in it."""
    facts = [event.fact for event in events]
    subjects = Counter(fact.subject("r").text for fact in facts)
    assert set(subjects.values()) == {1}, "a fact stands twice"
    assert len({event.id for event in events}) == len(events)
    yielded = {f.step: f for f in facts if isinstance(f, BatchYielded)}
    assert sorted(yielded) == list(range(1, steps + 1))
    trained = [f for f in facts if isinstance(f, StepTrained)]
    assert [f.step for f in trained] == list(range(1, steps + 1))
    assert [f.parent for f in trained] == [None, *[f.weights for f in trained[:-1]]], (
        "a step started from other weights"
    )
    assert [(f.step, f.weights) for f in facts if isinstance(f, PolicyPublished)] == [
        (f.step, f.weights) for f in trained
    ]
    planned: Counter[str] = Counter()
    finished = {f.sequence: f for f in facts if isinstance(f, SequenceFinished)}
    for step, fact in yielded.items():
        plan = Plan.model_validate_json(await store.get(fact.plan))
        assert plan.step == step
        assert trained[step - 1].loss_tokens == plan.loss_tokens, (
            "the trainer saw other tokens than were planned"
        )
        for sequence in plan.sequences:
            planned[sequence.sequence] += 1
            assert sequence.payload == finished[sequence.sequence].payload
    assert set(planned.values()) == {1}, "a sequence is in two batches"
    rejected = {f.sample for f in facts if isinstance(f, SampleRejected)}
    assert not rejected & {s.rpartition("-")[0] for s in planned}
    for service in SERVICES.values():
        again = Rerun(events[0].fact.id(), service)
        for event in events:
            again.feed(event)
        assert again.report().divergences == (), f"{service.name} decides otherwise from the log alone"
    ended = [f.sequence for f in facts if isinstance(f, SequenceFinished | SequenceFailed)]
    assert set(ended) <= {f.sequence for f in facts if isinstance(f, SequenceDispatched)}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
