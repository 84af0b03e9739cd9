"""Whole runs of the sampler with late gradings, teachers, penalties and a hook service, in any order of events; and what is in memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.sampler import SamplerCore
from pipeline.replay import SERVICES, Rerun
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    RunStarted,
    SampleAccepted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFinished,
    SequenceScored,
)
from schemas.payload import COLUMNS, PayloadHeader
from tests.unit.factories import event, finished
from tests.unit.signal_world import (
    BY_HOOK,
    PURE,
    SignalWorld,
    scored,
    sidecar,
    signal_config,
    two_samplers,
)
from tests.unit.test_cores import fields, in_bytes

SEEDS = st.integers(0, 10_000)


@given(seed=SEEDS, ahead=st.integers(0, 1), staleness=st.integers(0, 2))
@settings(max_examples=12, deadline=None)
def test_whatever_the_order_of_answers_batches_hold_what_the_log_says_they_do(
    seed: int, ahead: int, staleness: int
) -> None:
    """Two samplers over one stream, in which late answers, scores, shapes and rejections by others come at any time."""
    sources = [{**source, "staleness": staleness} for source in (PURE, BY_HOOK)]
    world = two_samplers(SignalWorld(signal_config(batch={"ahead": ahead}, sources=sources), seed))
    world.run()
    plans = {plan.step: plan for plan in world.plans()}
    assert list(plans) == [1, 2, 3]
    assert set(Counter(s.sequence for plan in plans.values() for s in plan.sequences).values()) == {1}
    of_batch = {s.sample for plan in plans.values() for s in plan.sequences}
    assert not of_batch & {f.sample for f in world.facts(SampleRejected)}  # type: ignore[attr-defined]
    of_sample: dict[str, list[Event]] = defaultdict(list)
    for found in world.log:
        of_sample[getattr(found.fact, "sample", "")].append(found)
    for events in of_sample.values():
        for accepted in (e for e in events if isinstance(e.fact, SampleAccepted)):
            source = world.source(accepted.fact)
            members = [e for e in events if isinstance(e.fact, SequenceFinished)]
            waited = [
                e
                for e in events
                if isinstance(e.fact, SequenceScored)
                or (isinstance(e.fact, SampleGraded) and e.fact.revision == 0)
            ]
            assert len(waited) == 1 + len(members) * len(source.teachers)
            assert max(e.seq for e in waited) < accepted.seq
            assert all(e.seq > accepted.seq for e in events if isinstance(e.fact, SampleShaped))
    yields = {f.step: f for f in world.facts(BatchYielded) if isinstance(f, BatchYielded)}
    for step, plan in plans.items():
        through = yields[step].through
        assert yields[step].factors is not None
        samples = list(dict.fromkeys(s.sample for s in plan.sequences))
        tasks = [(s.rpartition("-")[0], of_sample[s][0].fact.task_index) for s in samples]  # type: ignore[attr-defined]
        assert len(set(tasks)) == len(tasks), "the same task twice in a batch"
        for sample in samples:
            shapes = [
                e.fact for e in of_sample[sample] if isinstance(e.fact, SampleShaped) and e.seq <= through
            ]
            newest = max(shapes, key=lambda fact: fact.revision)
            members = [i for i, s in enumerate(plan.sequences) if s.sample == sample]
            for place, advantage in zip(plan.rows.sequence, plan.rows.advantage, strict=True):
                if place in members:
                    assert advantage == newest.advantages[members.index(place)]
            sidecars = newest.sidecars or (None,) * len(members)
            assert tuple(plan.sequences[i].advantages for i in members) == sidecars
    for service in SERVICES.values():
        again = Rerun("r", service)
        for found in world.log:
            again.feed(found)
        assert again.report().divergences == (), service.name


@given(seed=SEEDS)
@settings(max_examples=6, deadline=None)
def test_any_prefix_may_end_in_a_snapshot_and_what_comes_after_a_batch_changes_nothing(seed: int) -> None:
    world = SignalWorld(signal_config(), seed)
    world.run()
    straight, stored = SamplerCore("r"), SamplerCore("r")
    for found in world.log:
        loaded = SamplerCore("another")
        loaded.load(orjson.loads(orjson.dumps(stored.dump())))
        stored = loaded
        gone = isinstance(found.fact, SampleGraded | SampleShaped | SampleRejected | SequenceScored) and (
            straight.groups.get(found.fact.sample) is None
        )
        before = orjson.dumps(straight.dump())
        straight.fold(found)
        stored.fold(found)
        decided = straight.decide(found)
        assert in_bytes(stored.decide(found)) == in_bytes(decided)
        assert fields(stored) == fields(straight)
        if gone:
            assert (orjson.dumps(straight.dump()), decided) == (before, [])


def in_flight(groups: int, waiting: bool) -> tuple[SamplerCore, float]:
    """A sampler with so many groups of 16, and its bytes of memory for each of their sequences: one context, five columns, two
    teachers; that wait for a batch with advantages by token, or for the last score."""
    core, bare = SamplerCore("r"), finished("code-000000-0", 1.0)
    source = {**BY_HOOK, "groups": groups, "group_size": 16, "tasks": 0}
    core.fold(event(RunStarted(run="r", config=signal_config(sources=[source]).decisions()), 1))
    (column,) = sidecar(bare, 0).columns
    columns = tuple(column.model_copy(update={"name": name}) for name in COLUMNS)

    def tell(fact: Fact) -> None:
        core.fold(event(fact, 2))

    def life(name: str) -> None:
        members = [f"{name}-{n}" for n in range(16)]
        for n, sequence in enumerate(members):
            tell(
                SequenceDispatched(
                    source="code",
                    sample=name,
                    sequence=sequence,
                    member=n,
                    group_size=16,
                    pool="p",
                    task_index=int(name[-6:]),
                )
            )
        facts: list[SequenceFinished] = []
        for sequence in members:
            key = f"runs/r/payloads/code/{sequence}-a1.safetensors"
            payload = PayloadHeader(key=key, bytes=1 << 20, columns=columns)
            facts.append(finished(sequence, 1.0).model_copy(update={"payload": payload}))
            tell(facts[-1])
        rewards = tuple(float(n) for n in range(16))
        tell(SampleGraded(source="code", sample=name, grader="g", rewards=rewards, quality=(0.5,) * 16))
        answers = [scored(fact, teacher) for fact in facts for teacher in ("large", "small")]
        for answer in answers if waiting else answers[:-1]:
            tell(answer)
        if waiting:
            tell(
                SampleAccepted(
                    source="code", sample=name, pass_rate=0.5, mean_reward=0.5, tokens=1, min_version=0
                )
            )
            tell(
                SampleShaped(
                    source="code",
                    sample=name,
                    estimator="own",
                    advantages=tuple(n / 7 for n in range(16)),
                    sidecars=tuple(sidecar(fact, 0) for fact in facts),
                    by="hook",
                )
            )

    life("code-999999")
    core.groups.forget("code-999999")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for sample in range(groups):
            life(f"code-{sample:06d}")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return core, (after - before) / (groups * 16)


@pytest.mark.parametrize("waiting", [False, True])
def test_a_sequence_in_flight_takes_at_most_4_kib_with_its_scores_and_sidecar(waiting: bool) -> None:
    core, size = in_flight(groups=24, waiting=waiting)
    assert size < 4096
    assert len(orjson.dumps(core.dump())) / (24 * 16) < 4096
    assert len(list(core.groups.waiting("code"))) == (24 if waiting else 0)
