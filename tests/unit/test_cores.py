"""The mixer's and the sampler's cores together, over a log that is a list: whole runs without a broker."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Core, Decision
from pipeline.signal.groups import Groups
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    Failure,
    PolicyPublished,
    Ref,
    RunStarted,
    RunStopped,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    StepTrained,
)
from schemas.plan import Plan
from tests.recorded import demo_events
from tests.unit.factories import config, event, finished

REF = Ref(key="k", bytes=0, crc32c=0)


class World:
    """Everything around the cores, in one thread: hosts, grader and trainer that do what is asked in random order.

    The log keeps the exactly-once rule: the first fact on a subject stands.
    """

    def __init__(self, run_config: RunConfig, seed: int, failures: float = 0.1) -> None:
        self.config = run_config
        self.random = random.Random(seed)
        self.failures = failures
        self.log: list[Event] = []
        self.subjects: dict[str, Fact] = {}
        self.objects: dict[str, bytes] = {}
        self.cores: list[tuple[Core, int]] = [(MixerCore("r"), 0), (SamplerCore("r"), 0)]
        self.work: list[Fact] = []
        self.lost = 0
        self.publish(RunStarted(run="r", config=run_config.decisions()))

    def publish(self, fact: Fact, cause: Event | None = None) -> None:
        subject = fact.subject("r").text
        if subject in self.subjects:
            self.lost += 1
            return
        self.subjects[subject] = fact
        causation = cause.id if cause is not None else None
        self.log.append(replace(event(fact, len(self.log) + 1), causation=causation))
        if isinstance(fact, SequenceDispatched | SampleCompleted | BatchYielded):
            self.work.append(fact)

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if isinstance(self.log[-1].fact, RunStopped):
                return
            behind = [i for i, (_, at) in enumerate(self.cores) if at < len(self.log)]
            if self.work and (not behind or self.random.random() < 0.4):
                self.do(self.work.pop(self.random.randrange(len(self.work))))
            elif behind:
                self.advance(self.random.choice(behind))
            else:
                raise AssertionError(f"the run stands still after {self.log[-1].fact}")
        raise AssertionError("the run does not end")

    def advance(self, index: int) -> None:
        core, at = self.cores[index]
        self.cores[index] = (core, at + 1)
        core.fold(self.log[at])
        for decision in core.decide(self.log[at]):
            self.objects.update(decision.objects)
            self.publish(decision.fact, self.log[at])

    def do(self, fact: Fact) -> None:
        match fact:
            case SequenceDispatched(sequence=sequence, sample=sample, source=source):
                if self.random.random() < self.failures:
                    failure = Failure(kind="infra", reason="engine_unavailable")
                    self.publish(
                        SequenceFailed(
                            source=source, sample=sample, sequence=sequence, attempts=1, failure=failure
                        )
                    )
                else:
                    version = max(
                        (e.fact.step for e in self.log if isinstance(e.fact, PolicyPublished)), default=0
                    )
                    reward = float(self.random.random() < 0.5)
                    self.publish(
                        finished(sequence, reward, tokens=self.random.randint(5, 60), version=version)
                    )
            case SampleCompleted(source=source, sample=sample, rewards=rewards):
                self.publish(SampleGraded(source=source, sample=sample, grader="none", rewards=rewards))
            case BatchYielded(step=step):
                ready = (
                    step == 1
                    or PolicyPublished(step=step - 1, weights=REF).subject("r").text in self.subjects
                )
                if not ready:
                    self.work.append(fact)
                    return
                self.publish(
                    StepTrained(
                        step=step,
                        parent=None,
                        weights=REF,
                        optimizer=REF,
                        loss=0,
                        grad_norm=0,
                        kl=0,
                        loss_tokens=0,
                        seconds=0,
                    )
                )
                self.publish(PolicyPublished(step=step, weights=REF))
            case _:
                raise AssertionError(fact)

    def facts(self, kind: type[Fact]) -> list[Fact]:
        return [e.fact for e in self.log if type(e.fact) is kind]

    def plans(self) -> list[Plan]:
        return [Plan.model_validate_json(self.objects[f.plan.key]) for f in self.facts(BatchYielded)]  # type: ignore[attr-defined]


@given(seed=st.integers(0, 10_000), ahead=st.integers(0, 2), staleness=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_every_run_ends_and_no_sequence_is_in_two_batches(seed: int, ahead: int, staleness: int) -> None:
    source = {"pool": "p", "group_size": 3, "environment": {"kind": "arithmetic"}, "staleness": staleness}
    world = World(
        config(
            batch={"ahead": ahead},
            sources=[
                {"name": "math", "groups": 2, **source},
                {"name": "code", "groups": 1, **source},
                {"name": "held-out", "groups": 0, "evaluate": 3, **source, "group_size": 1},
            ],
        ),
        seed,
    )
    world.run()
    assert [f.step for f in world.facts(BatchYielded)] == [1, 2, 3]  # type: ignore[attr-defined]
    planned = Counter(s.sequence for plan in world.plans() for s in plan.sequences)
    assert set(planned.values()) == {1}
    rejected = {f.sample for f in world.facts(SampleRejected)}  # type: ignore[attr-defined]
    for plan in world.plans():
        groups = {s.sample for s in plan.sequences}
        assert Counter(g.rpartition("-")[0] for g in groups) == {"math": 2, "code": 1}
        assert not groups & rejected
        versions = [c.min_version for s in plan.sequences for c in s.contexts]
        assert plan.policy_version - min(versions) <= staleness
        weights = [
            w * sum(x.end - x.start for x in plan.sequences[s].contexts[c].loss_spans)
            for s, c, w in zip(plan.rows.sequence, plan.rows.context, plan.rows.loss_weight, strict=True)
        ]
        assert sum(weights) == pytest.approx(1.0)
    assert Counter(f.sample.rpartition("-")[0] for f in world.facts(SampleRejected))["held-out"] == 6  # type: ignore[attr-defined]


@given(seed=st.integers(0, 10_000), cut=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_a_restarted_core_makes_the_same_decisions(seed: int, cut: int) -> None:
    """Folding any prefix again decides every fact that the first process decided on it, in the same bytes."""
    world = World(config(), seed)
    world.run()
    for core in (MixerCore("r"), SamplerCore("r")):
        decided: dict[str, Decision] = {}
        for found in world.log[:cut]:
            core.fold(found)
            for decision in core.decide(found):
                decided.setdefault(decision.fact.subject("r").text, decision)
        for subject, decision in decided.items():
            if subject in world.subjects:
                assert decision.fact == world.subjects[subject]
                assert dict(decision.objects).items() <= world.objects.items()


def test_two_samplers_and_mixers_never_contradict_each_other() -> None:
    world = World(config(), seed=3)
    world.cores += [(MixerCore("r"), 0), (SamplerCore("r"), 0)]
    world.run()
    assert world.lost > 0
    assert [f.step for f in world.facts(BatchYielded)] == [1, 2, 3]  # type: ignore[attr-defined]


def test_state_is_bounded_by_what_is_in_flight() -> None:
    world = World(config(steps=12), seed=5)
    world.run()
    sampler = SamplerCore("r")
    most = 0
    for found in world.log:
        sampler.fold(found)
        most = max(most, len(sampler.groups))
    in_play = sum(3 for _ in range(2))
    assert most <= in_play * 2
    assert len(world.facts(SampleAccepted)) >= 48


def in_bytes(decisions: list[Decision]) -> list[tuple[str, bytes, dict[str, bytes]]]:
    return [(d.fact.type, orjson.dumps(d.fact.model_dump(mode="json")), dict(d.objects)) for d in decisions]


def fields(core: Core) -> dict[str, object]:
    """All that a core holds, its groups by value."""
    return {k: vars(v) if isinstance(v, Groups) else v for k, v in vars(core).items()}


@pytest.mark.parametrize("make", [MixerCore, SamplerCore])
@given(seed=st.integers(0, 10_000), ahead=st.integers(0, 2), staleness=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_a_core_that_goes_through_a_dump_after_every_event_decides_the_same_bytes(
    make: Callable[[str], Core], seed: int, ahead: int, staleness: int
) -> None:
    """So any prefix may end in a snapshot: the state after it, and every decision from there on, are the same."""
    source = {"pool": "p", "group_size": 3, "environment": {"kind": "arithmetic"}, "staleness": staleness}
    held_out = {"name": "held-out", "groups": 0, "evaluate": 2, **source, "group_size": 1}
    world = World(
        config(batch={"ahead": ahead}, sources=[{"name": "math", "groups": 2, **source}, held_out]), seed
    )
    world.run()
    straight: Core = make("r")
    stored: Core = make("r")
    for found in world.log:
        loaded = make("another")
        loaded.load(orjson.loads(orjson.dumps(stored.dump())))
        stored = loaded
        straight.fold(found)
        stored.fold(found)
        assert in_bytes(stored.decide(found)) == in_bytes(straight.decide(found))
        assert orjson.dumps(stored.dump()) == orjson.dumps(straight.dump())
        assert fields(stored) == fields(straight)


def test_what_is_to_be_dispatched_is_not_decided_again_on_every_dispatch() -> None:
    """360 of them in the demo, in bursts of up to 96: each is decided once, and few again while they are on their way."""
    mixer, decided = MixerCore("demo"), 0
    for found in demo_events():
        mixer.fold(found)
        decided += len(mixer.decide(found))
    assert 361 <= decided < 2 * 361


def test_a_dump_shares_nothing_with_the_core_that_made_it() -> None:
    world = World(config(), seed=1)
    world.run()
    for core in (MixerCore("r"), SamplerCore("r")):
        dumps: list[tuple[dict[str, object], bytes]] = []
        for found in world.log:
            core.fold(found)
            dumps.append((state := core.dump(), orjson.dumps(state)))
        assert all(orjson.dumps(state) == then for state, then in dumps)


def test_a_sequence_in_flight_takes_at_most_4_kib_in_a_dump_and_in_memory() -> None:
    """On the finished facts of the recorded demo, all of them in flight at once."""
    events = demo_events()
    inputs = [e for e in events if isinstance(e.fact, RunStarted | SequenceDispatched | SequenceFinished)]
    sampler = SamplerCore("demo")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for found in inputs:
            sampler.fold(found)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    in_flight = sum(isinstance(e.fact, SequenceFinished) for e in inputs)
    assert in_flight == 360
    assert (after - before) / in_flight < 4096
    assert len(orjson.dumps(sampler.dump())) / in_flight < 4096
    # Of the whole run nothing stays but the groups that no batch took.
    sampler = SamplerCore("demo")
    for found in events:
        sampler.fold(found)
    assert len(sampler.groups) == 4
    assert len(orjson.dumps(sampler.dump())) < 4 * 8 * 4096


def judged(world_config: RunConfig, *members: SequenceFinished, rewards: tuple[float, ...]) -> list[Fact]:
    """What the sampler decides on `sample.graded` of a group of two with these finished members; the others failed."""
    core = SamplerCore("r")
    facts: list[Fact] = [RunStarted(run="r", config=world_config.decisions())]
    for member in range(2):
        sequence = f"math-000000-{member}"
        facts.append(
            SequenceDispatched(
                source="math",
                sample="math-000000",
                sequence=sequence,
                member=member,
                group_size=2,
                pool="p",
                task_index=0,
            )
        )
    facts += members
    missing = {f"math-000000-{m}" for m in range(2)} - {f.sequence for f in members}
    failure = Failure(kind="infra", reason="lost")
    facts += [
        SequenceFailed(source="math", sample="math-000000", sequence=s, attempts=1, failure=failure)
        for s in sorted(missing)
    ]
    facts.append(SampleGraded(source="math", sample="math-000000", grader="none", rewards=rewards))
    for seq, fact in enumerate(facts, 1):
        core.fold(event(fact, seq))
    return [d.fact for d in core.decide(event(facts[-1], len(facts)))]


def reason(*members: SequenceFinished, rewards: tuple[float, ...]) -> str:
    (fact,) = judged(config(), *members, rewards=rewards)
    return fact.reason if isinstance(fact, SampleRejected) else fact.type


def test_what_no_plan_can_hold_is_rejected_with_its_reason() -> None:
    good = [finished("math-000000-0", 1.0), finished("math-000000-1", 0.0)]
    assert reason(*good, rewards=(1.0, 0.0)) == "sample.accepted"
    silent = [finished(f.sequence, f.reward, generated=0) for f in good]
    assert reason(*silent, rewards=(1.0, 0.0)) == "no_loss"
    budget = config().batch.token_budget
    long = finished("math-000000-1", 0.0, tokens=budget + 1)
    assert reason(good[0], long, rewards=(1.0, 0.0)) == "overlong"
    assert reason(good[0], rewards=(1.0,)) == "failed"
    # Rewards that are not one for each finished member belong to nobody.
    assert reason(*good, rewards=(1.0, 0.0, 0.0)) == "failed"


def test_a_sequence_that_nobody_dispatched_is_no_member() -> None:
    groups = Groups()
    groups.dispatched(
        SequenceDispatched(
            source="math",
            sample="math-000000",
            sequence="math-000000-0",
            member=0,
            group_size=2,
            pool="p",
            task_index=0,
        )
    )
    groups.finished(finished("math-000000-7", 1.0))
    failure = Failure(kind="infra", reason="lost")
    groups.failed(
        SequenceFailed(
            source="math", sample="math-000000", sequence="math-000000-8", attempts=1, failure=failure
        )
    )
    group = groups["math-000000"]
    assert (len(group.finished), len(group.failed), group.ordered()) == (0, 0, [])


@given(seed=st.integers(0, 10_000), dp=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_a_batch_yields_whatever_its_number_of_contexts(seed: int, dp: int) -> None:
    """Members fail, and contexts near the budget fill a micro-batch each: ranks are equal in number all the same."""
    source = {
        "pool": "p",
        "name": "math",
        "groups": 2,
        "group_size": 4,
        "environment": {"kind": "arithmetic"},
    }
    world = World(
        config(steps=2, batch={"dp": dp, "token_budget": 61}, engine={"max_context": 61}, sources=[
            {**source, "behaviour": {"max_tokens": 8}}
        ]),
        seed,
        failures=0.4,
    )  # fmt: skip
    world.run()
    for plan in world.plans():
        plan.check()
        planned = {(s, c) for s, c in zip(plan.rows.sequence, plan.rows.context, strict=True)}
        assert planned == {(s, c) for s, each in enumerate(plan.sequences) for c in range(len(each.contexts))}


def test_dispatch_follows_demand_and_rejections_are_refilled() -> None:
    mixer, seq = MixerCore("r"), 0
    published: set[str] = set()

    def tell(fact: Fact) -> list[Fact]:
        nonlocal seq
        seq += 1
        mixer.fold(event(fact, seq))
        fresh = [d.fact for d in mixer.decide(event(fact, seq)) if d.fact.id() not in published]
        published.update(f.id() for f in fresh)
        for f in fresh:
            seq += 1
            mixer.fold(event(f, seq))
        return fresh

    first = tell(RunStarted(run="r", config=config().decisions()))
    assert Counter(f.sample for f in first) == {f"{s}-{i:06d}": 2 for s in ("math", "code") for i in range(3)}  # type: ignore[attr-defined]
    refill = tell(SampleRejected(source="math", sample="math-000001", reason="pass_rate"))
    assert {f.sample for f in refill} == {"math-000003"}  # type: ignore[attr-defined]
    assert (
        tell(SampleShaped(source="math", sample="math-000000", estimator="grpo", advantages=(1.0, -1.0)))
        == []
    )


def test_a_group_left_behind_by_a_batch_and_too_old_for_the_next_is_rejected_then() -> None:
    """Two groups too many wait at step 1; with staleness 0 they are too old for step 2, and are not kept for ever."""
    source = {
        "pool": "p",
        "groups": 1,
        "group_size": 2,
        "environment": {"kind": "arithmetic"},
        "staleness": 0,
    }
    run_config = config(sources=[{"name": "math", **source}, {"name": "code", **source}])
    sampler, seq = SamplerCore("r"), 0

    def tell(fact: Fact) -> list[Fact]:
        nonlocal seq
        seq += 1
        sampler.fold(event(fact, seq))
        return [decision.fact for decision in sampler.decide(event(fact, seq))]

    def shaped(name: str) -> list[Fact]:
        source_name = name.rpartition("-")[0]
        for member in range(2):
            sequence = f"{name}-{member}"
            tell(
                SequenceDispatched(
                    source=source_name,
                    sample=name,
                    sequence=sequence,
                    member=member,
                    group_size=2,
                    pool="p",
                    task_index=0,
                )
            )
            tell(finished(sequence, float(member)))
        (accepted,) = tell(SampleGraded(source=source_name, sample=name, grader="none", rewards=(0.0, 1.0)))
        tell(accepted)
        return tell(SampleShaped(source=source_name, sample=name, estimator="grpo", advantages=(-0.7, 0.7)))

    tell(RunStarted(run="r", config=run_config.decisions()))
    for name in ("math-000000", "math-000001", "math-000002"):
        assert shaped(name) == []
    (yielded,) = shaped("code-000000")
    assert isinstance(yielded, BatchYielded)
    decided = tell(yielded)
    assert {(f.sample, f.reason) for f in decided if isinstance(f, SampleRejected)} == {
        ("math-000001", "stale"),
        ("math-000002", "stale"),
    }
