"""An event as a line for people."""

from __future__ import annotations

from datetime import UTC, datetime

from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    Failure,
    PenaltyFactors,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceFailed,
    SequenceScored,
)
from schemas.payload import PayloadHeader, Ref
from services.cli.events import line

HEADER = PayloadHeader(key="k", bytes=1, columns=())


def told(fact: Fact) -> str:
    event = Event(seq=7, id="e", time=datetime(2026, 1, 2, tzinfo=UTC), producer="al-0", fact=fact)
    return line(event).removeprefix("      7  00:00:00.000  ")


def test_a_failure_says_why_in_one_line() -> None:
    fact = SequenceFailed(
        source="sums",
        sample="sums-000012",
        sequence="sums-000012-5",
        attempts=5,
        failure=Failure(kind="infra", reason="verifier_timeout", detail="no verdict\nwithin 3 s"),
    )
    assert told(fact) == (
        r'sequence.failed     sums sums-000012-5  attempts=5 reason="verifier_timeout" detail="no verdict\nwithin 3 s"'
    )


def test_a_grade_says_its_hacks_and_qualities_and_how_it_came() -> None:
    late = SampleGraded(
        source="sums", sample="sums-000012", revision=1, grader="rubric", rewards=(0, 1, 1), quality=(0.25, 1, 0.5),
        hacks=(True, False, True), attempts=2, seconds=31.25, cost=0.002,
    )  # fmt: skip
    assert told(late) == (
        "sample.graded       sums sums-000012-r1  "
        'revision=1 grader="rubric" quality="0.25..1" hacks=2 attempts=2 seconds=31.25 cost=0.002'
    )
    kept = SampleGraded(
        source="sums", sample="sums-000012", grader="rubric", rewards=(1,), fallback="a\x1b[31m"
    )
    assert told(kept) == 'sample.graded       sums sums-000012  grader="rubric" fallback="a\\u001b[31m"'
    plain = SampleGraded(source="sums", sample="sums-000012", grader="none", rewards=(1, 0))
    assert told(plain) == 'sample.graded       sums sums-000012  grader="none"'


def test_scores_and_why_there_are_none() -> None:
    scored = SequenceScored(
        source="sums", sample="sums-000012", sequence="sums-000012-5", teacher="big", tokens=100, scores=HEADER, seconds=1.5
    )  # fmt: skip
    assert told(scored) == 'sequence.scored     sums sums-000012-5-big  teacher="big" tokens=100 seconds=1.5'
    lost = SequenceScored(
        source="sums", sample="sums-000012", sequence="sums-000012-5", teacher="big", tokens=0, scores=None, failure="too long"
    )  # fmt: skip
    assert told(lost).endswith('teacher="big" tokens=0 failure="too long"')


def test_shaping_says_its_revision_who_did_it_and_its_sidecars() -> None:
    anew = SampleShaped(
        source="sums", sample="sums-000012", revision=1, estimator="opd", advantages=(0.5, 0), sidecars=(HEADER, None), by="hook"
    )  # fmt: skip
    assert told(anew) == (
        'sample.shaped       sums sums-000012-r1  revision=1 estimator="opd" sidecars=1 by="hook"'
    )
    plain = SampleShaped(source="sums", sample="sums-000012", estimator="grpo", advantages=(1, -1))
    assert told(plain) == 'sample.shaped       sums sums-000012  estimator="grpo"'


def test_a_batch_says_its_factors_and_a_rejection_its_reason() -> None:
    batch = BatchYielded(
        step=1, through=9, policy_version=0, sources={}, microbatches=2, plan=Ref(key="k", bytes=1, crc32c=0),
        factors=PenaltyFactors(alpha=1.25, beta=0.875),
    )  # fmt: skip
    assert told(batch) == (
        "batch.yielded       all 000001  step=1 through=9 policy_version=0 microbatches=2 alpha=1.25 beta=0.875"
    )
    assert "alpha" not in told(batch.model_copy(update={"factors": None}))
    rejected = SampleRejected(
        source="sums", sample="sums-000012", reason="duplicate", pass_rate=0.5, mean_reward=0.5
    )
    assert told(rejected) == (
        'sample.rejected     sums sums-000012  reason="duplicate" pass_rate=0.5 mean_reward=0.5 tokens=0'
    )
