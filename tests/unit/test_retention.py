"""What may go from the store, over whole random runs: nothing that is needed later goes, and what is not needed does."""

from __future__ import annotations

import re
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.sampler import SamplerCore
from pipeline.retention.core import CONSUMED, LATE, REJECTED, SUPERSEDED, RetentionCore
from pipeline.retention.names import named, owner
from pipeline.retention.orphans import orphan
from schemas.config import Retention
from schemas.envelope import Event, Invalid, Unknown
from schemas.facts import (
    RULES,
    BatchYielded,
    Fact,
    Failure,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceQuarantined,
    StepTrained,
)
from schemas.keys import (
    artefact_key,
    grading_key,
    image_key,
    optimizer_key,
    payload_key,
    plan_key,
    sidecar_key,
    weights_key,
)
from schemas.payload import PayloadHeader
from schemas.plan import Plan
from tests.retention_parts import Stored, image, real, ref
from tests.unit.factories import config, event
from tests.unit.signal_life import Life, member
from tests.unit.signal_world import signal_config, two_samplers

ALL = Retention(rejected_steps=1, consumed_steps=1, checkpoint_steps=1)


def needed(plan: Plan) -> set[str]:
    """Every object that a packer of the plan reads."""
    keys = {s.payload.key for s in plan.sequences}
    keys |= {s.advantages.key for s in plan.sequences if s.advantages is not None}
    return keys | {
        image_key("r", item.digest) for s in plan.sequences for c in s.contexts for item in c.images
    }


def collect(log: list[Event], policy: Retention) -> tuple[RetentionCore, dict[str, tuple[int, str]]]:
    """What goes when it is asked after every message: key, (message, reason)."""
    core, gone = RetentionCore("r"), dict[str, tuple[int, str]]()
    for found in log:
        core.fold(found)
        for key, reason in core.take(policy).items():
            gone.setdefault(key, (found.seq, reason))
    assert core.unreadable == ""
    return core, gone


@given(
    seed=st.integers(0, 10_000),
    ahead=st.integers(0, 2),
    rejected=st.integers(1, 2),
    consumed=st.integers(1, 2),
    keep=st.integers(1, 3),
)
@settings(max_examples=6, deadline=None)
def test_nothing_that_a_batch_needs_goes_before_its_time_and_all_else_goes(
    seed: int, ahead: int, rejected: int, consumed: int, keep: int
) -> None:
    world = two_samplers(Stored(signal_config(steps=4, batch={"ahead": ahead}), seed))  # type: ignore[type-var]
    assert isinstance(world, Stored)
    world.run()
    policy = Retention(rejected_steps=rejected, consumed_steps=consumed, checkpoint_steps=keep)
    core, gone = collect(world.log, policy)
    trained = {e.fact.step: e.seq for e in world.log if isinstance(e.fact, StepTrained)}
    published = {e.fact.step: e.seq for e in world.log if isinstance(e.fact, PolicyPublished)}
    never = len(world.log) + 1
    samples: dict[str, int] = {}
    for plan, fact in zip(world.plans(), world.facts(BatchYielded), strict=True):
        assert isinstance(fact, BatchYielded)
        earliest = trained.get(plan.step + consumed, never)
        for key in needed(plan) | {fact.plan.key}:
            assert gone.get(key, (never, ""))[0] >= earliest, key
        samples |= {s.sample: earliest for s in plan.sequences}
    for found in world.log:
        if isinstance(found.fact, SampleRejected) and found.fact.sample not in samples:
            done = sum(seq < found.seq for seq in trained.values())
            samples[found.fact.sample] = trained.get(done + rejected, never)
    steps = sorted(trained.values())
    for key, written in world.written.items():
        own = owner("r", key)
        assert own is not None
        at, why = gone.get(key, (never, ""))
        if own.form in ("weights", "optimizer"):
            assert at >= trained.get(own.step + keep, never)
            if own.form == "weights":
                # An engine may be loading what was published before the newest.
                assert at >= published.get(own.step + max(keep, 2), never)
        elif own.form in ("payload", "artefact", "grading"):
            bound = samples.get(own.sample, never)
            if why in (REJECTED, CONSUMED):
                assert at == max(bound, written), (key, why)
            elif bound < never:
                # Of no group, or of one when it was gone: what no rule would keep is gone some steps after it was written.
                later = [seq for seq in steps if seq > max(bound, written)]
                assert at < never or len(later) < max(rejected, consumed), (key, written)
    assert core.images(policy) == {
        image_key("r", item.digest)
        for found in world.log
        if isinstance(found.fact, SequenceFinished) and samples.get(found.fact.sample, never) == never
        for context in found.fact.contexts
        for item in context.images
    }


