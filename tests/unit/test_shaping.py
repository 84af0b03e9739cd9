"""What the hook service decides: on which rewards a group is shaped, what its fact says, which groups are none, how large one may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.signal.shaping import (
    Gathered,
    all_zero,
    by_token,
    largest_group,
    loss_rows,
    rejected,
    shaped,
    stands,
)
from schemas.config import Source
from schemas.envelope import BodyTooLarge, encode, new_event
from schemas.facts import SampleAccepted, SampleCompleted, SampleGraded
from schemas.keys import payload_key, sidecar_key
from schemas.payload import BLOCK_TOKENS, ColumnHeader, ContextMeta, Flag, PayloadHeader, Span
from tests.unit.factories import event, finished
from tests.unit.test_hooks import chained, signal, source_of

ACCEPTED = SampleAccepted(
    source="math", sample="math-000001", pass_rate=0.5, mean_reward=0.5, tokens=20, min_version=0
)


def graded(*rewards: float, revision: int = 0) -> SampleGraded:
    return SampleGraded(
        source="math", sample="math-000001", revision=revision, grader="judge", rewards=rewards
    )


def test_a_late_grading_counts_in_revision_0_only_where_it_stood_before_the_acceptance() -> None:
    own, late, accepted = graded(1, 0), graded(0, 1, revision=1), event(ACCEPTED, 20)
    assert stands(own, None, accepted, 0) is own
    assert stands(own, event(late, 19), accepted, 0) is late
    assert stands(own, event(late, 21), accepted, 0) is own
    assert stands(own, event(late, 21), accepted, 1) is late
    # One that is about other members is nobody's.
    assert stands(own, event(graded(1, revision=1), 19), accepted, 0) is own


def test_the_signal_is_the_samplers() -> None:
    penalty = {"rule": "repetition", "strategy": "weigh"}
    source = source_of(["grpo"], penalties=[penalty], effects={"max_turns": "mask"})
    flagged = finished("math-000001-0", 1.0)
    (context,) = flagged.contexts
    context = context.model_copy(update={"flags": (Flag(start=6, end=7, rules=1),)})
    facts = (
        flagged.model_copy(update={"contexts": (context,)}),
        finished("math-000001-3", 0.0).model_copy(update={"termination": "max_turns"}),
    )
    given_ = graded(1.0, 0.0).model_copy(update={"quality": (0.5, 1.0), "hacks": (False, True)})
    completed = SampleCompleted(
        source="math",
        sample="math-000001",
        sequences=("math-000001-0", "math-000001-3"),
        rewards=(1, 0),
        failed=2,
    )
    made = Gathered(source, ACCEPTED, completed, given_, facts).signal([{}, {"logprobs": np.zeros(4)}])
    first, second = made.members
    assert (first.sequence, first.loss_tokens, first.flagged, first.unflagged) == ("math-000001-0", 4, 1, 3)
    assert (first.quality, first.hack, first.masked) == (0.5, False, False)
    assert (second.quality, second.hack, second.masked, second.termination) == (1.0, True, True, "max_turns")
    assert made.rewards.tolist() == [1.0, 0.0]
    assert list(made.columns[1]) == ["logprobs"]
    with pytest.raises(ValueError, match="1 graded rewards for 2 finished sequences"):
        Gathered(source, ACCEPTED, completed, graded(1.0), facts).signal([{}, {}])


def test_loss_rows_are_the_payloads_in_its_order() -> None:
    def context(offset: int, *spans: tuple[int, int]) -> ContextMeta:
        return ContextMeta(
            offset=offset, tokens=10, generated=6, min_version=0, max_version=0,
            loss_spans=tuple(Span(start=a, end=b) for a, b in spans),
        )  # fmt: skip

    rows = loss_rows([context(10, (0, 2)), context(0, (1, 3), (5, 6))])
    assert [(row.start, row.end) for row in rows] == [(1, 3), (5, 6), (10, 12)]


def test_a_group_is_all_zero_where_no_member_would_be_trained() -> None:
    zero, half = np.zeros(3, np.float32), np.full(3, 0.5, np.float32)
    made = replace(signal(1.0, 1.0), advantages=np.zeros(2))
    assert all_zero(made)
    assert not all_zero(replace(made, advantages=np.array([0.0, 1e-3])))
    # By token, those count, not the mean that stands beside them.
    assert not all_zero(replace(made, tokens=(zero, half * [1, -1, 0])))
    assert all_zero(replace(made, advantages=np.array([0.0, 1.0]), tokens=(None, zero)))
    masked = replace(made.members[1], masked=True)
    assert all_zero(replace(made, members=(made.members[0], masked), tokens=(zero, half)))


def test_a_shaped_group_says_the_means_of_what_lies_in_its_sidecars() -> None:
    made = replace(
        signal(1.0, 0.0), advantages=np.array([9.0, -1.0]), tokens=(np.array([1.0, 2.0, 6.0]), None)
    )
    first, second = by_token(made)
    assert first is not None
    assert (first.dtype, second) == (np.float32, None)
    header = PayloadHeader(key="k", bytes=1, columns=())
    fact = shaped(ACCEPTED, chained(), made, [header, None], 1)
    assert (fact.advantages, fact.sidecars, fact.by, fact.id()) == (
        (3.0, -1.0), (header, None), "hook", "math-000001-r1",
    )  # fmt: skip
    assert shaped(ACCEPTED, chained(), replace(made, tokens=()), [None, None], 0).sidecars == ()
    # A member without a loss token has no sidecar: it would be an object of nothing.
    empty = replace(signal(1.0, loss_tokens=0), advantages=np.ones(1), tokens=(np.zeros(0),))
    assert by_token(empty) == (None,)
    assert shaped(ACCEPTED, chained(), empty, [None], 0).advantages == (1.0,)


def test_a_group_that_cannot_be_shaped_is_rejected_with_what_it_was_accepted_with() -> None:
    fact = rejected(ACCEPTED)
    assert (fact.reason, fact.by, fact.pass_rate, fact.tokens) == ("failed", "hook", 0.5, 20)
    assert rejected(ACCEPTED, "all_zero").reason == "all_zero"


def largest_fact(source: Source, members: int, tokens: int):
    """The fact of a group of so many, with all numbers as long as they can be."""
    made = replace(
        signal(*[0.0] * members, loss_tokens=1), advantages=np.full(members, -1.2345678901234567e-100)
    )
    sample = "math-1000000000"
    key = sidecar_key(payload_key("r", "math", f"{sample}-{source.group_size}-a5"), "advantages.1")
    column = ColumnHeader(
        name="advantages", dtype="float32", shape=(tokens,), offset=200, bytes=4 * tokens,
        crc32c=(2**32 - 1,) * -(-tokens // BLOCK_TOKENS),
    )  # fmt: skip
    header = PayloadHeader(key=key, bytes=200 + 4 * tokens, columns=(column,))
    accepted = ACCEPTED.model_copy(update={"sample": sample})
    return shaped(accepted, replace(chained(), estimator="e" * 128), made, [header] * members, 1)


@settings(max_examples=20)
@given(turns=st.integers(1, 1000), each=st.integers(1, 20_000), session=st.sampled_from([0, 500, 3_000_000]))
def test_the_largest_group_fits_into_an_event_and_twice_as_large_a_one_does_not(
    turns: int, each: int, session: int
) -> None:
    behaviour = {"max_turns": turns, "max_tokens": each, "max_session_tokens": session}
    source = source_of(["grpo"]).model_copy(
        update={"behaviour": source_of([]).behaviour.model_copy(update=behaviour), "group_size": 512}
    )
    most, tokens_ = largest_group("r", source, 5), min(turns * each, session or turns * each)
    encode(new_event(largest_fact(source, most, tokens_), "hook"), "r")
    with pytest.raises(BodyTooLarge):
        encode(new_event(largest_fact(source, 2 * most + 1, tokens_), "hook"), "r")
