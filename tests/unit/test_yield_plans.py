"""The plan of a batch: its bytes, what is left of overlong contexts, who encodes images; against the rules spelled out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.arranging import fit
from pipeline.batch.inheritance import Leftovers, NotInheritable, entrance
from pipeline.batch.planning import plan_body
from pipeline.batch.yielding import penalty_factors
from pipeline.signal.groups import Finished, Group
from schemas.config import Decisions
from schemas.payload import ColumnHeader, ContextMeta, Flag, ImageItem, PayloadHeader, Span
from schemas.plan import Plan, PlanRows
from schemas.vision import Vision
from tests.unit.factories import config, finished
from tests.unit.signal_life import Life, member
from tests.unit.signal_world import graded

BUDGET = 64
PENALTIES = [
    {"rule": "garbled", "strategy": "mask"},
    {"rule": "repetition", "strategy": "weigh"},
    {"rule": "malformed_call", "strategy": "subtract", "value": 0.25},
]
WEIGHS = [{"kind": "dr_grpo"}, {"kind": "segment_penalty"}]


def spans(draw: st.DrawFn, tokens: int, most: int, first: int) -> list[tuple[int, int]]:
    """Ascending and disjoint, in [first, tokens)."""
    edges = draw(st.lists(st.integers(first, tokens), max_size=2 * most, unique=True).map(sorted))
    return list(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def metas(draw: st.DrawFn) -> ContextMeta:
    tokens = draw(st.integers(2, BUDGET + 30))
    loss = spans(draw, tokens, 3, 1)
    count = sum(b - a for a, b in loss)
    spilled = draw(st.booleans()) and count > 0 and draw(st.booleans())
    flags = [] if spilled else [Flag(start=a, end=b, rules=draw(st.integers(1, 7))) for a, b in spans(draw, tokens, 2, 0)]  # fmt: skip
    images = [
        ImageItem(digest=(number := draw(st.sampled_from("abc"))) * 64, bytes=9, height=28, width=28, patches=4 * ord(number), start=a, end=b)
        for a, b in spans(draw, tokens, 2, 0)
    ]  # fmt: skip
    return ContextMeta(
        offset=0,
        tokens=tokens,
        generated=tokens,
        loss_spans=() if spilled else tuple(Span(start=a, end=b) for a, b in loss),
        min_version=0,
        max_version=0,
        flags=tuple(flags),
        spilled=count if spilled else 0,
        images=tuple(images),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Decisions, list[Group]]:
    cp = draw(st.sampled_from([1, 2, 4]))
    batch = {
        "dp": draw(st.integers(1, 2)),
        "cp": cp,
        "layout": draw(st.sampled_from(["contiguous", "megatron", "ulysses"])),
        "token_budget": BUDGET,
        "adaptive_cp": draw(st.booleans()),
        "overlong": draw(st.sampled_from(["drop", "truncate"])),
        "order": draw(st.sampled_from(["small_ends", "descending"])),
    }
    source = {
        "name": "math",
        "pool": "p",
        "groups": 1,
        "group_size": 4,
        "environment": {"kind": "arithmetic"},
    }
    rules: dict[str, Any] = {"penalties": PENALTIES, "hooks": WEIGHS} if draw(st.booleans()) else {}
    whole = config(sources=[{**source, **rules}], batch=batch)
    decisions = Decisions.model_validate(whole.decisions())
    groups: list[Group] = []
    for number in range(draw(st.integers(1, 3))):
        sample = f"math-{number:06d}"
        group = Group("math", sample, 2)
        for which in range(2):
            fact = finished(f"{sample}-{which}", 1.0).model_copy(
                update={"contexts": tuple(draw(st.lists(metas(), min_size=1, max_size=2)))}
            )
            group.members[fact.sequence] = which
            group.finished[fact.sequence] = Finished.of(
                fact,
                draw(st.booleans()) and draw(st.booleans()),
                decisions.sources[0].penalties,
                fit(decisions.batch),
            )
        group.advantages = (draw(st.floats(-2, 2)), draw(st.floats(-2, 2)))
        if draw(st.booleans()):
            rows = group.ordered()[0].rows
            header = PayloadHeader(
                key=f"s{number}",
                bytes=4 * rows,
                columns=(
                    ColumnHeader(
                        name="advantages", dtype="float32", shape=(rows,), offset=0, bytes=4 * rows, crc32c=()
                    ),
                ),
            )
            group.sidecars = (header.model_dump_json(), None)
        if group.loss_tokens():
            groups.append(group)
    return decisions, groups


def trained(plan: Plan, row: int) -> set[int]:
    """The rows of the row's context that are trained, by the rule in words: they carry loss, none is the first that is kept or
    before it, and no change masks them."""
    rows = plan.rows
    context = plan.sequences[rows.sequence[row]].contexts[rows.context[row]]
    skip = rows.skip[row] if rows.skip else 0
    found = {t for span in context.loss_spans for t in range(span.start, span.end)}
    if skip:
        found -= set(range(skip + 1))
    changes = plan.changes
    if changes is not None:
        for r, start, end, keep in zip(changes.row, changes.start, changes.end, changes.keep, strict=True):
            if r == row and not keep:
                found -= set(range(start, end))
    return found


@given(run=runs())
@settings(max_examples=80, deadline=None)
def test_a_plan_is_the_bytes_of_its_model_and_keeps_its_promises(run: tuple[Decisions, list[Group]]) -> None:
    decisions, groups = run
    if not groups:
        return
    factors = penalty_factors(groups, decisions)
    made = plan_body(groups, decisions, "r", 1, factors)
    plan = Plan.model_validate_json(made.body)
    assert orjson.dumps(plan.model_dump(mode="json")) == made.body
    plan.check()
    assert made.microbatches == plan.microbatches
    assert (plan.step, plan.policy_version) == (1, 0)
    rows, batch = plan.rows, decisions.batch
    limit = fit(batch).limit
    planned: dict[str, dict[int, int]] = defaultdict(dict)
    weights: dict[str, float] = defaultdict(float)
    for row, (s, c) in enumerate(zip(rows.sequence, rows.context, strict=True)):
        sequence = plan.sequences[s]
        context = sequence.contexts[c]
        planned[sequence.sequence][c] = skip = rows.skip[row] if rows.skip else 0
        if context.tokens > limit:
            assert batch.overlong == "truncate"
            assert not context.spilled, "nobody can say what is left of it"
            assert context.tokens - skip == limit, "as much is left as fits"
        else:
            assert skip == 0
        tokens = context.spilled or len(trained(plan, row))
        assert tokens
        weights[sequence.sample] += tokens * rows.loss_weight[row]
    for total in weights.values():
        assert total == pytest.approx(1 / len(groups)), "every group weighs the same"
    assert weights.keys() == {group.sample for group in groups}
    # What has no row has no loss, is masked, or is too long.
    for group in groups:
        for each in group.ordered():
            assert (each.loss_tokens == 0) == (each.sequence not in planned)
            if batch.overlong == "truncate" and not decisions.sources[0].penalties and not each.masked:
                for c, context in enumerate(each.contexts()):
                    if context.loss_tokens() and not (context.spilled and context.tokens > limit):
                        skip = max(0, context.tokens - limit)
                        assert (c in planned[each.sequence]) == (context.loss_tokens(skip) > 0)


def test_the_default_configuration_says_nothing_of_what_is_not_there() -> None:
    life = Life()
    life.tell(graded(life.roll_out(member(0, 1.0), member(1, 0.0)), 0))
    told = orjson.loads(orjson.dumps(life.plans[0].model_dump(mode="json")))
    assert told.keys().isdisjoint({"tp", "layout", "fp8", "cp_sizes", "changes", "images"})
    assert told["rows"].keys().isdisjoint({"scale", "group", "skip"})


def long_group(overlong: str, **contexts: Any) -> Life:
    """Sequence 0 has a context of 80 tokens, the last 30 of which carry loss, and one of 20, the last 5; sequence 1 has one of 10,
    the last 4."""
    run = {
        "batch": {"dp": 1, "token_budget": BUDGET, "overlong": overlong},
        "engine": {"max_context": BUDGET},
    }
    life = Life(run=run, behaviour={"max_tokens": 8})
    (long,) = member(0, 1.0, tokens=80, generated=30).contexts
    (short,) = member(0, 1.0, tokens=20, generated=5).contexts
    both = (long.model_copy(update=contexts), short.model_copy(update={"offset": 80}))
    life.tell(
        graded(
            life.roll_out(member(0, 1.0).model_copy(update={"contexts": both}), member(1, 0.0)),
            0,
        )
    )
    return life


def test_a_group_with_an_overlong_context_is_rejected() -> None:
    life = long_group("reject")
    assert life.end() == "overlong"
    assert not life.plans


def test_an_overlong_context_is_left_out() -> None:
    life = long_group("drop")
    (plan,) = life.plans
    assert sorted(zip(plan.rows.sequence, plan.rows.context, strict=True)) == [(0, 1), (1, 0)]
    assert not plan.rows.skip
    assert (plan.loss_tokens, set(plan.rows.loss_weight)) == (9, {1 / 9})
    plan.check()
    # What carries no loss is in nobody's way either.
    assert long_group("drop", loss_spans=(), generated=0).end() == "accepted"


def test_of_an_overlong_context_the_end_is_left() -> None:
    life = long_group("truncate")
    (plan,) = life.plans
    assert sorted(zip(plan.rows.sequence, plan.rows.context, plan.rows.skip, strict=True)) == [
        (0, 0, 16),
        (0, 1, 0),
        (1, 0, 0),
    ]
    assert (plan.loss_tokens, set(plan.rows.loss_weight)) == (39, {1 / 39})
    plan.check()


def test_loss_that_nothing_predicts_any_more_is_not_counted() -> None:
    every = (Span(start=1, end=5), Span(start=16, end=17), Span(start=17, end=20))
    life = long_group("truncate", loss_spans=every)
    # 16 is the first that is left.
    assert life.plans[0].loss_tokens == 3 + 9
    # Nothing of the context is left that carries loss: as if it were not there.
    gone = long_group("truncate", loss_spans=every[:2])
    assert (gone.plans[0].loss_tokens, gone.plans[0].rows.skip) == (9, ())


def test_of_a_sequence_of_which_nothing_is_left_the_reward_counts_alone() -> None:
    run = {"batch": {"dp": 1, "token_budget": BUDGET, "overlong": "drop"}, "engine": {"max_context": BUDGET}}
    life = Life(run=run, behaviour={"max_tokens": 8})
    long = member(0, 1.0, tokens=80, generated=30)
    life.tell(graded(life.roll_out(long, member(1, 0.0)), 0))
    (plan,) = life.plans
    assert (plan.loss_tokens, plan.rows.sequence) == (4, (1,))
    nothing = Life(run=run, behaviour={"max_tokens": 8})
    nothing.tell(graded(nothing.roll_out(long, member(1, 0.0, tokens=90)), 0))
    assert nothing.end() == "no_loss"


def test_a_context_whose_spans_are_in_the_payload_counts_whole_and_is_never_cut() -> None:
    run = {"batch": {"dp": 1, "token_budget": 100, "overlong": "truncate"}, "engine": {"max_context": 100}}
    for tokens, planned in ((80, [(0, 0), (1, 0)]), (180, [(1, 0)])):
        life = Life(run=run, behaviour={"max_tokens": 8}, penalties=PENALTIES)
        (context,) = member(0, 1.0, tokens=tokens, generated=30).contexts
        left = context.model_copy(update={"loss_spans": (), "spilled": 30})
        fact = member(0, 1.0).model_copy(update={"contexts": (left,)})
        life.tell(graded(life.roll_out(fact, member(1, 0.0)), 0))
        (plan,) = life.plans
        assert sorted(zip(plan.rows.sequence, plan.rows.context, strict=True)) == planned
        assert plan.loss_tokens == 4 + 30 * (len(planned) - 1)
        plan.check()


def image(start: int, name: str = "a") -> ImageItem:
    return ImageItem(digest=name * 64, bytes=9, height=56, width=56, patches=16, start=start, end=start + 4)


def test_every_image_of_a_micro_batch_number_has_one_encoder() -> None:
    # The first of 80 tokens is cut away, whole; of the next the end is left.
    life = long_group("truncate", images=(image(2, "c"), image(14), image(40, "b")))
    (plan,) = life.plans
    assert plan.images is not None
    assert plan.images.digest == ("a" * 64, "b" * 64)
    assert plan.images.encoder == (0, 0)
    assert long_group("truncate").plans[0].images is None


def plan_with(**columns: Any) -> Plan:
    """Of two rows on cp 2, of 80 and 20 tokens, in micro-batches of their own; the second one's shows an image."""
    plan = long_group("truncate").plans[0]
    rows = {"sequence": (0, 0), "context": (0, 1), "dp": (0, 0), "microbatch": (0, 1), "advantage": (1, 1), "loss_weight": (1 / 35,) * 2, "skip": (10, 0)}  # fmt: skip
    first, *others = plan.sequences
    contexts = (first.contexts[0], first.contexts[1].model_copy(update={"images": (image(3),)}))
    whole: dict[str, Any] = {
        **plan.model_dump(),
        "cp": 2,
        "token_budget": 100,
        "cp_sizes": (2, 1),
        "microbatches": 2,
        "loss_tokens": 35,
        "sequences": [first.model_copy(update={"contexts": contexts}), *others],
        "images": {"microbatch": (1,), "digest": ("a" * 64,), "encoder": (1,)},
        **{name: value for name, value in columns.items() if name not in PlanRows.model_fields},
    }
    named = {name: value for name, value in columns.items() if name in PlanRows.model_fields}
    return Plan.model_validate({**whole, "rows": {**rows, **named}})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"cp_sizes": (2,)}, "1 cp_sizes for 2 micro-batches"),
        ({"cp": 4, "cp_sizes": (4, 3)}, "micro-batch 1 has context-parallel size 3, no divisor of cp 4"),
        ({"cp_sizes": (2, 0)}, "size 0, no divisor"),
        ({"group": (0, 2)}, "row 1 sits in pack 2 of micro-batch 1, which has 2"),
        ({"group": (1, 0)}, "row 0 sits in pack 1 of micro-batch 0, which has 1"),
        ({"group": (0, -1)}, "pack -1"),
        ({"cp_sizes": (1, 1)}, r"micro-batch \(0, 0\) pack 0 holds 70 tokens, budget 50"),
        ({"skip": (80, 0)}, "row 0 is without its first 80 tokens of 80: at least one is left"),
        ({"skip": (-1, 0)}, "row 0 is without its first -1"),
        ({"skip": (50, 0)}, "34 trained tokens, loss_tokens is 35"),
        ({"skip": (0,)}, "unequal length"),
        ({"images": None}, "image a+ of micro-batch 1 has no encoder"),
        ({"images": {"microbatch": (1, 1), "digest": ("a" * 64, "b" * 64), "encoder": (0, 0)}}, "image b+ of micro-batch 1 is shown by no row"),
        ({"images": {"microbatch": (0,), "digest": ("a" * 64,), "encoder": (0,)}}, "image a+ of micro-batch 0 is shown by no row"),
        ({"images": {"microbatch": (1, 1), "digest": ("a" * 64,) * 2, "encoder": (0, 1)}}, "two encoders"),
        ({"images": {"microbatch": (1,), "digest": ("a" * 64,), "encoder": (2,)}}, "rank 2 is to encode an image, there are 2"),
        ({"images": {"microbatch": (1,), "digest": ("a" * 64,), "encoder": ()}}, "unequal length"),
        ({"changes": {"row": (0,), "start": (50,), "end": (60,), "multiply": (1,), "add": (0,), "keep": (True,)}, "skip": (50, 0)}, "not after token 51"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(columns: dict[str, Any], said: str) -> None:
    plan_with().check()
    with pytest.raises(ValueError, match=said):
        plan_with(**columns).check()


def test_a_context_whose_spans_are_in_the_payload_may_not_be_cut_in_a_plan() -> None:
    plan = plan_with()
    spilled = plan.sequences[0].contexts[0].model_copy(update={"loss_spans": (), "spilled": 30})
    first = plan.sequences[0].model_copy(update={"contexts": (spilled, *plan.sequences[0].contexts[1:])})
    with pytest.raises(ValueError, match="without its first 10 tokens of 80: its spans are in the payload"):
        plan.model_copy(update={"sequences": (first, *plan.sequences[1:])}).check()


def test_what_another_run_begins_with_has_its_images_too() -> None:
    life = Life(groups=2)
    shows = (
        member(0, 1.0, tokens=50)
        .contexts[0]
        .model_copy(update={"images": (image(3), image(9), image(20, "b"))})
    )
    fact = member(0, 1.0).model_copy(update={"contexts": (shows,)})
    life.tell(graded(life.roll_out(fact, member(1, 0.0)), 0))
    left = Leftovers("r")
    for each in life.log:
        left.fold(each)
    found = entrance(left, "other", life.decisions)
    images = [(old, new) for old, new in found.copies if "/images/" in old]
    assert images == [(f"runs/r/images/{d * 64}", f"runs/other/images/{d * 64}") for d in "ab"]
    assert len(found.copies) == 4
    smaller = life.decisions.model_copy(update={"vision": Vision(patch=16)})
    with pytest.raises(NotInheritable, match=r"another engine\.vision"):
        entrance(left, "other", smaller)