@given(seed=st.integers(0, 10_000))
@settings(max_examples=2, deadline=None)
def test_a_core_that_goes_through_a_dump_takes_the_same(seed: int) -> None:
    world = Stored(signal_config(steps=3), seed)
    world.run()
    straight, stored = RetentionCore("r"), RetentionCore("r")
    for found in world.log:
        loaded = RetentionCore("another")
        loaded.load(orjson.loads(orjson.dumps(stored.dump())))
        stored = loaded
        straight.fold(found)
        stored.fold(found)
        if isinstance(found.fact, StepTrained):
            assert stored.take(ALL) == straight.take(ALL)
        assert orjson.dumps(stored.dump()) == orjson.dumps(straight.dump())
    assert stored.images(ALL) == straight.images(ALL) is not None


def test_a_snapshot_is_of_one_version_of_the_sampler_too() -> None:
    assert RetentionCore("r").dump()["sampler"].keys() == SamplerCore("r").dump().keys()
    assert RetentionCore.STATE_VERSION % 100 == SamplerCore.STATE_VERSION


def test_a_policy_of_zeros_removes_nothing_and_remembers_nothing() -> None:
    world = Stored(signal_config(steps=3), 5)
    world.run()
    core, gone = collect(world.log, Retention())
    assert gone == {}
    assert core.images(Retention()) is None
    state = core.dump()
    in_flight = {g["sample"] for g in state["sampler"]["groups"]}
    assert set(state["held"]) == in_flight
    assert [state[name] for name in ("loose", "plans", "weights", "optimizers")] == [{}, [], [], []]


def lived(*facts: Fact, life: Life | None = None) -> tuple[RetentionCore, Life]:
    """A core that has folded what happened to groups of one source, and then the facts."""
    life = life or Life(groups=1, tasks=4)
    for fact in facts:
        life.tell(real(fact))
    core = RetentionCore("r")
    for found in life.log:
        core.fold(found)
    return core, life


def trained(step: int) -> StepTrained:
    zeros = {"loss": 0, "grad_norm": 0, "kl": 0, "loss_tokens": 0, "seconds": 0}
    return real(StepTrained(step=step, parent=None, weights=ref("k"), optimizer=ref("k"), **zeros))


def shaped(*samples: int) -> Life:
    """Groups that wait for a batch, or are in one."""
    life = Life(groups=1, staleness=9)
    for sample in samples:
        members = [real(member(number, float(number), sample)) for number in range(2)]
        life.roll_out(*members, task=sample, sample=sample)
        life.tell(SampleGraded(source="math", sample=f"math-{sample:06d}", grader="none", rewards=(0.0, 1.0)))
    return life


def payloads(sample: int, attempt: int = 1) -> set[str]:
    return {payload_key("r", "math", f"math-{sample:06d}-{number}-a{attempt}") for number in range(2)}


