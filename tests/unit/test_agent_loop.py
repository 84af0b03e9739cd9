"""What an attempt comes to, as a pure function of the verdict and of what its session saw."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipeline.capture.dialogue import Dialogue
from pipeline.capture.export import Export, export
from pipeline.capture.journal import HostJournal
from pipeline.capture.messages import Message
from pipeline.capture.recovery import Recovered, Recovery
from pipeline.capture.rules import Rules
from pipeline.capture.server import Capture
from pipeline.capture.session import Session
from pipeline.capture.tree import ContextTree
from pipeline.capture.uploads import Uploads
from pipeline.signal.rules import judge_of
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import AgentLoop, Batch, Behaviour, Penalty, Store
from schemas.envelope import BodyTooLarge, Event
from schemas.facts import (
    Fact,
    Failure,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
)
from services.agent_loop.ending import Ending
from services.agent_loop.host import Failed, Host, last_tokens
from services.agent_loop.judge import Result, judge, judge_recovered
from services.process import Context
from tests.capture_parts import ScriptedEngine, complete


def verdict(
    reward: float | None = 1.0, termination: str = "completed", failure: Failure | None = None
) -> SequenceVerified:
    return SequenceVerified(
        source="s",
        sample="s-0",
        sequence="s-0-0",
        attempt=1,
        host="h",
        reward=reward,
        termination=termination,
        failure=failure,
    )


LOST = Failure(kind="infra", reason="harness_lost")
OPENED = SequenceOpened(
    source="s",
    sample="s-000000",
    sequence="s-000000-0",
    attempt=1,
    pool="p",
    task_index=0,
    host="h",
    base_url="http://127.0.0.1:1",
    session="s-000000-0-1",
    budget_s=1.0,
)
DISPATCHED = SequenceDispatched(
    source="s", sample="s-000000", sequence="s-000000-0", member=0, group_size=1, pool="p", task_index=0
)


class Told:
    """A log that takes every fact; `limit` bytes at most."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit
        self.facts: list[Fact] = []

    async def publish(self, fact: Fact, cause: object) -> None:
        if len(fact.model_dump_json()) > self.limit:
            raise BodyTooLarge("the event is too large")
        self.facts.append(fact)


def ending(directory: Path, told: Told, batch: Batch = Batch()) -> Ending:  # noqa: B008  # frozen
    store = ObjectStore.open(Store(url=directory.as_uri()))
    config = SimpleNamespace(batch=batch)
    ctx = SimpleNamespace(run="r", store=store, log=told, logger=logging.getLogger("test"), config=config)
    return Ending(cast(Context, ctx), Uploads(store, "r"))


def exported(reply: str) -> Export:
    async def run() -> Export:
        engine = ScriptedEngine(lambda _: reply)
        tenant = Session("s", Behaviour(), 1000, engine.renderer, engine)
        await complete(tenant, "1", Dialogue((Message("user", "q"),)))
        return tenant.export()

    return asyncio.run(run())


def event(fact: Fact) -> Event:
    return Event(fact, "1", datetime.now(UTC), "test", seq=1)


def test_what_is_kept_is_of_the_last_attempt_that_sampled_any_and_the_reason_is_the_last_ones() -> None:
    late = Failure(kind="infra", reason="engine_unavailable")
    one, two, nothing = exported("a"), exported("b"), export(ContextTree())
    lost = Failed(LOST, 1, one)
    assert last_tokens(Failed(late, 2, two), lost) == Failed(late, 2, two)
    assert last_tokens(Failed(late, 2, nothing), lost) == Failed(late, 1, one)
    assert last_tokens(Failed(late), lost) == Failed(late, 1, one)
    assert last_tokens(Failed(late, 2, nothing), None) == Failed(late, 2, nothing)


@pytest.mark.parametrize(
    ("how", "kept"), [(RuntimeError, False), (asyncio.CancelledError, True), (None, False)]
)
async def test_a_host_that_stops_leaves_its_journal_and_one_that_goes_on_does_not(
    tmp_path: Path, how: type[BaseException] | None, kept: bool
) -> None:
    class Won(Told):
        async def publish(self, fact: Fact, cause: object) -> SimpleNamespace:
            return SimpleNamespace(won=True, event=event(fact))

    source = SimpleNamespace(behaviour=Behaviour())
    config = SimpleNamespace(agent_loop=AgentLoop(), source=lambda _: source)
    ctx = cast(
        Context,
        SimpleNamespace(config=config, log=Won(), run="r", store=None, logger=logging.getLogger("test")),
    )
    engine = ScriptedEngine(lambda _: "a")
    journal = HostJournal(tmp_path, "h1")
    capture = Capture(b"k" * 32, engine.renderer, engine, 1000)
    uploads = Uploads(ObjectStore.in_memory(), "r")
    host = Host(ctx, "h1", "http://127.0.0.1:1", capture, engine, uploads, journal=journal)
    with contextlib.suppress(*([how] if how else [])):
        async with host._opened(event(DISPATCHED), DISPATCHED, 1, 10.0) as attempt:
            await complete(attempt.session, "1", Dialogue((Message("user", "q"),)))
            if how is not None:
                raise how
    journal.close()
    assert (tmp_path / "h1").exists() is kept


