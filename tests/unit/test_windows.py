"""Windows against vectors written by hand, and against a slow reference on random plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch.windows import PACKED, READ, READ_SIDECAR, pack, plan_window, shapes, split
from schemas.payload import ContextMeta, Span
from schemas.plan import Plan, PlanSequence
from tests.window_parts import Change, context, plan_of, sequence

Columns = dict[str, np.ndarray[Any, Any]]


def columns_of(tokens: list[int], mask: list[int], logprobs: list[float], versions: list[int]) -> Columns:
    return {
        "tokens": np.array(tokens, np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.array(logprobs, np.float32),
        "policy_version": np.array(versions, np.int32),
    }


# Two sequences; the second has two contexts, of which only the second, at payload row 2, is in this micro-batch.
FIRST = columns_of([10, 11, 12, 13, 14], [0, 0, 1, 1, 0], [0, 0, -0.5, -0.25, 0], [0, 0, 1, 2, 0])
SECOND = columns_of([20, 21, 22], [0, 1, 1], [0, -1, -2], [0, 3, 3])
PLAN = plan_of(
    [
        sequence("s-0", [context(0, [0, 0, 1, 1, 0])]),
        sequence("s-1", [context(0, [0, 1]), context(2, [0, 1, 1], "subagent")]),
    ],
    [(0, 0, 0, 1, 2.0, 0.25), (1, 0, 1, 0, 1.0, 0.25), (1, 1, 0, 1, -1.0, 0.125)],
)


def test_the_golden_window() -> None:
    got = pack(plan_window(PLAN, 0, 1), [FIRST, SECOND])
    expected = {
        "tokens": [10, 11, 12, 13, 14, 20, 21, 22],
        "labels": [11, 12, 13, 14, 0, 21, 22, 0],
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2],
        "loss_mask": [0, 1, 1, 0, 0, 1, 1, 0],
        "logprobs": [0, -0.5, -0.25, 0, 0, -1, -2, 0],
        "advantages": [0, 2, 2, 0, 0, -1, -1, 0],
        "loss_weights": [0, 0.25, 0.25, 0, 0, 0.125, 0.125, 0],
        "policy_version": [0, 1, 2, 0, 0, 3, 3, 0],
        "cu_seqlens": [0, 5, 8],
        "max_seqlen": 5,
    }
    dtypes = {**PACKED, "cu_seqlens": "int32", "max_seqlen": "int32"}
    assert set(got) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], np.array(values, dtypes[name]), err_msg=name)
        assert got[name].dtype == dtypes[name]


def test_the_golden_window_with_a_sidecar_a_scale_and_changes() -> None:
    """The first sequence has a sidecar, and its token 4 is untrained; of the second token 1 is set to -7."""
    first = columns_of([10, 11, 12, 13, 14], [0, 0, 1, 1, 1], [0, 0, -0.5, -0.25, -1], [0, 0, 1, 2, 2])
    plan = plan_of(
        [
            sequence("s-0", [context(0, [0, 0, 1, 1, 1])], sidecar=True),
            sequence("s-1", [context(0, [0, 1]), context(2, [0, 1, 1], "subagent")]),
        ],
        [(0, 0, 0, 1, 99.0, 0.25), (1, 0, 1, 0, 1.0, 0.25), (1, 1, 0, 1, -1.0, 0.125)],
        [(0, 2, 3, 3.0, 0.5, True), (0, 4, 5, 1.0, 0.0, False), (2, 1, 2, 0.0, -7.0, True)],
        scale=(2.0, 1.0, 4.0),
    )
    sidecar = {"advantages": np.array([10, 20, 30], np.float32)}
    got = pack(plan_window(plan, 0, 1), [first | sidecar, SECOND])
    assert got["advantages"].tolist() == [0, 30.5, 40, 0, 0, -7, -4, 0]
    assert got["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
    assert got["loss_weights"].tolist() == [0, 0.25, 0.25, 0, 0, 0.125, 0.125, 0]
    assert got["logprobs"].tolist() == [0, -0.5, -0.25, -1, 0, -1, -2, 0]
    with pytest.raises(
        ValueError, match=r"s-0, context main: column advantages has shape \(2,\), the plan says \(3,\)"
    ):
        pack(plan_window(plan, 0, 1), [first | {"advantages": np.zeros(2, np.float32)}, SECOND])


def test_a_context_reads_its_own_rows_of_the_sidecar() -> None:
    contexts = [context(0, [0, 1]), context(2, [0, 0]), context(4, [0, 1, 1]), context(7, [0, 1])]
    plan = plan_of(
        [sequence("s-0", contexts, sidecar=True)],
        [(0, 3, 0, 0, 1, 1), (0, 1, 0, 0, 1, 1), (0, 0, 1, 0, 1, 1), (0, 2, 0, 0, 1, 1)],
    )
    payload, sidecar = plan_window(plan, 0, 0).reads
    assert (payload.columns, sidecar.columns) == (READ, READ_SIDECAR)
    assert (sidecar.header.key, sidecar.rows) == (
        "runs/r/payloads/s/s-0-a1.advantages.0.safetensors",
        (0, 1, 2),
    )
    assert sidecar.spans == (Span(start=3, end=4), Span(start=1, end=1), Span(start=1, end=3))


def test_rows_of_a_sidecar_are_in_payload_order_however_the_contexts_are_listed() -> None:
    plan = plan_of(
        [sequence("s-0", [context(2, [0, 1, 1]), context(0, [0, 1])], sidecar=True)],
        [(0, 0, 0, 0, 1, 1), (0, 1, 0, 0, 1, 1)],
    )
    _, sidecar = plan_window(plan, 0, 0).reads
    assert sidecar.spans == (Span(start=1, end=3), Span(start=0, end=1))


def test_the_golden_reads() -> None:
    window = plan_window(PLAN, 0, 1)
    assert [(read.sequence, read.header.key, read.spans, read.rows) for read in window.reads] == [
        (0, "runs/r/payloads/s/s-0-a1.safetensors", (Span(start=0, end=5),), (0,)),
        (1, "runs/r/payloads/s/s-1-a1.safetensors", (Span(start=2, end=5),), (1,)),
    ]
    assert [(row.sequence, row.context.label, row.start, row.end) for row in window.rows] == [
        ("s-0", "main", 0, 5),
        ("s-1", "subagent", 5, 8),
    ]


def test_contexts_of_one_payload_are_one_read_and_come_back_apart() -> None:
    contexts = [context(0, [0, 1]), context(2, [0, 1, 1]), context(5, [0])]
    plan = plan_of([sequence("s-0", contexts)], [(0, 2, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1), (0, 1, 1, 1, 1, 1)])
    window = plan_window(plan, 0, 0)
    (read,) = window.reads
    assert read.spans == (Span(start=5, end=6), Span(start=0, end=2))
    rows = split(window, [{"tokens": np.array([5, 0, 1])}])
    assert [list(row["tokens"]) for row in rows] == [[5], [0, 1]]


def test_a_micro_batch_may_be_empty() -> None:
    window = plan_window(PLAN, 1, 1)
    got = pack(window, [])
    assert window.reads == ()
    assert got["tokens"].shape == (0,)
    assert list(got["cu_seqlens"]) == [0]
    assert int(got["max_seqlen"]) == 0


@pytest.mark.parametrize(("dp", "microbatch"), [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_coordinates_outside_the_plan(dp: int, microbatch: int) -> None:
    with pytest.raises(ValueError, match=f"no micro-batch {microbatch} of rank {dp}"):
        plan_window(PLAN, dp, microbatch)


def test_context_parallel_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="cp 2"):
        plan_window(PLAN.model_copy(update={"cp": 2}), 0, 0)


def test_columns_that_disagree_with_the_plan() -> None:
    with pytest.raises(ValueError, match=r"s-0, context main: column tokens has shape \(4,\)"):
        pack(plan_window(PLAN, 0, 1), [FIRST | {"tokens": FIRST["tokens"][1:]}, SECOND])
    with pytest.raises(ValueError, match="s-1, context subagent: the payload's loss mask has 1 tokens"):
        pack(plan_window(PLAN, 0, 1), [FIRST, SECOND | {"loss_mask": np.array([0, 0, 1], np.uint8)}])
    with pytest.raises(ValueError, match="2 rows was given columns of 1"):
        pack(plan_window(PLAN, 0, 1), [FIRST])
    plan = plan_of([sequence("s-0", [context(0, [1, 0])])], [(0, 0, 0, 0, 1, 1)])
    with pytest.raises(ValueError, match="first token carries loss"):
        pack(plan_window(plan, 0, 0), [columns_of([1, 2], [1, 0], [0, 0], [0, 0])])


_OPS = [(1.0, 0.0, True), (0.5, 0.0, True), (0.0, -3.0, True), (1.0, -2.0, True), (1.0, 0.0, False)]
"""What tokens are changed by: (multiply, add, keep)."""


@st.composite
def plans(
    draw: st.DrawFn,
) -> tuple[Plan, dict[tuple[int, int], Columns], dict[tuple[int, int], list[float | None]]]:
    """A plan with every context somewhere, every context's columns, and the advantage of each of its tokens, None where it is
    not trained."""
    sequences: list[PlanSequence] = []
    columns: dict[tuple[int, int], Columns] = {}
    expected: dict[tuple[int, int], list[float | None]] = {}
    rows: list[tuple[int, int, int, int, float, float]] = []
    changes: list[Change] = []
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    small = st.integers(-4, 4).map(float)
    scaled, changed = draw(st.booleans()), draw(st.booleans())
    scale: list[float] = []
    for s in range(draw(st.integers(1, 4))):
        contexts: list[ContextMeta] = []
        offset = 0
        sidecar = draw(st.booleans())
        for c, length in enumerate(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))):
            mask = [0, *rng.integers(0, 2, length - 1).tolist()]
            contexts.append(context(offset, mask))
            offset += length
            columns[s, c] = {
                "tokens": rng.integers(1, 1000, length, np.int32),
                "loss_mask": np.array(mask, np.uint8),
                "logprobs": rng.random(length, np.float32) * np.array(mask, np.float32),
                "policy_version": rng.integers(0, 5, length, np.int32),
            }
            row = (
                s,
                c,
                draw(st.integers(0, 1)),
                draw(st.integers(0, 1)),
                draw(small),
                draw(st.sampled_from([1.0, 2.0])),
            )
            scale.append(draw(small) if scaled else 1.0)
            plain = (
                rng.integers(-9, 9, length).astype(np.float32)
                if sidecar
                else np.full(length, row[4], np.float32)
            )
            if sidecar:
                columns[s, c]["advantages"] = plain[np.array(mask, np.bool_)]
            values: list[float | None] = []
            last = None
            for t, bit in enumerate(mask):
                op = _OPS[rng.integers(len(_OPS))] if bit and changed and rng.random() < 0.6 else None
                if op is None:
                    values.append(float(plain[t]) * scale[-1] if bit else None)
                else:
                    values.append(op[0] * float(plain[t]) + op[1] if op[2] else None)
                    if op == last and rng.random() < 0.7:  # a span of several tokens, or the next one
                        changes[-1] = (*changes[-1][:2], t + 1, *op)
                    else:
                        changes.append((len(rows), t, t + 1, *op))
                last = op
            expected[s, c] = values
            rows.append(row)
        sequences.append(sequence(f"s-{s}", contexts, sidecar))
    return plan_of(sequences, rows, changes, tuple(scale) if scaled else ()), columns, expected


@given(plans())
def test_every_loss_token_is_in_exactly_one_window_at_the_row_before_it(
    made: tuple[Plan, dict[tuple[int, int], Columns], dict[tuple[int, int], list[float | None]]],
) -> None:
    plan, columns, expected = made
    weights = 0.0
    seen: list[tuple[str, int]] = []
    for dp in range(plan.dp):
        for microbatch in range(plan.microbatches):
            window = plan_window(plan, dp, microbatch)
            # Through reads and split, as the packer does it: a payload is its contexts' columns, concatenated.
            got = []
            for read in window.reads:
                whole = {
                    name: np.concatenate(
                        [
                            columns[read.sequence, c][name]
                            for c in range(len(plan.sequences[read.sequence].contexts))
                        ]
                    )
                    for name in read.columns
                }
                got.append(
                    {
                        name: np.concatenate([whole[name][s.start : s.end] for s in read.spans])
                        for name in read.columns
                    }
                )
            packed = pack(window, split(window, got))
            for name, (dtype, shape) in shapes(window).items():
                assert (packed[name].dtype, packed[name].shape) == (np.dtype(dtype), shape)
            bounds = packed["cu_seqlens"]
            assert len(bounds) == len(window.rows) + 1
            for b, row in enumerate(window.rows):
                home = (plan.rows.sequence[row.index], plan.rows.context[row.index])
                original, length = columns[home], row.context.tokens
                seen.append((row.sequence, home[1]))
                for t in range(length):
                    at = int(bounds[b]) + t
                    last = t == length - 1
                    advantage = None if last else expected[home][t + 1]
                    mask = advantage is not None
                    assert packed["tokens"][at] == original["tokens"][t]
                    assert packed["position_ids"][at] == t
                    assert packed["labels"][at] == (0 if last else original["tokens"][t + 1])
                    assert packed["loss_mask"][at] == mask
                    assert packed["logprobs"][at] == (0 if last else original["logprobs"][t + 1])
                    assert packed["policy_version"][at] == (0 if last else original["policy_version"][t + 1])
                    assert packed["advantages"][at] == (advantage or 0)
                    assert packed["loss_weights"][at] == mask * np.float32(plan.rows.loss_weight[row.index])
            weights += float(packed["loss_weights"].sum())
    assert sorted(seen) == sorted((plan.sequences[s].sequence, c) for s, c in columns)
    trained = sum(value is not None for values in expected.values() for value in values)
    assert plan.loss_tokens == trained
    assert weights == pytest.approx(1 if trained else 0, abs=1e-5)