def test_a_group_that_waits_for_a_batch_is_not_gone_because_somebody_rejects_it() -> None:
    """The sampler takes no notice either: a batch that holds it may be on its way."""
    life = shaped(0, 1)
    assert [f.step for f in life.of(BatchYielded)] == [1, 2]
    life = Life(hold=(BatchYielded,), groups=1)
    members = [real(member(number, float(number))) for number in range(2)]
    life.roll_out(*members)
    life.tell(SampleGraded(source="math", sample="math-000000", grader="none", rewards=(0.0, 1.0)))
    life.tell(SampleRejected(source="math", sample="math-000000", reason="failed", by="hook"))
    core, _ = lived(trained(1), trained(2), life=life)
    assert not core.settled("math-000000")
    assert core.take(ALL).keys().isdisjoint(payloads(0))


def test_a_batch_goes_when_it_is_trained_and_so_many_steps_are_trained_after_it_and_not_before() -> None:
    life = shaped(0, 1)
    plans = {f.step: f.plan.key for f in life.of(BatchYielded)}
    quarantined = SequenceQuarantined(
        source="math",
        sample="math-000000",
        sequence="math-000000-0",
        step=1,
        reason="damaged",
        key=min(payloads(0)),
    )
    core, _ = lived(trained(1), quarantined, life=life)
    assert core.take(ALL) == {}
    core, _ = lived(trained(2), life=life)
    # With the damaged object, which is evidence until then.
    assert core.take(ALL.model_copy(update={"checkpoint_steps": 0})) == dict.fromkeys(
        [*payloads(0), plans[1]], CONSUMED
    )
    assert core.take(ALL) == {}


def test_of_checkpoints_the_newest_and_what_engines_may_be_loading_stay() -> None:
    core, life = lived(trained(1), trained(2), trained(3))
    weights, optimizer = (lambda s: weights_key("r", s, "n")), (lambda s: optimizer_key("r", s, "n"))
    only = Retention(checkpoint_steps=1)
    # Nothing is published: engines sample with the initial policy, and the next that they load may be any.
    assert set(core.take(only)) == {optimizer(1), optimizer(2)}
    published = [real(PolicyPublished(step=s, weights=ref("k"))) for s in (1, 2, 3)]
    core, _ = lived(*published, life=life)
    assert set(core.take(only)) == {optimizer(1), optimizer(2), weights(1)}
    assert set(core.take(only)) == set()


def test_the_attempts_that_did_not_finish_a_sequence_go_whoever_came_last() -> None:
    life = Life(groups=1, tasks=4)
    whose: dict[str, Any] = {"source": "math", "sample": "math-000000", "sequence": "math-000000-0"}

    def opened(attempt: int) -> SequenceOpened:
        return SequenceOpened(
            **whose,
            attempt=attempt,
            pool="p",
            task_index=0,
            host="h",
            base_url="http://h",
            session="s",
            budget_s=1,
        )

    finish = real(member(0, 1.0).model_copy(update={"attempt": 2}))
    key = payload_key("r", "math", "math-000000-0-a5")
    failed = SequenceFailed(
        **whose,
        attempts=5,
        failure=Failure(kind="infra", reason="lost"),
        payload=PayloadHeader(key=key, bytes=1, columns=()),
    )
    core, life = lived(
        *dispatched(), opened(1), opened(2), opened(3), finish, opened(4), opened(2), failed, life=life
    )
    assert core.take(ALL) == {}
    core, _ = lived(trained(1), life=life)
    found = core.take(ALL)
    assert found == dict.fromkeys(
        (payload_key("r", "math", f"math-000000-0-a{attempt}") for attempt in (1, 3, 4)), SUPERSEDED
    )


def test_what_is_not_a_sequences_own_is_never_removed_for_its_sake() -> None:
    """Another run's object, another sequence's, the claim, weights: whatever an event names."""
    for key in (
        "runs/other/payloads/math/math-000000-0-a1.safetensors",
        "runs/r/payloads/math/math-000001-0-a1.safetensors",
        "runs/r/run.json",
        "runs/r/weights/000001-n.safetensors",
        "elsewhere",
    ):
        life = Life(groups=1, tasks=4)
        bad = member(0, 0.0).model_copy(update={"payload": PayloadHeader(key=key, bytes=1, columns=())})
        life.roll_out(bad, real(member(1, 0.0)))
        life.tell(SampleGraded(source="math", sample="math-000000", grader="none", rewards=(0.0, 0.0)))
        assert life.end() == "pass_rate"
        core, _ = lived(trained(1), life=life)
        assert set(core.take(ALL)) == {payload_key("r", "math", "math-000000-1-a1")}, key


