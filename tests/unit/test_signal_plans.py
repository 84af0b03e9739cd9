"""What penalties do to a group, its plan and its batch; and that without any a plan says nothing of them."""

from __future__ import annotations

import orjson
import pytest

from pipeline.batch.planning import plan_body
from pipeline.batch.yielding import penalty_factors
from schemas.facts import (
    BatchYielded,
    SequenceFinished,
)
from schemas.payload import ContextMeta, Flag, Span
from schemas.plan import Plan
from tests.unit.signal_life import PAIR, Life, member
from tests.unit.signal_world import (
    graded,
)

# Rules 0, 1 and 2 mask, weigh and subtract.
PENALTIES = [
    {"rule": "garbled", "strategy": "mask"},
    {"rule": "repetition", "strategy": "weigh"},
    {"rule": "malformed_call", "strategy": "subtract", "value": 0.25},
]
WEIGHS = [
    {"kind": "dr_grpo"},
    {"kind": "segment_penalty", "options": {"kappa": 2.0, "alpha_max": 9.0, "beta_min": 0.0}},
]


def contexts(
    *flags: tuple[tuple[int, int, int], ...], tokens: int = 10, loss: int = 4
) -> tuple[ContextMeta, ...]:
    """Contexts of 10 tokens, of which the last 4 carry loss, with (start, end, rules)."""
    return tuple(
        ContextMeta(
            offset=i * tokens,
            tokens=tokens,
            generated=loss,
            loss_spans=(Span(start=tokens - loss, end=tokens),),
            min_version=i,
            max_version=i,
            flags=tuple(Flag(start=a, end=b, rules=rules) for a, b, rules in each),
        )
        for i, each in enumerate(flags)
    )


def with_contexts(number: int, reward: float, *flags: tuple[tuple[int, int, int], ...]) -> SequenceFinished:
    return member(number, reward).model_copy(update={"contexts": contexts(*flags)})


def test_penalties_ride_in_the_plan_and_the_batch_has_their_factors() -> None:
    life = Life(hooks=WEIGHS, penalties=PENALTIES)
    completed = life.roll_out(
        with_contexts(0, 1.0, ((6, 8, 2),), ((6, 7, 4),)),
        with_contexts(1, 0.0, ((6, 7, 1), (7, 8, 2), (8, 9, 6)), ((6, 10, 1),)),
    )
    life.tell(graded(completed, 0))
    (plan,) = life.plans
    (yielded,) = life.of(BatchYielded)
    # A = 0.5: 2 of 8 tokens are flagged. A = -0.5: 2 of the 3 that are left.
    alpha, beta = 1 + 2 / 6, max(0.0, 1 - 2 / 1)
    assert (yielded.factors.alpha, yielded.factors.beta) == pytest.approx((alpha, beta))
    rows = {
        (plan.sequences[s].sequence[-1], c): i
        for i, (s, c) in enumerate(zip(plan.rows.sequence, plan.rows.context, strict=True))
    }
    assert sorted(rows) == [("0", 0), ("0", 1), ("1", 0)], "a context of which nothing is left has no row"
    assert plan.loss_tokens == 11
    assert set(plan.rows.loss_weight) == {1 / 11}
    assert [plan.rows.scale[rows["0", c]] for c in (0, 1)] == pytest.approx([alpha, alpha])
    assert plan.rows.scale[rows["1", 0]] == beta
    assert plan.changes is not None
    columns = plan.changes.model_dump().values()
    changed = {
        (plan.sequences[plan.rows.sequence[row]].sequence[-1], plan.rows.context[row], start): rest
        for row, start, *rest in zip(*columns, strict=True)
    }
    assert changed == {
        ("0", 0, 6): [8, 0.0, 0.0, True],
        ("0", 1, 6): [7, pytest.approx(alpha), -0.25, True],
        ("1", 0, 6): [7, beta, 0.0, False],
        ("1", 0, 7): [8, 2.0, 0.0, True],
        ("1", 0, 8): [9, 2.0, -0.25, True],
    }
    assert list(plan.changes.row) == sorted(plan.changes.row)


def test_what_penalties_leave_nothing_of_is_dropped_from_context_to_sample() -> None:
    everything = ((6, 10, 1),)
    life = Life(groups=2, group_size=3, penalties=PENALTIES)
    completed = life.roll_out(
        with_contexts(0, 1.0, everything, ()),
        with_contexts(1, 0.0, everything, everything),
        with_contexts(2, 0.0, (), everything),
    )
    life.tell(graded(completed, 0))
    group = life.core.groups["math-000000"]
    assert [(f.loss_tokens, f.rows, f.masked) for f in group.ordered()] == [
        (4, 8, False),
        (0, 8, True),
        (4, 8, False),
    ]
    made = plan_body([group], life.decisions, "r", 1, penalty_factors([group], life.decisions))
    plan = Plan.model_validate_json(made.body)
    assert sorted((s, c) for s, c in zip(plan.rows.sequence, plan.rows.context, strict=True)) == [
        (0, 1),
        (2, 0),
    ]
    assert plan.loss_tokens == 8
    # The oldest token of sequence 0 is of a context that is trained no more.
    assert [f.min_version for f in group.ordered()] == [1, None, 0]
    # A long context of which nothing is left is in nobody's way.
    gone = Life(groups=2, penalties=PENALTIES)
    whole = gone.roll_out(*(with_contexts(n, float(n), everything) for n in range(2)))
    gone.tell(graded(whole, 0))
    assert gone.end() == "no_loss"


def test_without_penalties_a_plan_says_nothing_of_them() -> None:
    life = Life(hooks=[{"kind": "grpo"}])
    life.tell(graded(life.roll_out(*PAIR), 0))
    (plan,) = life.plans
    told = orjson.loads(orjson.dumps(plan.model_dump(mode="json")))
    assert "changes" not in told
    assert "scale" not in told["rows"]
    assert "advantages" not in told["sequences"][0]
    assert life.of(BatchYielded)[0].factors is None