def test_an_attempt_whose_payload_was_written_before_its_host_died_is_finished(tmp_path: Path) -> None:
    async def run() -> list[Failure | None]:
        told = Told()
        # The first host writes the payload and dies before it says so.
        await ending(tmp_path, told)._write("s", OPENED.id(), same)
        found = [await ending(tmp_path, told).finish(event(OPENED), 1.0, "completed", 1, same)]
        found.append(await ending(tmp_path, told).finish(event(OPENED), 1.0, "completed", 1, other))
        (finished,) = told.facts
        assert isinstance(finished, SequenceFinished)
        store = ObjectStore.open(Store(url=tmp_path.as_uri()))
        columns = await read_columns(store, finished.payload, ["tokens"])
        assert columns["tokens"].tolist() == same.columns["tokens"].tolist()
        return found

    same, other = exported("a"), exported("b")
    first, second = asyncio.run(run())
    assert first is None
    assert second is not None
    assert second.reason == "payload_exists", "what is there are other tokens"


def test_a_sequence_too_large_for_its_event_fails_and_its_tokens_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        end = ending(tmp_path, told)
        failure = await end.finish(event(OPENED), 1.0, "completed", 1, found)
        assert failure is not None
        assert failure.reason == "event_too_large"
        told.limit = 1 << 20
        await end.fail(event(OPENED), DISPATCHED, 1, failure, 1, found)

    told, found = Told(limit=100), exported("a")
    asyncio.run(run())
    (failed,) = told.facts
    assert isinstance(failed, SequenceFailed)
    assert failed.payload is not None
    assert failed.contexts == found.contexts


@pytest.mark.parametrize(
    ("given", "turns", "owed", "malformed", "expected"),
    [
        (verdict(), 2, False, False, Result(None, 1.0, "completed")),
        (verdict(0.0, "max_turns"), 4, False, False, Result(None, 0.0, "max_turns")),
        (verdict(0.0, "agent_timeout"), 1, False, False, Result(None, 0.0, "agent_timeout")),
        (verdict(0.0), 1, False, True, Result(None, 0.0, "malformed")),
        (verdict(0.0, "overlong"), 1, False, True, Result(None, 0.0, "overlong")),
        (verdict(None, "failed", LOST), 1, False, False, Result(LOST)),
    ],
)
def test_results(given: SequenceVerified, turns: int, owed: bool, malformed: bool, expected: Result) -> None:
    assert judge(given, turns=turns, owed=owed, malformed=malformed) == expected


@pytest.mark.parametrize(
    ("given", "turns", "owed", "reason"),
    [
        (None, 3, False, "harness_timeout"),
        (verdict(None), 1, False, "missing_reward"),
        (verdict(0.0, "agent_timeout"), 1, True, "engine_timeout"),
        (verdict(0.0, "agent_crashed"), 1, True, "engine_unavailable"),
        (verdict(0.0, "overlong"), 0, False, "nothing_sampled"),
    ],
)
def test_what_is_not_the_policys_doing_is_infra(
    given: SequenceVerified | None, turns: int, owed: bool, reason: str
) -> None:
    result = judge(given, turns=turns, owed=owed, malformed=False)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.reason) == ("infra", reason)


@pytest.mark.parametrize(
    "ended", ["completed", "max_turns", "overlong", "agent_timeout", "agent_crashed", "gave_up"]
)
def test_whatever_the_agent_made_of_it_a_rule_ended_the_rollout(ended: str) -> None:
    given = verdict(0.5, ended)
    result = judge(given, turns=1, owed=False, malformed=True, refused="early_stop", stopped=True)
    assert result == Result(None, 0.5, "early_stop")
    masked = judge(given, turns=1, owed=False, malformed=False, stopped=True, effects={"early_stop": "retry"})
    assert masked.failure is not None
    assert masked.failure.reason == "early_stop"


def test_what_the_world_did_is_no_early_stop() -> None:
    for given, owed, reason in (
        (verdict(0.0, "agent_killed"), False, "agent_killed"),
        (verdict(0.0, "agent_timeout"), True, "engine_timeout"),
        (verdict(None, "failed", LOST), False, "harness_lost"),
        (None, False, "harness_timeout"),
    ):
        failure = judge(given, turns=1, owed=owed, malformed=False, stopped=True).failure
        assert failure is not None
        assert (failure.kind, failure.reason) == ("infra", reason)


def test_an_attempt_that_a_rule_could_not_judge_is_infra() -> None:
    for given in (None, verdict(), verdict(None, "failed", LOST)):
        failure = judge(given, turns=1, owed=False, malformed=False, broken="rule 'x' raised").failure
        assert failure == Failure(kind="infra", reason="rule_failed", detail="rule 'x' raised")