def test_a_log_that_cannot_be_read_whole_lets_nothing_go() -> None:
    life = shaped(0, 1)
    life.tell(trained(1), trained(2), trained(3))
    for strange, told in (
        (Unknown("sample.shaped", "99", 7), r"message 7 .*sample\.shaped version 99"),
        (Invalid("rl.r.sample.shaped.math.math-000000", "no JSON", 7), "message 7 .*no JSON"),
    ):
        core = RetentionCore("r")
        core.read(strange)
        for found in life.log:
            core.read(found)
        assert core.take(ALL) == {}
        assert re.search(told, core.unreadable)
        assert core.images(ALL) is None
    # Rubbish on no fact's subject hides nothing.
    core = RetentionCore("r")
    core.read(Invalid("rl.r.rubbish.a.b.c", "no JSON", 7))
    for found in life.log:
        core.read(found)
    assert payloads(0) <= core.take(ALL).keys()
    # Advantages that this release did not see make other members than the batch says.
    core = RetentionCore("r")
    for found in life.log:
        if not isinstance(found.fact, SampleShaped):
            core.read(found)
    assert core.take(ALL) == {}
    assert "batch 1 has" in core.unreadable


def test_a_run_of_newer_rules_is_left_alone() -> None:
    core = RetentionCore("r")
    core.fold(event(RunStarted(run="r", config=config().decisions(), rules=RULES + 1), 1))
    assert "decision rules" in core.unreadable


def test_images_stay_while_the_run_goes_on_and_then_those_that_something_kept_shows() -> None:
    """A host sends an image once a run: one that went would be missed by a sequence that is still to come."""
    life = Life(groups=1, staleness=9)
    for sample in (0, 1, 2):
        members = [real(member(number, float(number), sample, contexts=1)) for number in range(2)]
        shown = {0: (1, 2), 1: (2, 3), 2: (4,)}[sample]
        members[0] = members[0].model_copy(
            update={
                "contexts": tuple(
                    c.model_copy(
                        update={
                            "images": tuple(
                                image(n).model_copy(update={"start": i, "end": i + 1})
                                for i, n in enumerate(shown)
                            )
                        }
                    )
                    for c in members[0].contexts
                )
            }
        )
        life.roll_out(*members, task=sample, sample=sample)
        life.tell(SampleGraded(source="math", sample=f"math-{sample:06d}", grader="none", rewards=(0.0, 1.0)))
    core, _ = lived(trained(1), trained(2), life=life)
    core.take(ALL)
    assert core.images(ALL) is None
    core, _ = lived(RunStopped(run="r", reason="completed", steps=2), life=life)
    assert core.images(Retention(rejected_steps=1)) is None
    core.take(ALL)
    kept = {n for n in range(6) if image_key("r", image(n).digest) in (core.images(ALL) or ())}
    assert kept == {2, 3, 4}


