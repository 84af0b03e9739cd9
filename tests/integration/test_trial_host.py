"""One trial of a harness host over a real broker and store: its budget, its artefacts and what its verdict tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.capture.secret import session_secret
from pipeline.harnesses.base import Harness, InfraFailure, Trial, Verdict
from pipeline.harnesses.environments.calculator import Calculator
from pipeline.log import Delivery, Log
from pipeline.log.work import Work
from pipeline.store import ObjectStore, StoreError, StoreUnavailable
from schemas.config import Broker, RunConfig
from schemas.facts import SequenceOpened, SequenceVerified
from schemas.keys import artefact_key
from services.harness import artefacts
from services.harness.host import Host
from services.process import Context
from tests.rollout_stage import KEY, configuration

OPENED = SequenceOpened(
    source="calc",
    sample="calc-000000",
    sequence="calc-000000-0",
    attempt=1,
    pool="tools",
    task_index=0,
    host="al-1",
    base_url="http://127.0.0.1:1",
    session="calc-000000-0-a1",
    budget_s=30.0,
)
SECRET = session_secret(KEY, OPENED.session)


class Acting:
    """An adapter that does what a test says."""

    def __init__(self, act: Callable[[Trial], Awaitable[Verdict]]) -> None:
        self._act = act

    async def run(self, trial: Trial) -> Verdict:
        return await self._act(trial)


class Stage:
    def __init__(self, config: RunConfig, log: Log, store: ObjectStore, work: Work) -> None:
        self.config, self.log, self.store, self.work = config, log, store, work

    async def trial(
        self, harness: Harness, fact: SequenceOpened = OPENED, waited_s: float = 0
    ) -> SequenceVerified:
        """The verdict of an attempt that waited so long for this host."""
        await self.log.publish(fact)
        [delivery] = await self.work.fetch(1, 10)
        await self.handled(harness, delivery, waited_s)
        last = await self.log.last(SequenceVerified.type, fact.host, fact.id())
        assert last is not None
        assert isinstance(last.fact, SequenceVerified)
        assert delivery.settled
        return last.fact

    async def handled(self, harness: Harness, delivery: Delivery, waited_s: float = 0) -> None:
        logger = logging.getLogger("packtrain.test")
        ctx = Context(self.config, "h", self.log, self.store, asyncio.Event(), logger, 0, "tools")
        host = Host(ctx, harness, {"calc": Calculator(0, {})}, KEY)
        object.__setattr__(delivery.event, "time", datetime.now(UTC) - timedelta(seconds=waited_s))
        await host.handle(delivery)


@pytest.fixture
async def stage(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> AsyncIterator[Stage]:
    config = configuration(tmp_path, broker, run_name, "http://127.0.0.1:1", queue_s=100.0)
    timed = {**config.model_dump(mode="json")}
    timed["sources"][0]["timeouts"] = {"start_s": 5, "verify_s": 3}
    work = await log.work("harness-tools", "sequence.opened", source="tools", ack_wait_s=30)
    yield Stage(RunConfig.model_validate(timed), log, store, work)
    await work.close()


async def test_a_verdict_tells_what_the_trial_took_and_left(stage: Stage) -> None:
    async def act(trial: Trial) -> Verdict:
        trial.took["start"], trial.took["verify"] = 0.5, 0.25
        trial.took["of no account"] = 1.0
        trial.peak_bytes.extend([7, 9, 8])
        await trial.artefacts.save("agent_log", f"asked {trial.session_url}".encode() + b" \xff\n")
        await trial.artefacts.save("agent_log", b"of the same name")
        await trial.artefacts.save("empty", b"")
        return Verdict(0.5, "max_turns")

    fact = await stage.trial(Acting(act), waited_s=2.0)
    assert (fact.reward, fact.termination, fact.failure, fact.peak_bytes) == (0.5, "max_turns", None, 9)
    assert set(fact.seconds) == {"queue", "start", "verify"}
    assert 2.0 <= fact.seconds["queue"] < 10
    assert [a.name for a in fact.artefacts] == ["agent_log", "empty"]
    first, empty = fact.artefacts
    assert first.ref.key == artefact_key(stage.config.run, OPENED.id(), "agent_log")
    data = await stage.store.get(first.ref)
    assert SECRET.encode() not in data
    assert data.startswith(b"asked http://127.0.0.1:1/s/")
    assert data.endswith(b"***/v1 \xff\n"), "the first stands, byte for byte but for the secret"
    assert await stage.store.get(empty.ref) == b""


async def test_a_trial_that_fails_tells_and_leaves_as_much(stage: Stage) -> None:
    async def act(trial: Trial) -> Verdict:
        trial.took["start"] = 1.0
        await trial.artefacts.save("build_log", b"no space")
        raise InfraFailure("environment_failed", f"{trial.session_url} is full")

    fact = await stage.trial(Acting(act))
    assert fact.failure is not None
    assert fact.failure.reason == "environment_failed"
    assert SECRET not in fact.failure.detail
    assert fact.seconds["start"] == 1.0
    assert [a.name for a in fact.artefacts] == ["build_log"]


async def test_an_artefact_that_cannot_be_kept_fails_no_trial(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artefacts, "MAX_BYTES", 200)
    monkeypatch.setattr(artefacts, "MAX_ARTEFACTS", 2)
    theirs = artefact_key(stage.config.run, OPENED.id(), "taken")
    await stage.store.create(theirs, b"of an attempt that was here before")

    async def act(trial: Trial) -> Verdict:
        await trial.artefacts.save("taken", b"ours")
        await trial.artefacts.save("long", b"x" * 1000 + b"the end")
        await trial.artefacts.save("second", b"2")
        await trial.artefacts.save("one_too_many", b"3")
        return Verdict(1.0)

    fact = await stage.trial(Acting(act))
    assert fact.reward == 1.0
    assert [a.name for a in fact.artefacts] == ["long", "second"]
    assert await stage.store.get(theirs) == b"of an attempt that was here before"
    data = await stage.store.get(fact.artefacts[0].ref)
    line, _, rest = data.partition(b"\n")
    assert len(data) <= 200
    assert rest.endswith(b"the end")
    assert line == b"[%d bytes before this were left out]" % (1007 - len(rest))
    assert sum("is left out" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize(
    "error", [StoreError("it refuses"), StoreUnavailable("file:///x", "it is away", "wait")]
)
async def test_a_store_that_takes_no_artefact_fails_no_trial(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def create(key: str, data: bytes) -> None:
        raise error

    monkeypatch.setattr(stage.store, "create", create)

    async def act(trial: Trial) -> Verdict:
        await trial.artefacts.save("log", b"x")
        return Verdict(1.0)

    fact = await stage.trial(Acting(act))
    assert (fact.reward, fact.artefacts) == (1.0, ())


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 2e9])
async def test_a_reward_that_is_none_is_infra(stage: Stage, reward: float) -> None:
    async def act(trial: Trial) -> Verdict:
        return Verdict(reward)

    fact = await stage.trial(Acting(act))
    assert fact.failure is not None
    assert fact.failure.reason == "bad_reward"


async def test_the_budget_counts_from_when_the_host_takes_the_attempt(stage: Stage) -> None:
    seen: list[Trial] = []

    async def act(trial: Trial) -> Verdict:
        seen.append(trial)
        return Verdict(1.0)

    loop = asyncio.get_running_loop()
    for number, (waited, left) in enumerate([(0, 30), (99, 30), (110, 20)], 1):
        fact = OPENED.model_copy(update={"attempt": number, "session": f"calc-000000-0-a{number}"})
        assert (await stage.trial(Acting(act), fact, waited)).reward == 1.0
        trial = seen[-1]
        assert trial.name == fact.id()
        assert left - 2 < trial.deadline - loop.time() <= left
        assert trial.agent_s == pytest.approx(left - 3, abs=1)
        assert (trial.phases.start_s, trial.phases.verify_s) == (5, 3)
    late = OPENED.model_copy(update={"attempt": 4, "session": "calc-000000-0-a4"})
    refused = await stage.trial(Acting(act), late, 131)
    assert refused.failure is not None
    assert (refused.failure.reason, len(seen)) == ("queue_spent", 3)
    assert "queue_s, 100 s" in refused.failure.detail


async def test_a_trial_past_its_budget_is_ended(stage: Stage) -> None:
    async def act(trial: Trial) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    fact = await stage.trial(Acting(act), OPENED.model_copy(update={"budget_s": 0.2}))
    assert fact.failure is not None
    assert fact.failure.reason == "harness_timeout"
