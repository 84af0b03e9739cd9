"""Windows of any layout and size, put together again, against packs that are made in one piece from whole contexts."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch import windows_plan, windows_reads
from pipeline.batch.layouts import local_rows
from pipeline.batch.windows import Window, estimate, frame, job_pieces, plan_window, shapes
from tests.window_parts import Columns, fetch, key_of, packed, sidecar_of, sized
from tests.window_plans import LABELS, Made, in_one_piece, plans


def _windows(made: Made, microbatch: int, pp: int, stages: int, layers: tuple[int, ...]) -> list[Window]:
    return [
        plan_window(
            made.plan, 0, microbatch, cp, pp, stages=stages, pp_layers=layers,
            columns=("routed_experts", "candidates"), without=made.without,
        )
        for cp in range(made.plan.cp)
    ]  # fmt: skip


@settings(max_examples=80)
@given(made=plans(), stages=st.integers(1, 3), data=st.data(), small=st.booleans())
def test_the_windows_of_all_ranks_are_the_pack_made_in_one_piece(
    made: Made, stages: int, data: st.DataObject, small: bool
) -> None:
    layers: tuple[int, ...] = ()
    if stages == 2 and data.draw(st.booleans()):
        first = data.draw(st.integers(0, made.layers))
        layers = (first, made.layers - first)
    counts = layers or tuple(made.layers // stages + (i < made.layers % stages) for i in range(stages))
    # Ranges are read apart, or together: the arrays are the same.
    with patch.object(windows_reads, "TOGETHER", 64 if small else 1 << 20):
        for microbatch in range(2):
            for pp in range(stages):
                _put_together(made, microbatch, pp, stages, layers, sum(counts[:pp]), sum(counts[: pp + 1]))


def _put_together(
    made: Made, microbatch: int, pp: int, stages: int, layers: tuple[int, ...], low: int, high: int
) -> None:
    size = made.plan.cp_sizes[microbatch] if made.plan.cp_sizes else made.plan.cp
    windows = _windows(made, microbatch, pp, stages, layers)
    for group in range(made.plan.cp // size):
        mine = windows[group * size : (group + 1) * size]
        whole = in_one_piece(made, microbatch, group, size)
        total = len(whole["tokens"])
        having = {made.rows[r.index]["name"] for r in mine[0].rows}
        # Each array as the whole pack's, and how often each row was written.
        back: Columns = {}
        sets: list[list[int] | None] = [None] * total
        for rank, window in enumerate(mine):
            assert (window.group, window.cp_rank, window.tokens) == (group, rank, total // size)
            got = packed(window, made.objects)
            said = shapes(sized(window, made.objects))
            assert {name: (a.dtype.name, a.shape) for name, a in got.items()} == said
            assert estimate(sized(window, made.objects)) == sum(a.nbytes for a in got.values())
            rows = local_rows(made.plan.layout, np.array(whole["cu_seqlens_padded"]), size, rank)
            for name, values in got.items():
                if name.startswith(("cu_", "max_")):
                    np.testing.assert_array_equal(values, whole[name], err_msg=name)
                elif name == "candidates.offsets":
                    for i, at in enumerate(rows):
                        sets[at] = got["candidates.ids"][values[i] : values[i + 1]].tolist()
                elif name != "candidates.ids":
                    back.setdefault(name, np.full((total, *values.shape[1:]), 77, values.dtype))[rows] = (
                        values
                    )
        expected = (
            {"position_ids"}
            | ({"tokens"} if pp == 0 else set())
            | (set(LABELS) if pp == stages - 1 else set())
        )
        columns = {name: set(made.objects[key_of(name)]) for name in having}
        if high > low and any("routed" in c for names in columns.values() for c in names):
            expected.add("routed_experts")
            wide = any(
                made.objects[key_of(n)][c].dtype == np.uint16
                for n in having
                for c in columns[n]
                if "routed" in c
            )
            assert back["routed_experts"].dtype == (np.uint16 if wide else np.uint8)
        assert set(back) == expected
        for name in expected:
            values = (
                np.array(whole["routing"], np.uint16).reshape(total, made.layers, made.k)[:, low:high]
                if "routed" in name
                else whole[name]
            )
            np.testing.assert_array_equal(
                back[name], np.array(values, back[name].dtype).reshape(back[name].shape), err_msg=name
            )
        if pp == stages - 1 and any("candidates.ids" in names for names in columns.values()):
            assert sets == whole["candidates"]


def _rows_read(made: Made, window: Window) -> dict[str, Counter[tuple[str, int]]]:
    """How often each row of each object is read, by column."""
    found: dict[str, Counter[tuple[str, int]]] = {}
    for read in sized(window, made.objects).reads:
        for name, spans in read.spans.items():
            for span in spans:
                found.setdefault(name, Counter()).update(
                    (read.header.key, t) for t in range(span.start, span.end)
                )
    return found


@settings(max_examples=40)
@given(made=plans())
def test_a_token_is_read_by_the_ranks_that_have_it_and_as_a_halo(made: Made) -> None:
    with patch.object(windows_reads, "TOGETHER", 0):
        for microbatch in range(2):
            for window in _windows(made, microbatch, 0, 1, ()):
                own: Counter[tuple[str, int]] = Counter()
                labels: Counter[tuple[str, int]] = Counter()
                lost: Counter[tuple[str, int]] = Counter()
                for segment in window.segments:
                    if segment.row == len(window.rows) or window.rows[segment.row].sequence in made.without:
                        continue
                    made_row = made.rows[window.rows[segment.row].index]
                    first = made_row["offset"] + made_row["skip"]
                    for t in range(segment.start, min(segment.end, len(made_row["tokens"]))):
                        own[key_of(made_row["name"]), first + t] += 1
                        if t + 1 < len(made_row["tokens"]):
                            labels[key_of(made_row["name"]), first + t + 1] += 1
                for key, t in labels:
                    lost[key, t] += int(made.objects[key]["loss_mask"][t])
                lost += Counter()
                read = _rows_read(made, window)
                assert read.get("tokens", {}) == dict.fromkeys(own | labels, 1)
                for name in read:
                    if name.startswith("routed"):
                        assert read[name] == {at: 1 for at in own if name in made.objects[at[0]]}
                for name in ("loss_mask", "logprobs", "policy_version"):
                    got = read.get(name, Counter())
                    assert set(lost) <= set(got) <= set(labels)
                    assert max(got.values(), default=1) == 1
                    assert bool(got) == bool(lost)
                beside = sum(sum(c.values()) for name, c in read.items() if name == "advantages")
                assert beside == sum(sidecar_of(key.split("/")[-1][:3]) in made.objects for key, _ in lost)


@settings(max_examples=12)
@given(made=plans(longest=900))
def test_long_contexts_are_several_jobs_and_each_row_is_written_once(made: Made) -> None:
    """With parts of at most 128 rows: many of them, cut where checksums are."""
    whole = [packed(window, made.objects) for window in _windows(made, 0, 0, 1, ())]
    with patch.object(windows_plan, "PART_BYTES", 128), patch.object(windows_reads, "TOGETHER", 64):
        for window, expected in zip(_windows(made, 0, 0, 1, ()), whole, strict=True):
            window = sized(window, made.objects)
            written = {name: Counter[int]() for name in expected}
            built = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes(window).items()}
            built |= frame(window)
            for job in window.jobs:
                for name, first, values in job_pieces(window, job, fetch(job.reads, made.objects)):
                    assert (values.dtype, values.flags.c_contiguous) == (built[name].dtype, True)
                    assert name == "candidates.ids" or len(values) <= 128
                    written[name].update(range(first, first + len(values)))
                    built[name][first : first + len(values)] = values
            for name, values in expected.items():
                assert max(written[name].values(), default=1) == 1
                np.testing.assert_array_equal(built[name], values, err_msg=name)