def test_an_orphan_is_what_nobody_can_be_about_to_name() -> None:
    life = shaped(0)
    core, life = lived(trained(1), life=life)
    undecided = SequenceDispatched(
        source="math",
        sample="math-000009",
        sequence="math-000009-0",
        member=0,
        group_size=2,
        pool="p",
        task_index=0,
    )
    core, life = lived(undecided, life=life)
    lost = {
        sidecar_key(min(payloads(0)), "advantages.1"),
        artefact_key("r", "math-000000-0-a7", "log"),
        grading_key("r", "math", "math-000000"),
        plan_key("r", 1, 7),
        weights_key("r", 1, "dead"),
        optimizer_key("r", 1, "dead"),
    }
    coming = {
        payload_key("r", "math", "math-000009-0-a1"),
        payload_key("r", "math", "math-000010-0-a1"),
        plan_key("r", 2, 7),
        weights_key("r", 2, "n"),
        optimizer_key("r", 2, "n"),
        image_key("r", image(1).digest),
    }
    others = {
        "runs/r/run.json",
        "runs/r/notes.txt",
        "runs/other/plans/000001-00000007.json",
        "runs/r/inherited/00000007.json",
    }
    assert {key for key in lost | coming | others if orphan(core, key)} == lost
    core, _ = lived(RunStopped(run="r", reason="cancelled", steps=1), life=life)
    assert {key for key in lost | coming | others if orphan(core, key)} == lost | coming


def test_every_key_that_a_fact_names_is_found() -> None:
    world = Stored(signal_config(steps=2), 5)
    world.run()
    text = " ".join(orjson.dumps(found.fact.model_dump(mode="json")).decode() for found in world.log)
    keys = {key for found in world.log for key in named("r", found.fact)}
    shown = {image_key("r", digest) for digest in re.findall(r'"digest":"([0-9a-f]+)"', text)}
    assert shown
    assert keys == shown | set(re.findall(r"runs/r/[^\"]+", text))
    assert all(owner("r", key) is not None for key in keys)


def dispatched() -> list[Fact]:
    return [
        SequenceDispatched(
            source="math",
            sample="math-000000",
            sequence=f"math-000000-{number}",
            member=number,
            group_size=2,
            pool="p",
            task_index=0,
        )
        for number in range(2)
    ]


def test_of_a_sequence_that_failed_before_it_finished_nothing_is_in_a_batch_and_all_goes() -> None:
    whose: dict[str, Any] = {"source": "math", "sample": "math-000000", "sequence": "math-000000-0"}
    failed = SequenceFailed(**whose, attempts=1, failure=Failure(kind="infra", reason="lost"))
    core, life = lived(*dispatched(), failed, real(member(0, 1.0).model_copy(update={"attempt": 2})))
    core, _ = lived(trained(1), life=life)
    assert core.take(ALL) == {payload_key("r", "math", "math-000000-0-a2"): SUPERSEDED}


def test_the_payload_that_stands_stays_whatever_attempt_its_key_says() -> None:
    opened = SequenceOpened(
        source="math",
        sample="math-000000",
        sequence="math-000000-0",
        attempt=1,
        pool="p",
        task_index=0,
        host="h",
        base_url="http://h",
        session="s",
        budget_s=1,
    )
    finish = real(member(0, 1.0)).model_copy(update={"attempt": 2})
    assert finish.payload.key == payload_key("r", "math", "math-000000-0-a1")
    life = Life(groups=1, tasks=4)
    life.tell(*dispatched(), opened, finish, trained(1))
    core, _ = lived(life=life)
    assert core.take(ALL) == {}


def test_what_comes_of_a_group_that_is_gone_goes_only_where_both_rules_would_remove_it() -> None:
    life = shaped(0)
    report = grading_key("r", "math", "math-000000")
    late = SampleGraded(
        source="math", sample="math-000000", revision=1, grader="late", rewards=(1.0, 0.0), report=ref(report)
    )
    for policy, gone in (
        (Retention(rejected_steps=1, consumed_steps=1), {report: LATE}),
        (Retention(rejected_steps=1), {}),
        (Retention(consumed_steps=1), {}),
    ):
        core = RetentionCore("r")
        for found in life.log:
            core.fold(found)
        for seq, fact in enumerate((trained(1), trained(2)), len(life.log) + 1):
            core.fold(event(fact, seq))
        core.take(policy)
        core.fold(event(late, seq + 1))
        assert core.take(policy) == {}
        core.fold(event(trained(3), seq + 2))
        assert core.take(policy) == gone
