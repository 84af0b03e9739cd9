"""The grader service on a real log and store: what a group is graded with, and when, whatever its judge does.

The judge is a double (`tests.judge_double`): no model that judges well runs on this machine.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.log import Log
from pipeline.signal.grading import LAG, Answer, graded_fact, kept_fact, understood
from pipeline.store import ObjectStore, StoreUnavailable, outage
from schemas.config import Broker
from schemas.facts import Artefact, SampleCompleted, SequenceDispatched, SequenceOpened, SequenceVerified
from schemas.keys import artefact_key, grading_key
from schemas.payload import Ref
from services import grader
from services.grader.judging import Limits, Report
from services.process import Context
from tests.grader_parts import completed, config, facts, graded, members, settled
from tests.judge_double import JudgeDouble, held, judge, says, status, verdicts
from tests.log_parts import CHECKED, until

pytestmark = pytest.mark.timeout(90)
LIMITS = Limits(ack_wait_s=10, backoff_s=0.01, longest_backoff_s=0.05)
Serve = Callable[..., Any]


@pytest.fixture
async def double() -> AsyncIterator[JudgeDouble]:
    async with judge() as found:
        yield found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "RETRY_S", 0.01)


@pytest.fixture
def serving(log: Log, store: ObjectStore, broker: Broker, double: JudgeDouble, tmp_path: Path) -> Serve:
    """The service with a judge, as the context of a `with`."""

    @asynccontextmanager
    async def serve(limits: Limits = LIMITS, **changed: Any) -> AsyncIterator[Context]:
        judge_options = {
            "url": double.url, "model": "j", "rubric": "Judge.", "price_in": 10, "price_out": 100,
        }  # fmt: skip
        settings = {"kind": "rubric", "options": judge_options, "deadline_s": 60, **changed}
        stop = asyncio.Event()
        run = config(log.run, broker, str(tmp_path), **settings)
        ctx = Context(run, "grader", log, store, stop, logging.getLogger("packtrain.test"))
        task = asyncio.create_task(grader.serve(ctx, limits))
        try:
            yield ctx
        finally:
            stop.set()
            await task

    return serve


async def test_an_answer_in_time_is_revision_0_with_its_report(
    log: Log, store: ObjectStore, double, serving
) -> None:
    async with serving():
        cause = await completed(log, store)
        found = await graded(log)
        await settled(log)
    assert (found.rewards, found.quality, found.hacks) == ((1.0, 1.0), (0.5, 0.5), (False, False))
    assert (found.grader, found.fallback, found.attempts, found.cost) == (
        "rubric",
        None,
        1,
        pytest.approx(0.02),
    )
    assert 0 < found.seconds < 60
    event = await log.last("sample.graded", "s", "s-000001")
    assert event is not None
    assert event.causation == cause.id
    assert found.report is not None
    assert found.report.key == grading_key(log.run, "s", "s-000001")
    report = Report.model_validate_json(await store.get(found.report))
    assert [(v.sequence, v.quality, v.reason) for v in report.answer.sequences] == [
        (each, 0.5, "as scripted") for each in ("s-000001-0", "s-000001-1")
    ]
    said = double.bodies[0]["messages"][1]["content"]
    assert '"role":"user","text":"1+1?"' in said
    assert '"role":"assistant","text":"two"' in said
    assert await facts(log) == 1


async def test_tries_are_repeated_and_all_of_them_cost(log: Log, store: ObjectStore, double, serving) -> None:
    double.steps = [says("Sure!"), status(500), status(500)]
    async with serving(attempts=4) as ctx:
        await completed(log, store)
        found = await graded(log)
        await settled(log)
    assert (found.quality, found.fallback, found.attempts, found.cost) == (
        (0.5, 0.5),
        None,
        4,
        pytest.approx(0.04),
    )
    assert len(double.bodies) == 4
    assert ctx.measures.grading_cost == {"s": pytest.approx(0.04)}
    assert {key: sum(histogram.counts) for key, histogram in ctx.measures.grading.items()} == {
        ("s", "answer"): 1
    }


@pytest.mark.parametrize("policy", ["wait", "lag"])
async def test_tries_that_all_fail_keep_the_rewards_and_say_why(
    log: Log, store, double, serving, policy: str
) -> None:
    double.steps = [status(500), says("Sure!")]
    async with serving(attempts=2, policy=policy):
        await completed(log, store)
        found = await graded(log)
        await settled(log)
    assert (found.rewards, found.quality, found.report) == ((1.0, 1.0), (), None)
    if policy == "wait":
        assert found.fallback is not None
        assert found.fallback.startswith(
            "2 tries failed, the last: the judge's answer is not usable: it is no answer"
        )
        assert (found.attempts, found.cost) == (2, pytest.approx(0.02))
    else:
        assert (found.fallback, found.attempts) == (LAG, 0)
    assert (await facts(log), len(double.bodies)) == (1, 2)


async def test_a_refusal_is_not_repeated(log: Log, store: ObjectStore, double, serving) -> None:
    double.steps = [status(401, "no such key")]
    async with serving(attempts=5):
        await completed(log, store)
        found = await graded(log)
    assert found.fallback is not None
    assert found.fallback.endswith("answered 401: no such key")
    assert (found.attempts, len(double.bodies)) == (1, 1)


async def test_a_try_has_its_time(log: Log, store: ObjectStore, double, serving) -> None:
    double.steps = [held]
    # More than two, for a machine that is slow.
    async with serving(timeout_s=0.3, attempts=20):
        await completed(log, store)
        found = await graded(log)
    assert (found.fallback, found.quality) == (None, (0.5, 0.5))
    assert found.attempts >= 2


async def test_late_answers_are_revisions_and_to_wait_for_a_turn_counts(
    log: Log, store, double, serving
) -> None:
    double.steps = [held, held]
    async with serving(deadline_s=0.3, concurrency=1):
        await completed(log, store, 1)
        await completed(log, store, 2)
        # Judges hang, and a source without one goes on.
        await completed(log, store, 1, "plain")
        plain = await graded(log, source="plain")
        assert (plain.grader, plain.fallback, plain.attempts, plain.report) == ("none", None, 0, None)
        for number in (1, 2):
            found = await graded(log, number)
            assert (found.rewards, found.quality, found.attempts) == ((1.0, 1.0), (), 0)
            assert found.fallback == "deadline of 0.3 s passed"
        await until(lambda: len(double.bodies) == 1)
        double.hold.set()
        late = [await graded(log, number, revision=1) for number in (1, 2)]
        await settled(log)
    assert [(each.quality, each.fallback, each.attempts) for each in late] == [((0.5, 0.5), None, 1)] * 2
    assert all(each.report is not None for each in late)
    assert (double.most, await facts(log)) == (1, 5)


@pytest.mark.parametrize(
    ("deadline_s", "head"),
    [(3600, {}), (0.05, {"ce-time": "2999-01-01T00:00:00Z"})],
    ids=["long ago", "by a clock that is ahead"],
)
async def test_the_deadline_counts_from_the_time_of_the_event(
    log: Log, store, double, serving, deadline_s: float, head: dict[str, str]
) -> None:
    double.steps = [held]
    group = await members(log, store, 1)
    head = {**CHECKED, "ce-type": "sample.completed", "ce-typeversion": "1", **head}
    await log.js.publish(
        f"rl.{log.run}.sample.completed.s.s-000001", group.model_dump_json().encode(), headers=head
    )
    async with serving(deadline_s=deadline_s):
        assert (await graded(log)).fallback == f"deadline of {deadline_s:g} s passed"
        double.hold.set()
        assert (await graded(log, revision=1)).quality == (0.5, 0.5)


async def test_under_lag_a_group_goes_on_at_once(log: Log, store: ObjectStore, double, serving) -> None:
    double.steps = [held]
    async with serving(policy="lag"):
        await completed(log, store)
        assert (await graded(log)).fallback == LAG
        double.hold.set()
        assert (await graded(log, revision=1)).quality == (0.5, 0.5)
        await settled(log)
    assert await facts(log) == 2


@pytest.mark.parametrize("policy", ["lag", "wait"])
async def test_of_too_many_late_groups_the_oldest_that_waits_is_given_up(
    log: Log, store: ObjectStore, double, serving, policy: str
) -> None:
    """A judge that is slower than the run holds up no other source for ever, and is asked of the newest."""
    double.steps = [held]
    async with serving(replace(LIMITS, late=2), policy=policy, deadline_s=0.01, concurrency=1) as ctx:

        def over() -> dict[str, int]:
            return {key[1]: sum(found.counts) for key, found in ctx.measures.grading.items()}

        for number in (1, 2, 3, 4):
            await completed(log, store, number)
            assert (await graded(log, number)).fallback is not None
            await until(lambda: len(double.bodies) == 1)
        await until(lambda: over() == {"failed": 2})
        double.hold.set()
        for number in (1, 4):
            assert (await graded(log, number, revision=1)).quality == (0.5, 0.5)
        await settled(log)
    assert (await facts(log), len(double.bodies)) == (6, 2)
    assert over() == {"late": 2, "failed": 2}


Before = Callable[[Log, ObjectStore, SampleCompleted], Awaitable[None]]


def _answer() -> Answer:
    body = {"messages": [{"content": "each once: s-000001-0, s-000001-1."}]}
    return Answer.model_validate_json(verdicts(body, quality=0.25))


async def answered(log: Log, store: ObjectStore, group: SampleCompleted) -> None:
    await log.publish(graded_fact("rubric", group, understood(group, _answer()), attempts=1))


async def failed(log: Log, store: ObjectStore, group: SampleCompleted) -> None:
    await log.publish(kept_fact("rubric", group, "3 tries failed", attempts=3))


async def passed(log: Log, store: ObjectStore, group: SampleCompleted) -> None:
    await log.publish(kept_fact("rubric", group, "deadline"))


async def passed_and_late(log: Log, store: ObjectStore, group: SampleCompleted) -> None:
    await passed(log, store, group)
    await log.publish(graded_fact("rubric", group, understood(group, _answer()), 1, attempts=5))


async def kept(log: Log, store: ObjectStore, group: SampleCompleted) -> None:
    report = Report(grader="rubric", answer=_answer(), attempts=7, seconds=1.5, cost=0.5)
    await store.create(grading_key(log.run, "s", group.sample), report.model_dump_json().encode())


async def kept_late(log: Log, store: ObjectStore, group: SampleCompleted) -> None:
    await kept(log, store, group)
    await passed(log, store, group)


@pytest.mark.parametrize(
    ("before", "revision", "attempts", "count", "asked"),
    [
        (answered, 0, 1, 1, 0),
        (failed, 0, 3, 1, 0),
        (passed, 1, 1, 2, 1),
        (passed_and_late, 1, 5, 2, 0),
        (kept, 0, 7, 1, 0),
        (kept_late, 1, 7, 2, 0),
    ],
)
async def test_what_a_lost_grader_had_done_is_not_done_again(
    log: Log, store, double, serving, before: Before, revision: int, attempts: int, count: int, asked: int
) -> None:
    group = await members(log, store, 1)
    await log.publish(group)
    await before(log, store, group)
    async with serving():
        found = await graded(log, revision=revision)
        await settled(log)
    assert found.attempts == attempts
    if before in (kept, kept_late):
        assert (found.quality, found.seconds, found.cost) == ((0.25, 0.25), 1.5, 0.5)
        assert found.report is not None
        await store.get(found.report)
    assert (await facts(log), len(double.bodies)) == (count, asked)


async def test_a_payload_that_is_gone_is_a_reason(log: Log, store: ObjectStore, double, serving) -> None:
    group = await members(log, store, 1)
    await store.remove([key async for key, _ in store.list(f"runs/{log.run}/payloads")])
    await log.publish(group)
    async with serving():
        found = await graded(log)
    assert found.fallback is not None
    assert found.fallback.startswith("its sequences cannot be read: ")
    assert double.bodies == []


async def test_a_group_of_which_nothing_finished_is_not_judged(
    log: Log, store: ObjectStore, double, serving
) -> None:
    await log.publish(SampleCompleted(source="s", sample="s-000001", sequences=(), rewards=(), failed=2))
    async with serving():
        found = await graded(log)
    assert (found.rewards, found.fallback, found.grader, double.bodies) == ((), None, "rubric", [])


async def test_a_store_that_is_away_costs_no_try(
    log: Log, store: ObjectStore, double, serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    await completed(log, store)
    away = {"get": 2, "get_ranges": 2, "create": 2}

    def failing(name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(store, name)

        async def once(*args: Any, **kwargs: Any) -> Any:
            away[name] -= 1
            if away[name] >= 0:
                raise StoreUnavailable(store.url, "away", "wait")
            return await call(*args, **kwargs)

        return once

    for name in away:
        monkeypatch.setattr(store, name, failing(name))
    async with serving(attempts=1):
        found = await graded(log)
    assert (found.quality, found.fallback, found.attempts, len(double.bodies)) == ((0.5, 0.5), None, 1, 1)
    assert max(away.values()) < 0


PROGRAM = """
import json
from pathlib import Path
group, task = (json.loads(Path(n).read_text()) for n in ("group.json", "task.json"))
texts = [json.loads(Path(f"transcripts/{s}.json").read_text())["contexts"][0]["turns"][-1]["text"] for s in group["sequences"]]
told = Path("artefacts", group["sequences"][1], "agent_log").read_text() + str(task["task_index"]) + task["environment"]["kind"]
print(json.dumps({"sequences": [
    {"sequence": s, "quality": 1.0 if t == "2" else 0.5, "hack": False, "reason": told} for s, t in zip(group["sequences"], texts)
]}))
"""


async def test_a_program_judges_with_task_transcripts_and_artefacts(
    log: Log, store, serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    group = await members(log, store, 1)
    first, second = group.sequences
    ids: dict[str, Any] = {"source": "s", "sample": group.sample}
    await log.publish(
        SequenceDispatched(**ids, sequence=first, member=0, group_size=2, pool="p", task_index=41)
    )
    host: dict[str, Any] = {
        "pool": "p",
        "task_index": 41,
        "base_url": "http://h",
        "session": "x",
        "budget_s": 1,
    }
    await log.publish(SequenceOpened(**ids, sequence=second, attempt=1, host="al-0", **host))
    ref: Ref = await store.create(artefact_key(log.run, f"{second}-a1", "agent_log"), b"the agent's log ")
    left = (Artefact(name="agent_log", ref=ref),)
    await log.publish(
        SequenceVerified(**ids, sequence=second, attempt=1, host="al-0", reward=1.0, artefacts=left)
    )
    await log.publish(group)
    get, tried = store.get, []

    async def away(what: Any) -> bytes:
        if what == ref:
            tried.append(what)
            if len(tried) < 3:
                raise StoreUnavailable(store.url, "away", "wait")
        return await get(what)

    monkeypatch.setattr(store, "get", away)
    # While the store is away, what the program is to be given costs no try either.
    async with serving(kind="command", options={"argv": [str(program)]}, attempts=1):
        found = await graded(log)
    assert (len(tried), found.attempts) == (3, 1)
    assert (found.quality, found.fallback, found.grader) == ((0.5, 1.0), None, "command")
    assert found.report is not None
    report = orjson.loads(await store.get(found.report))
    assert report["answer"]["sequences"][0]["reason"] == "the agent's log 41arithmetic"


async def test_stopped_in_mid_judging_it_hands_the_group_back(
    log: Log, store: ObjectStore, double, serving
) -> None:
    double.steps = [held]
    async with serving():
        await completed(log, store)
        await until(lambda: len(double.bodies) == 1)
    assert await facts(log) == 0
    async with serving():
        found = await graded(log)
        await settled(log)
    assert (found.quality, len(double.bodies), await facts(log)) == ((0.5, 0.5), 2, 1)
