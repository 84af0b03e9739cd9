"""Windows against vectors written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.batch.layouts import Segment
from pipeline.batch.windows import (
    PACKED,
    Window,
    estimate,
    meta,
    pack,
    plan_window,
    shapes,
    with_offsets,
    with_segments,
)
from pipeline.batch.windows_rows import parts_of
from schemas.payload import Span
from schemas.plan import Plan
from tests.window_parts import Columns, context, fetch, key_of, packed, plan_of, sequence, sidecar_of, sized


def columns_of(tokens: list[int], mask: list[int], logprobs: list[float], versions: list[int]) -> Columns:
    return {
        "tokens": np.array(tokens, np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.array(logprobs, np.float32),
        "policy_version": np.array(versions, np.int32),
    }


# Two sequences; the second has two contexts, of which only the second, at payload row 2, is in this micro-batch.
FIRST = columns_of([10, 11, 12, 13, 14], [0, 0, 1, 1, 0], [0, 0, -0.5, -0.25, 0], [0, 0, 1, 2, 0])
SECOND = columns_of([7, 8, 20, 21, 22], [0, 1, 0, 1, 1], [0, -9, 0, -1, -2], [0, 9, 0, 3, 3])
OBJECTS = {key_of("s-0"): FIRST, key_of("s-1"): SECOND}
ROWS = [(0, 0, 0, 1, 2.0, 0.25), (1, 0, 1, 0, 1.0, 0.25), (1, 1, 0, 1, -1.0, 0.125)]
PLAN = plan_of(
    [
        sequence("s-0", [context(0, [0, 0, 1, 1, 0])]),
        sequence("s-1", [context(0, [0, 1]), context(2, [0, 1, 1], "subagent")]),
    ],
    ROWS,
)
DTYPES = {
    **PACKED,
    "cu_seqlens": "int32",
    "cu_seqlens_padded": "int32",
    "max_seqlen": "int32",
    "routed_experts": "uint16",
    "candidates.offsets": "int64",
    "candidates.ids": "int32",
}


def same(got: Columns, expected: dict[str, Any]) -> None:
    assert set(got) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], np.array(values, DTYPES[name]), err_msg=name)
        assert got[name].dtype == DTYPES[name], name


def test_the_golden_window() -> None:
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
        "cu_seqlens_padded": [0, 5, 8],
        "max_seqlen": 5,
    }
    same(packed(plan_window(PLAN, 0, 1), OBJECTS), expected)


def cut(plan: Plan, **changed: Any) -> Plan:
    return plan.model_copy(update=changed)


def of_rows(plan: Plan, **changed: Any) -> Plan:
    return cut(plan, rows=plan.rows.model_copy(update=changed))


def test_the_golden_windows_of_two_context_parallel_ranks() -> None:
    """Both sequences are padded to 8 and 4: chunks of 2 and 1; rank 0 has the first and the last of each."""
    plan = cut(PLAN, cp=2, layout="megatron")
    whole = {"cu_seqlens": [0, 5, 8], "cu_seqlens_padded": [0, 8, 12], "max_seqlen": 8}
    same(
        packed(plan_window(plan, 0, 1, 0), OBJECTS),
        {
            "tokens": [10, 11, 0, 0, 20, 0],
            "labels": [11, 12, 0, 0, 21, 0],
            "position_ids": [0, 1, 6, 7, 0, 3],
            "loss_mask": [0, 1, 0, 0, 1, 0],
            "logprobs": [0, -0.5, 0, 0, -1, 0],
            "advantages": [0, 2, 0, 0, -1, 0],
            "loss_weights": [0, 0.25, 0, 0, 0.125, 0],
            "policy_version": [0, 1, 0, 0, 3, 0],
            **whole,
        },
    )
    same(
        packed(plan_window(plan, 0, 1, 1), OBJECTS),
        {
            "tokens": [12, 13, 14, 0, 21, 22],
            "labels": [13, 14, 0, 0, 22, 0],
            "position_ids": [2, 3, 4, 5, 1, 2],
            "loss_mask": [1, 0, 0, 0, 1, 0],
            "logprobs": [-0.25, 0, 0, 0, -2, 0],
            "advantages": [2, 0, 0, 0, -1, 0],
            "loss_weights": [0.25, 0, 0, 0, 0.125, 0],
            "policy_version": [2, 0, 0, 0, 3, 0],
            **whole,
        },
    )


def test_a_dummy_sequence_and_a_context_without_its_beginning() -> None:
    """Of the first context the first two tokens are left out, and with them the loss of token 2, which nothing predicts."""
    plan = of_rows(cut(PLAN, cp=2, layout="ulysses"), skip=(2, 0, 1))
    got = [packed(plan_window(plan, 0, 1, rank), OBJECTS) for rank in range(2)]
    assert [each["tokens"].tolist() for each in got] == [[12, 13, 14], [21, 22, 0]]
    assert [each["labels"].tolist() for each in got] == [[13, 14, 0], [22, 0, 0]]
    assert [each["loss_mask"].tolist() for each in got] == [[1, 0, 0], [1, 0, 0]]
    assert [each["position_ids"].tolist() for each in got] == [[0, 1, 2], [0, 1, 0]]
    assert got[0]["cu_seqlens"].tolist() == [0, 3, 5, 5]
    assert got[0]["cu_seqlens_padded"].tolist() == [0, 3, 5, 6]


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
    objects = OBJECTS | {key_of("s-0"): first, sidecar_of("s-0"): sidecar}
    got = packed(plan_window(plan, 0, 1), objects)
    assert got["advantages"].tolist() == [0, 30.5, 40, 0, 0, -7, -4, 0]
    assert got["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
    assert got["loss_weights"].tolist() == [0, 0.25, 0.25, 0, 0, 0.125, 0.125, 0]
    assert got["logprobs"].tolist() == [0, -0.5, -0.25, -1, 0, -1, -2, 0]
    # A rank reads only the advantages of its own loss tokens.
    window = plan_window(cut(plan, cp=2, layout="megatron"), 0, 1, 1)
    assert [(r.header.key, r.spans) for r in window.reads if r.columns == ("advantages",)] == [
        (sidecar_of("s-0"), {"advantages": (Span(start=1, end=3),)})
    ]
    columns = fetch(plan_window(plan, 0, 1).reads, objects)
    short = [
        each | {"advantages": each["advantages"][:2]} if "advantages" in each else each for each in columns
    ]
    with pytest.raises(ValueError, match=r"s-0: column advantages of .* has 2 rows, 3 were asked for"):
        pack(plan_window(plan, 0, 1), short)


def test_a_context_reads_its_own_rows_of_the_sidecar_in_payload_order() -> None:
    contexts = [context(2, [0, 1, 1]), context(0, [0, 1]), context(5, [0, 0]), context(7, [0, 1])]
    plan = plan_of(
        [sequence("s-0", contexts, sidecar=True)],
        [(0, 3, 0, 0, 1, 1), (0, 2, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1), (0, 1, 1, 0, 1, 1)],
    )
    payload, sidecar = plan_window(plan, 0, 0).reads
    # Loss columns from the first to the last loss token, and none of the context without loss.
    assert payload.spans == {
        "tokens": (Span(start=7, end=9), Span(start=5, end=7), Span(start=2, end=5)),
        **dict.fromkeys(
            ("loss_mask", "logprobs", "policy_version"), (Span(start=8, end=9), Span(start=3, end=5))
        ),
    }
    assert sidecar.header.key == sidecar_of("s-0")
    assert sidecar.spans == {"advantages": (Span(start=3, end=4), Span(start=1, end=3))}


def test_a_stage_reads_the_blocks_of_its_layers_and_has_the_arrays_that_it_needs() -> None:
    tokens = 5
    rng = np.random.default_rng(0)
    blocks = {
        "routed_experts.L0-0": rng.integers(0, 250, (tokens, 1, 2), np.uint8),
        "routed_experts.L1-3": rng.integers(0, 250, (tokens, 3, 2), np.uint8),
        "routed_experts.L4-4": rng.integers(0, 999, (tokens, 1, 2), np.uint16),
    }
    whole = np.concatenate([block.astype(np.uint16) for block in blocks.values()], axis=1)
    plan = plan_of(
        [sequence("s-0", [context(0, [0, 0, 1, 1, 0])], columns=FIRST | blocks)], [(0, 0, 0, 0, 1, 1)]
    )
    objects = {key_of("s-0"): FIRST | blocks}

    def window(pp: int, stages: int = 3, layers: tuple[int, ...] = ()) -> Window:
        return plan_window(plan, 0, 0, 0, pp, stages=stages, pp_layers=layers, columns=("routed_experts",))

    bounds = {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "position_ids"}
    loss = {"labels", "loss_mask", "logprobs", "advantages", "loss_weights", "policy_version"}
    for pp, names in enumerate([bounds | {"tokens"}, bounds, bounds | loss]):
        got = packed(window(pp), objects)
        assert set(got) == names | {"routed_experts"}
        np.testing.assert_array_equal(got["routed_experts"], whole[:, 2 * pp : 2 * pp + 2])
        assert got["routed_experts"].dtype == np.uint16
    assert [sorted({c for r in window(pp).reads for c in r.columns if c[0] == "r"}) for pp in range(3)] == [
        ["routed_experts.L0-0", "routed_experts.L1-3"],
        ["routed_experts.L1-3"],
        ["routed_experts.L4-4"],
    ]
    # The last stage reads no token that it does not predict.
    assert window(2).reads[0].spans["tokens"] == (Span(start=1, end=5),)
    assert "routed_experts" not in shapes(window(1, layers=(2, 0, 3)))
    assert window(1, layers=(2, 0, 3)).reads == ()
    with pytest.raises(ValueError, match="the policy routes 5 layers"):
        window(0, layers=(2, 2, 2))
    odd = {"routed_experts.L1-1": blocks["routed_experts.L0-0"]}
    plan = plan_of([sequence("s-0", [context(0, [0])], columns=odd)], [(0, 0, 0, 0, 1, 1)])
    with pytest.raises(ValueError, match="does not make up layers from 0 on"):
        window(0)


def test_candidates_are_of_the_labels_and_read_in_two_steps() -> None:
    """Three loss tokens with 2, 0 and 3 candidates; the context of this window has the last two of them."""
    more = {
        "candidates.offsets": np.array([0, 2, 2, 5], np.int64),
        "candidates.ids": np.array([1, 2, 3, 4, 5], np.int32),
    }
    plan = plan_of(
        [
            sequence("s-0", [context(0, [0, 0, 1, 1, 0])]),
            sequence("s-1", [context(0, [0, 1]), context(2, [0, 1, 1], "subagent")], columns=SECOND | more),
        ],
        ROWS,
    )
    objects = {key_of("s-0"): FIRST, key_of("s-1"): SECOND | more}
    window = plan_window(plan, 0, 1, columns=("candidates",))
    (offsets,) = window.offset_reads
    assert offsets.spans == {"candidates.offsets": (Span(start=1, end=4),)}
    assert "candidates.ids" not in shapes(window)
    with pytest.raises(ValueError, match="offsets first"):
        _ = window.jobs
    assert estimate(window) == estimate(sized(window, objects)) + 4 * (
        4 - 3
    )  # 2 tokens of 5/3 each, rounded up
    got = packed(window, objects)
    assert got["candidates.offsets"].tolist() == [0, 0, 0, 0, 0, 0, 0, 3, 3]
    assert got["candidates.ids"].tolist() == [3, 4, 5]
    with pytest.raises(
        ValueError, match=r"s-1, context subagent: its candidate offsets do not ascend within the 5 ids"
    ):
        with_offsets(window, [{"candidates.offsets": np.array([2, 9, 5])}])
    # Absent where no payload of the pack has any, and at the stages that have no labels.
    assert "candidates.offsets" not in shapes(plan_window(PLAN, 0, 1, columns=("candidates",)))
    assert "candidates.offsets" not in shapes(plan_window(plan, 0, 1, stages=2, columns=("candidates",)))


def test_spans_that_the_plan_left_to_the_payload() -> None:
    left = context(2, [0, 1, 1], "subagent").model_copy(update={"loss_spans": (), "spilled": 2})
    segments = np.array([[0, 2, 2, 3, 0], [2, 3, 0, 0, 1], [3, 4, 2, 3, 1], [4, 5, 2, 3, 1]], np.int32)
    second = SECOND | {"segments": segments}
    plan = plan_of([PLAN.sequences[0], sequence("s-1", [context(0, [0, 1]), left], columns=second)], ROWS)
    window = plan_window(plan, 0, 1)
    (read,) = window.segment_reads
    assert read.spans == {"segments": (Span(start=0, end=4),)}
    with pytest.raises(ValueError, match="s-1, context subagent: its loss spans are in the payload"):
        _ = window.jobs
    same(packed(window, OBJECTS | {key_of("s-1"): second}), packed(plan_window(PLAN, 0, 1), OBJECTS))
    with pytest.raises(ValueError, match="its spans are of 1 loss tokens, the plan says 2"):
        with_segments(window, [{"segments": segments[:-1]}])
    with pytest.raises(ValueError, match="has no loss span, the plan says 2"):
        with_segments(window, [{"segments": segments[:-2]}])
    # Who has none of the context's labels needs no spans.
    assert plan_window(plan, 0, 1, 0, 0, stages=2).segment_reads == ()
    assert plan_window(cut(plan, cp=2, layout="contiguous"), 0, 1, 0).segment_reads == ()


def test_rows_of_sequences_that_a_batch_goes_on_without_keep_their_place() -> None:
    window = plan_window(PLAN, 0, 1, without=frozenset({"s-0"}), revision=3)
    assert [read.header.key for read in window.reads] == [key_of("s-1")]
    got = packed(window, OBJECTS)
    assert got["tokens"].tolist() == [0, 0, 0, 0, 0, 20, 21, 22]
    assert got["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    assert got["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert got["cu_seqlens"].tolist() == [0, 5, 8]
    assert shapes(window) == shapes(plan_window(PLAN, 0, 1))
    assert meta(window) == {
        "run": "r", "step": 3, "microbatch": 1, "dp": 0, "cp": 0, "pp": 0, "layout": "contiguous", "tp": 1, "cp_size": 1,
        "cp_rank": 0, "group": 0, "revision": 3, "sequences": ["s-0", "s-1"],
    }  # fmt: skip


def test_a_micro_batch_of_a_smaller_context_parallel_size_has_several_packs() -> None:
    plan = of_rows(cut(PLAN, cp=4, cp_sizes=(4, 2)), group=(1, 0, 0))
    places = [plan_window(plan, 0, 1, cp) for cp in range(4)]
    assert [(w.group, w.cp_rank, [row.sequence for row in w.rows]) for w in places] == [
        (0, 0, ["s-1"]),
        (0, 1, ["s-1"]),
        (1, 0, ["s-0"]),
        (1, 1, ["s-0"]),
    ]
    assert [packed(w, OBJECTS)["tokens"].tolist() for w in places] == [
        [20, 21],
        [22, 0],
        [10, 11, 12],
        [13, 14, 0],
    ]
    assert {w.cp_size for w in places} == {2}
    with pytest.raises(ValueError, match="context-parallel size 3, no divisor of 4"):
        plan_window(cut(plan, cp_sizes=(4, 3)), 0, 1)


def test_a_long_part_is_cut_where_checksums_are() -> None:
    """A context at payload row 5, of which two tokens are left out: its first token is payload row 7."""
    row = plan_window(PLAN, 0, 1).rows[0]
    row = replace(row, context=context(5, [0] * 1000), skip=2, spans=None)
    parts = list(parts_of(row, Segment(0, 10, 1000, 40), 256))
    # The rows that the payload's checksums begin at, as positions: multiples of GRANULE_ROWS, less 7.
    assert [(part.start, part.end, part.dst) for part in parts] == [
        (10, 249, 40),
        (249, 505, 279),
        (505, 761, 535),
        (761, 998, 791),
    ]
    assert list(parts_of(row, Segment(0, 998, 1000, 0), 256)) == []
    assert list(parts_of(replace(row, blank=True), Segment(0, 0, 998, 0), 256)) == []


@pytest.mark.parametrize("layout", ["contiguous", "megatron", "slime", "ulysses"])
def test_a_micro_batch_may_be_empty(layout: str) -> None:
    window = plan_window(cut(PLAN, cp=2, layout=layout), 1, 1, 1)
    got = pack(window, [])
    assert window.reads == ()
    assert got["tokens"].shape == (0,)
    assert got["cu_seqlens"].tolist() == got["cu_seqlens_padded"].tolist() == [0]
    assert int(got["max_seqlen"]) == 0


@pytest.mark.parametrize(("dp", "microbatch"), [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_coordinates_outside_the_plan(dp: int, microbatch: int) -> None:
    with pytest.raises(ValueError, match=f"no micro-batch {microbatch} of rank {dp}"):
        plan_window(PLAN, dp, microbatch)
    with pytest.raises(ValueError, match="no rank 1 of stage 0"):
        plan_window(PLAN, 0, 0, 1)
    with pytest.raises(ValueError, match="no rank 0 of stage 1"):
        plan_window(PLAN, 0, 0, 0, 1)


def test_columns_that_disagree_with_the_plan() -> None:
    window = plan_window(PLAN, 0, 1)
    first, second = fetch(window.reads, OBJECTS)
    with pytest.raises(
        ValueError, match=r"s-0: column tokens of .*s-0-a1.safetensors has 4 rows, 5 were asked for"
    ):
        pack(window, [first | {"tokens": first["tokens"][1:]}, second])
    with pytest.raises(
        ValueError, match=r"s-1, context subagent: on tokens \[1, 3\) the payload's loss mask has 1"
    ):
        pack(window, [first, second | {"loss_mask": np.array([0, 1], np.uint8)}])
    with pytest.raises(ValueError, match="window of 2 reads was given the columns of 3"):
        pack(window, [first, second, second])
    with pytest.raises(ValueError, match="first token carries loss"):
        plan_window(plan_of([sequence("s-0", [context(0, [1, 0])])], [(0, 0, 0, 0, 1, 1)]), 0, 0)
