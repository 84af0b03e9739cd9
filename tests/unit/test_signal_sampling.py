"""What a group waits for and is judged on, late gradings, duplicates, and who shapes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from pipeline.replay import SERVICES, Rerun
from pipeline.signal import sampling
from pipeline.signal.hooks import BadHook, chain
from schemas.facts import (
    BatchYielded,
    SampleAccepted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceFinished,
)
from schemas.payload import PayloadHeader
from tests.unit.signal_life import PAIR, Life, member
from tests.unit.signal_world import graded, scored, sidecar


def test_a_group_waits_for_its_grading_and_for_every_teacher_of_its_source() -> None:
    life = Life(teachers=("large", "small"))
    completed = life.roll_out(*PAIR)
    life.tell(scored(PAIR[0], "large"), scored(PAIR[0], "small"), scored(PAIR[1], "large"))
    life.tell(graded(completed, 0))
    life.tell(scored(PAIR[1], "another"))
    assert life.end() == "undecided"
    # A failure is an answer.
    life.tell(scored(PAIR[1], "small", "too long"))
    assert life.end() == "accepted"
    other = Life(teachers=("large",))
    completed = other.roll_out(member(0, 1.0), None)
    other.tell(graded(completed, 0), scored(PAIR[0], "large"))
    assert other.end() == "failed", "of a member that failed there is no score to wait for"


def test_a_late_answer_rewrites_rewards_until_the_group_is_accepted() -> None:
    life = Life(teachers=("large",), group_size=2, groups=2)
    completed = life.roll_out(*PAIR)
    life.tell(graded(completed, 0), graded(completed, 1, (0.0, 1.0)))
    life.tell(*(scored(fact, "large") for fact in PAIR))
    (shaped,) = life.of(SampleShaped)
    assert shaped.revision == 0
    assert shaped.advantages[0] < 0 < shaped.advantages[1]


def test_a_late_answer_between_decision_and_acceptance_is_in_the_first_advantages() -> None:
    life = Life(hold=(SampleAccepted,), groups=2)
    completed = life.roll_out(*PAIR)
    life.tell(graded(completed, 0), graded(completed, 1, (0.0, 1.0)))
    life.release()
    (shaped,) = life.of(SampleShaped)
    assert (shaped.revision, shaped.advantages[0] < 0) == (0, True)


@pytest.mark.parametrize("drop", [True, False])
def test_a_group_that_a_late_answer_made_all_zero_before_it_was_shaped_is_dropped(drop: bool) -> None:
    """As the hook service does with the groups that it shapes."""
    life = Life(hold=(SampleAccepted,), groups=2, accept={"drop_all_zero": drop})
    completed = life.roll_out(*PAIR)
    life.tell(graded(completed, 0), graded(completed, 1, (0.0, 0.0)))
    life.release()
    assert life.end() == ("accepted all_zero" if drop else "accepted")
    # One that waits for a batch already stays: a batch that holds it may be on its way.
    waiting = Life(groups=2)
    completed = waiting.roll_out(*PAIR)
    waiting.tell(graded(completed, 0), graded(completed, 1, (0.0, 0.0)))
    assert waiting.end() == "accepted"
    assert waiting.of(SampleShaped)[1].advantages == (0.0, 0.0)


def test_a_late_answer_after_acceptance_shapes_anew_and_after_the_batch_changes_nothing() -> None:
    life = Life(groups=2)
    completed = life.roll_out(*PAIR)
    life.tell(graded(completed, 0), graded(completed, 1, (0.0, 1.0)))
    assert [s.revision for s in life.of(SampleShaped)] == [0, 1]
    group = life.core.groups["math-000000"]
    place = group.shaped_seq
    assert (group.revision, group.advantages[0] < 0) == (1, True)
    # One that came first does not lose to the one before it.
    life.tell(life.of(SampleShaped)[0])
    assert (group.revision, group.advantages[0] < 0) == (1, True)
    assert place < life.seq
    second = life.roll_out(member(0, 1.0, 1), member(1, 0.0, 1), sample=1)
    life.tell(graded(second, 0))
    (plan,) = life.plans
    assert [a < 0 for a in plan.rows.advantage][:1] == [True]
    assert life.of(BatchYielded)[0].sources["math"].mean_reward == 0.5
    dump = orjson.dumps(life.core.dump())
    told = len(life.facts)
    life.tell(graded(second, 1, (0.0, 1.0)))
    assert (orjson.dumps(life.core.dump()), len(life.facts)) == (dump, told)


def test_a_late_answer_that_is_not_about_the_group_changes_nothing() -> None:
    life = Life(groups=2)
    completed = life.roll_out(*PAIR)
    life.tell(graded(completed, 0))
    wrong = SampleGraded(source="math", sample="math-000000", grader="g", revision=1, rewards=(0.0, 1.0, 1.0))
    life.tell(wrong)
    assert [s.revision for s in life.of(SampleShaped)] == [0]
    assert life.core.groups["math-000000"].rewards == (1.0, 0.0)


def test_qualities_and_hacks_of_the_grader_reach_the_hooks() -> None:
    life = Life(groups=2, group_size=4, hooks=[{"kind": "dr_grpo"}, {"kind": "redistribute"}])
    completed = life.roll_out(*(member(i, r) for i, r in enumerate((1.0, 1.0, 1.0, 0.0))))
    told = graded(completed, 0).model_copy(update={"quality": (1.0, 0.5, 0.5, 1.0)})
    life.tell(told)
    # MiMo's Eq. 3, its published example.
    assert life.of(SampleShaped)[0].advantages == pytest.approx((0.375, 0.1875, 0.1875, -0.75))
    hacks = dataclasses.replace(sampling.signal(life.core.groups["math-000000"], life.config.sources[0]))
    assert [m.hack for m in hacks.members] == [False] * 4


def test_a_group_may_complete_with_fewer_members_where_the_source_says_so() -> None:
    def end(min_members: int, *members: SequenceFinished | None, **source: Any) -> str:
        life = Life(group_size=3, groups=2, accept={"min_members": min_members}, **source)
        completed = life.roll_out(*members)
        life.tell(graded(completed, 0))
        return life.end()

    assert end(0, *PAIR, None) == "accepted"
    assert end(3, *PAIR, None) == "failed"
    assert end(3, *PAIR, member(2, 0.0)) == "accepted"
    # One alone is enough if it is said to be; what rloo cannot shape fails, and stops nobody.
    alone = {"accept": {"min_members": 1, "max": 2.0}, "groups": 2, "group_size": 3}
    for estimator, outcome in (("grpo", "accepted"), ("rloo", "failed")):
        life = Life(estimator=estimator, **alone)
        life.tell(graded(life.roll_out(PAIR[0], None, None), 0))
        assert life.end() == outcome


def test_limits_may_be_inclusive() -> None:
    for inclusive, outcome in ((False, "pass_rate"), (True, "accepted")):
        accept = {"min": 0.5, "max": 0.9, "inclusive": inclusive}
        life = Life(groups=2, group_size=4, accept=accept)
        life.tell(graded(life.roll_out(*PAIR, member(2, 1.0), member(3, 0.0)), 0))
        assert life.end() == outcome


def test_all_zero_is_what_the_whole_chain_says() -> None:
    """Both pass, one at thrice the length: the length penalty makes a difference that the rewards did not have."""
    both = (member(0, 1.0, generated=2), member(1, 1.0, generated=6))
    accept = {"max": 2.0}
    for hooks, outcome in (
        ([{"kind": "grpo"}], "all_zero"),
        ([{"kind": "length_penalty"}, {"kind": "grpo"}], "accepted"),
    ):
        life = Life(groups=2, hooks=hooks, accept=accept)
        life.tell(graded(life.roll_out(*both), 0))
        assert life.end() == outcome
    # What events do not say is not judged here.
    life = Life(groups=2, hooks=[{"kind": "nobody.imports:This"}], accept=accept)
    life.tell(graded(life.roll_out(*both), 0))
    assert (life.end(), life.of(SampleShaped)) == ("accepted", [])


def test_of_a_task_one_accepted_group_is_in_play() -> None:
    life = Life(groups=3, tasks=3, accept={"duplicates": "reject"})
    for sample, task in enumerate((0, 1, 0)):
        life.tell(
            graded(life.roll_out(member(0, 1.0, sample), member(1, 0.0, sample), task=task, sample=sample), 0)
        )
    assert [life.end(sample) for sample in range(3)] == ["accepted", "accepted", "duplicate"]
    life.tell(graded(life.roll_out(member(0, 1.0, 3), member(1, 0.0, 3), task=2, sample=3), 0))
    assert len(life.plans) == 1
    # Its first group is in a batch now.
    life.tell(graded(life.roll_out(member(0, 1.0, 4), member(1, 0.0, 4), task=0, sample=4), 0))
    assert life.end(4) == "accepted"


def test_of_two_groups_of_a_task_that_are_accepted_at_once_the_second_never_waits() -> None:
    life = Life(hold=(SampleAccepted,), groups=2, tasks=2, accept={"duplicates": "reject"})
    for sample in range(2):
        life.tell(graded(life.roll_out(member(0, 1.0, sample), member(1, 0.0, sample), sample=sample), 0))
    assert len(life.held) == 2
    life.hold = (SampleRejected,)
    life.facts, held, life.held = [*life.facts, *life.held], life.held, []
    life.tell(*held)
    # Shaped by somebody before the rejection is in the log: it is in no batch all the same.
    life.tell(
        SampleShaped(source="math", sample="math-000001", estimator="x", advantages=(1.0, -1.0), by="hook")
    )
    assert [group.sample for group in life.core.groups.waiting("math")] == ["math-000000"]
    life.release()
    assert (life.end(0), life.end(1)) == ("accepted", "accepted duplicate")
    assert life.core.groups.get("math-000001") is None
    assert life.plans == []


def test_a_group_that_two_would_reject_is_rejected_by_the_first_and_that_is_no_divergence() -> None:
    life = Life(hold=(SampleAccepted, SampleRejected), groups=2, tasks=2, accept={"duplicates": "reject"})
    for sample in range(2):
        life.tell(graded(life.roll_out(member(0, 1.0, sample), member(1, 0.0, sample), sample=sample), 0))
    accepted, life.held = life.held, []
    life.tell(*accepted)
    assert [type(fact) for fact in life.held] == [SampleRejected]
    life.tell(SampleRejected(source="math", sample="math-000001", reason="failed", by="hook"))
    life.hold = ()
    # The run goes on, far beyond the decision that came too late.
    for sample in (2, 3):
        pair = (member(0, 1.0, sample), member(1, 0.0, sample))
        life.tell(graded(life.roll_out(*pair, task=sample, sample=sample), 0))
    assert len(life.plans) == 1
    again = Rerun("r", SERVICES["sampler"])
    for told in life.log:
        again.feed(told)
    assert (again.report().divergences, again.report().pending) == ((), ())


def test_a_group_that_the_hook_service_cannot_shape_leaves_and_one_that_waits_does_not() -> None:
    life = Life(groups=2, hooks=[{"kind": "nobody.imports:This"}])
    for sample in range(2):
        life.tell(graded(life.roll_out(member(0, 1.0, sample), member(1, 0.0, sample), sample=sample), 0))
    life.tell(
        SampleShaped(source="math", sample="math-000001", estimator="x", advantages=(1.0, -1.0), by="hook")
    )
    for sample in range(2):
        life.tell(SampleRejected(source="math", sample=f"math-{sample:06d}", reason="failed", by="hook"))
    # A batch that holds the one that waits may be on its way.
    assert [life.core.groups.get(f"math-{sample:06d}") is not None for sample in range(2)] == [False, True]


def test_advantages_of_a_later_revision_do_not_put_a_group_into_a_batch() -> None:
    life = Life(hooks=[{"kind": "nobody.imports:This"}])
    life.tell(graded(life.roll_out(*PAIR), 0))
    first = SampleShaped(
        source="math", sample="math-000000", estimator="x", advantages=(1.0, -1.0), by="hook"
    )
    life.tell(first.model_copy(update={"revision": 1, "advantages": (2.0, -2.0)}))
    # Nor do any that are not about this group.
    life.tell(first.model_copy(update={"revision": 1, "advantages": (1.0, 0.0, -1.0)}))
    assert life.plans == []
    life.tell(first)
    assert life.plans[0].rows.advantage == (2.0, -2.0)


def _of_rows(header: PayloadHeader, rows: int) -> PayloadHeader:
    (column,) = header.columns
    return header.model_copy(update={"columns": (column.model_copy(update={"shape": (rows,)}),)})


@pytest.mark.parametrize(
    ("advantages", "sidecars"),
    [
        ((1.0, 0.0, -1.0), ()),
        ((1.0, -1.0), (_of_rows(sidecar(PAIR[0], 0), 5), None)),
        ((1.0, -1.0), (None, sidecar(PAIR[1], 0).model_copy(update={"columns": ()}))),
    ],
)
def test_a_group_whose_advantages_do_not_fit_it_is_rejected_and_stops_nobody(
    advantages: tuple[float, ...], sidecars: tuple[PayloadHeader | None, ...]
) -> None:
    life = Life(groups=1, hooks=[{"kind": "nobody.imports:This"}])
    life.tell(graded(life.roll_out(*PAIR), 0))
    wrong = SampleShaped(
        source="math", sample="math-000000", estimator="x", advantages=advantages, sidecars=sidecars, by="hook"
    )  # fmt: skip
    # Of a late grading they leave the earlier ones, whether those are there yet or not.
    life.tell(wrong.model_copy(update={"revision": 1}))
    assert life.end() == "accepted"
    life.tell(wrong)
    assert (life.end(), life.plans, len(life.core.groups)) == ("accepted failed", [], 0)
    other = (member(0, 1.0, 1), member(1, 0.0, 1))
    life.tell(graded(life.roll_out(*other, sample=1), 0))
    right = SampleShaped(
        source="math", sample="math-000001", estimator="x", advantages=(1.0, -1.0), by="hook",
        sidecars=(sidecar(other[0], 0), None),
    )  # fmt: skip
    life.tell(right)
    assert len(life.plans) == 1
    again = Rerun("r", SERVICES["sampler"])
    for told in life.log:
        again.feed(told)
    assert again.report().divergences == ()


def test_sidecars_are_of_all_members_or_of_none() -> None:
    with pytest.raises(ValidationError, match="1 sidecars for 2 advantages"):
        SampleShaped(
            source="math", sample="math-000000", estimator="x", advantages=(1.0, -1.0), by="hook",
            sidecars=(sidecar(PAIR[0], 0),),
        )  # fmt: skip


def test_a_group_that_became_too_old_while_it_was_shaped_is_rejected_then() -> None:
    life = Life(groups=1, staleness=0, hooks=[{"kind": "nobody.imports:This"}])
    for sample in range(2):
        life.tell(graded(life.roll_out(member(0, 1.0, sample), member(1, 0.0, sample), sample=sample), 0))
    for sample in range(2):
        name = f"math-{sample:06d}"
        life.tell(SampleShaped(source="math", sample=name, estimator="x", advantages=(1.0, -1.0), by="hook"))
    assert len(life.of(BatchYielded)) == 1
    assert life.end(1) == "accepted stale"
    assert len(life.core.groups) == 0


def test_hooks_that_refuse_a_group_reject_it_and_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(groups=2)
    completed = life.roll_out(*PAIR)

    def refuse(group: object, source: object) -> None:
        raise BadHook("no")

    with monkeypatch.context() as broken:
        broken.setattr(sampling, "advantages", refuse)
        life.tell(graded(completed, 0))
    assert life.end() == "failed"
    # Accepted, and then not to be shaped, since the rewards are others: it leaves; shaped anew, it keeps what it has.
    life.hold = (SampleAccepted,)
    for sample in (1, 2):
        life.tell(graded(life.roll_out(member(0, 1.0, sample), member(1, 0.0, sample), sample=sample), 0))
    (first, second), life.held, life.hold = life.held, [], ()
    life.tell(second)
    with monkeypatch.context() as broken:
        broken.setattr(sampling, "advantages", refuse)
        life.tell(first)
        life.tell(
            SampleGraded(source="math", sample="math-000002", revision=1, grader="g", rewards=(0.0, 1.0))
        )
    assert life.end(1) == "failed"
    assert [s.sample for s in life.of(SampleShaped)] == ["math-000002"]


def test_the_chain_of_a_source_without_hooks_is_its_estimator() -> None:
    for estimator in ("grpo", "rloo", "dr_grpo"):
        life = Life(groups=2, estimator=estimator)
        life.tell(graded(life.roll_out(*PAIR), 0))
        (shaped,) = life.of(SampleShaped)
        assert (shaped.estimator, shaped.by, shaped.sidecars) == (estimator, "sampler", ())
        expected = chain(life.config.sources[0]).run(
            sampling.signal(life.core.groups["math-000000"], life.config.sources[0])
        )
        assert np.array_equal(shaped.advantages, expected.made())