@pytest.mark.parametrize("stop", [True, False])
async def test_a_lost_hosts_attempt_has_the_flags_and_the_end_that_its_rules_gave(
    tmp_path: Path, stop: bool
) -> None:
    class Answered(Told):
        async def last(self, *of: str) -> Event:
            return event(verdict(0.0, "agent_crashed"))

    rules = judge_of(
        [Penalty(rule="malformed_call"), Penalty(rule="unknown_tool", stop=stop, scope="sequence")]
    )
    turns = iter(("a", '<tool_call>{"name": "t", "arguments": {}}</tool_call>'))
    engine = ScriptedEngine(lambda _: next(turns))
    journal = HostJournal(tmp_path / "journal", "h")
    given = (Behaviour(), 1000, engine.renderer, engine, b"", Rules(), None, journal, rules)
    lost = Session(OPENED.session, *given)
    history = (Message("user", "q"), Message("assistant", "a"), Message("user", "more"))
    await complete(lost, "1", Dialogue(history[:1]))
    await complete(lost, "2", Dialogue(history))
    os.close(journal._lock)

    source = SimpleNamespace(behaviour=Behaviour(), effects={})
    config = SimpleNamespace(agent_loop=AgentLoop(), batch=Batch(), source=lambda _: source)
    store, told = ObjectStore.open(Store(url=tmp_path.as_uri())), Answered()
    ctx = SimpleNamespace(config=config, log=told, run="r", store=store, logger=logging.getLogger("test"))
    capture = Capture(b"k" * 32, engine.renderer, engine, 1000)
    recovery = Recovery(tmp_path / "journal")
    host = Host(
        cast(Context, ctx),
        "h2",
        "http://127.0.0.1:1",
        capture,
        engine,
        Uploads(store, "r"),
        recovery=recovery,
        judges={"s": rules},
    )
    failed = await host._collect(DISPATCHED, event(OPENED))
    if not stop:
        assert failed is not None
        assert failed.failure.reason == "host_lost", "the agent missed an answer"
        assert failed.exported is not None
        assert failed.exported.contexts[0].flags
        return
    assert failed is None
    (finished,) = told.facts
    assert isinstance(finished, SequenceFinished)
    assert finished.termination == "early_stop"
    assert finished.contexts == lost.export().contexts
    assert [flag.rules for flag in finished.contexts[0].flags] == [0b10, 0b10]


def recovered(finish: str | None, turns: int = 2, malformed: int = 0, whole: bool = True) -> Recovered:
    return Recovered(turns=turns, finish=finish, malformed=malformed, whole=whole)  # pyright: ignore[reportArgumentType]  # a Finish


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        (verdict(), recovered("stop"), Result(None, 1.0, "completed")),
        (verdict(), recovered("stop", malformed=1), Result(None, 1.0, "malformed")),
        (verdict(0.0, "max_turns"), recovered("tool_calls", 4), Result(None, 0.0, "max_turns")),
        (verdict(0.0, "overlong"), recovered("length"), Result(None, 0.0, "overlong")),
    ],
)
def test_an_attempt_whose_host_died_stands_when_its_end_was_recorded(
    given: SequenceVerified, found: Recovered, expected: Result
) -> None:
    assert judge_recovered(given, found, Behaviour(max_turns=4)) == expected


def test_an_attempt_whose_host_died_after_a_rule_ended_it_missed_a_refusal_alone() -> None:
    found, ended = recovered("tool_calls"), verdict(0.0, "agent_crashed")
    stopped = judge_recovered(ended, found, Behaviour(max_turns=4), stopped=True)
    assert stopped == Result(None, 0.0, "early_stop")
    assert judge_recovered(ended, found, Behaviour(max_turns=4)).failure is not None
    damaged = judge_recovered(ended, recovered("tool_calls", whole=False), Behaviour(), stopped=True)
    assert damaged.failure is not None
    assert damaged.failure.reason == "journal_damaged"


@pytest.mark.parametrize(
    ("given", "found", "reason"),
    [
        (None, recovered("stop"), "host_lost"),
        (verdict(None, "failed", LOST), recovered("stop"), "harness_lost"),
        (verdict(), recovered("tool_calls"), "host_lost"),
        (verdict(0.0, "max_turns"), recovered("tool_calls", 3), "host_lost"),
        (verdict(0.0, "agent_timeout"), recovered("stop"), "host_lost"),
        (verdict(0.0, "overlong"), recovered("tool_calls"), "host_lost"),
        (verdict(), recovered(None, 0), "nothing_sampled"),
        (verdict(), recovered(None, 1), "host_lost"),
        (verdict(), recovered("stop", whole=False), "journal_damaged"),
    ],
)
def test_an_agent_that_missed_its_hosts_answer_is_infra(
    given: SequenceVerified | None, found: Recovered, reason: str
) -> None:
    failure = judge_recovered(given, found, Behaviour(max_turns=4)).failure
    assert failure is not None
    assert (failure.kind, failure.reason) == ("infra", reason)
