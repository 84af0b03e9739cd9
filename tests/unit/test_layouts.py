"""Layouts: what they promise, TransformerEngine's published vectors, verl's own functions, and slime's rule derived anew."""

from __future__ import annotations

import json
from math import lcm
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch.layouts import LAYOUTS, local_rows, pack_bounds, padded_length, segments
from schemas.parallel import LayoutName
from tests import peers

GOLDEN = json.loads(peers.GOLDEN.read_text())
NAMES = st.sampled_from(sorted(LAYOUTS))
LENGTHS = st.lists(st.integers(1, 60), max_size=6)
CP = st.sampled_from([1, 2, 3, 4, 8])
TP = st.sampled_from([1, 2, 3])


def test_every_name_of_the_configuration_is_a_layout() -> None:
    assert set(LAYOUTS) == set(get_args(LayoutName))


@given(layout=NAMES, lengths=LENGTHS, cp=CP, tp=TP, fp8=st.booleans())
def test_every_position_is_on_one_rank_and_all_ranks_have_as_many(
    layout: LayoutName, lengths: list[int], cp: int, tp: int, fp8: bool
) -> None:
    fp8 = fp8 and LAYOUTS[layout].fp8
    bounds = pack_bounds(layout, lengths, cp, tp, fp8)
    assert list(bounds.real[: len(lengths)]) == lengths
    assert bounds.real[len(lengths) :] in ((), (0,))
    assert bounds.max_seqlen == max(bounds.padded, default=0)
    assert (bounds.cu.dtype, bounds.cu_padded.dtype) == (np.int32, np.int32)
    assert np.diff(bounds.cu_padded).tolist() == list(bounds.padded)
    assert np.diff(bounds.cu).tolist() == list(bounds.real)
    seen: list[int] = []
    for rank in range(cp):
        rows: list[int] = []
        for row, start, end, dst in segments(layout, bounds, cp, rank):
            assert dst == len(rows)
            assert 0 <= start < end <= bounds.padded[row]
            rows += range(bounds.ends[row] + start, bounds.ends[row] + end)
        assert rows == sorted(rows)
        assert len(rows) == bounds.total // cp
        assert rows == local_rows(layout, bounds, cp, rank).tolist()
        assert rows == local_rows(layout, bounds.cu_padded, cp, rank).tolist()
        seen += rows
    assert sorted(seen) == list(range(bounds.total))


RULES = {
    "contiguous": lambda cp, tp: (cp * tp, 1),
    "megatron": lambda cp, tp: (2 * cp * tp if cp > 1 else tp, 1),
    "verl": lambda cp, tp: (2 * cp * tp if cp > 1 else tp, 1),
    "slime": lambda cp, tp: (2 * cp if cp > 1 else 1, 128 * cp * tp),
    "ulysses": lambda cp, tp: (1, cp),
    "zigzag_pack": lambda cp, tp: (1, 2 * cp * tp if cp > 1 else tp),
    "slime_allgather": lambda cp, tp: (1, 128 * cp * tp),
}


@given(layout=NAMES, lengths=LENGTHS, cp=CP, tp=TP, fp8=st.booleans())
def test_padding_is_less_than_a_multiple(
    layout: LayoutName, lengths: list[int], cp: int, tp: int, fp8: bool
) -> None:
    fp8 = fp8 and LAYOUTS[layout].fp8
    bounds = pack_bounds(layout, lengths, cp, tp, fp8)
    each, whole = RULES[layout](cp, tp)
    if fp8:
        each, whole = lcm(16, each), 128 * each
    padded = [padded_length(layout, n, cp, tp, fp8) for n in lengths]
    assert all(0 <= p - n < each and p % each == 0 for p, n in zip(padded, lengths, strict=True))
    assert bounds.total % whole == 0
    assert bounds.total - sum(padded) < whole
    if fp8 and lengths:  # the tail is the last sequence's
        padded[-1] += bounds.total - sum(padded)
    assert list(bounds.padded[: len(lengths)]) == padded
    if (layout, cp, tp) == ("contiguous", 1, 1):
        assert bounds.padded == bounds.real == tuple(lengths)


TRANSFORMER_ENGINE = [
    ([0, 8], 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ([0, 8, 16], 2, [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
    ([0, 8], 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ([0, 4, 8], 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),
]
"""`tests/pytorch/attention/test_cp_utils.py`: cumulative padded lengths, cp, and the rows of each rank."""


@pytest.mark.parametrize(("cu", "cp", "ranks"), TRANSFORMER_ENGINE)
@pytest.mark.parametrize("layout", ["megatron", "verl", "slime"])
def test_the_vectors_of_transformer_engine(
    layout: LayoutName, cu: list[int], cp: int, ranks: list[list[int]]
) -> None:
    assert [local_rows(layout, cu, cp, rank).tolist() for rank in range(cp)] == ranks


def test_the_paddings_of_transformer_engine() -> None:
    """`pad_thd_sequences_for_cp` with a divisibility factor of 8 and of 4, which are 2 * cp * tp."""
    assert pack_bounds("megatron", [3, 2, 4], 2, 2).ends == (0, 8, 16, 24)
    assert pack_bounds("megatron", [3, 2, 4], 4, 1).ends == (0, 8, 16, 24)
    assert pack_bounds("megatron", [2, 7, 4, 10], 3, 1).ends == (0, 6, 18, 24, 36)
    assert pack_bounds("megatron", [7, 11, 5], 2, 1).ends == (0, 8, 20, 28)


def _ours(pack: peers.Pack) -> list[peers.Cut]:
    cut, lengths, cp, tp, fp8 = pack
    layout: LayoutName = {"thd_contiguous": "contiguous", "ulysses": "ulysses"}.get(cut, "verl")  # pyright: ignore[reportAssignmentType]
    bounds = pack_bounds(layout, lengths, cp, tp, fp8)
    ids = peers.pack_ids(lengths)
    whole = np.zeros(bounds.total, np.int64)
    for start, each in zip(bounds.ends, ids, strict=False):
        whole[start : start + len(each)] = each
    cuts: list[peers.Cut] = []
    for rank in range(cp):
        cuts.append({"ids": whole[local_rows(layout, bounds, cp, rank)].tolist()})
        if cut != "ulysses":
            cuts[-1]["cu"] = list(bounds.ends)
    return cuts


def test_packs_are_cut_as_verl_recorded_it() -> None:
    assert [pack[0] for pack in GOLDEN["packs"]].count("ulysses") == 6
    for pack, theirs in zip(GOLDEN["packs"], GOLDEN["cuts"], strict=True):
        assert _ours(pack) == theirs, pack


def test_packs_are_cut_as_verl_does_it() -> None:
    if reason := peers.missing():
        pytest.skip(reason)
    for pack in peers.packs(seed=8, count=16):
        assert _ours(pack) == peers.cuts(pack), pack
    # The megatron rule is verl's in all but the position ids of padding.
    assert LAYOUTS["megatron"] == LAYOUTS["verl"]


def _slime(lengths: list[int], cp: int, tp: int, rank: int) -> tuple[list[tuple[int, int]], list[int]]:
    """A rank's rows as (sequence, position), (-1, -1) for padding, and cu_seqlens: `get_batch` of slime's
    `megatron_utils/data.py` in plain Python."""
    rows: list[tuple[int, int]] = []
    cu = [0]
    for i, n in enumerate(lengths):
        if cp == 1:
            mine = [(i, t) for t in range(n)]
        else:
            chunk = -(-n // (2 * cp))
            both = [*range(chunk * rank, chunk * (rank + 1))]
            both += range(chunk * (2 * cp - rank - 1), chunk * (2 * cp - rank))
            mine = [(i, t) if t < n else (-1, -1) for t in both]
        rows += mine
        cu.append(cu[-1] + len(mine))
    if tail := -len(rows) % (128 * tp):
        rows += [(-1, -1)] * tail
        cu.append(cu[-1] + tail)
    return rows, [each * cp for each in cu]


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5), cp=st.sampled_from([1, 2, 4]), tp=TP)
def test_packs_are_cut_as_slime_does_it(lengths: list[int], cp: int, tp: int) -> None:
    bounds = pack_bounds("slime", lengths, cp, tp)
    for rank in range(cp):
        rows, cu = _slime(lengths, cp, tp, rank)
        assert list(bounds.ends) == cu
        found: list[tuple[int, int]] = []
        for row, start, end, _ in segments("slime", bounds, cp, rank):
            found += [(row, t) if t < bounds.real[row] else (-1, -1) for t in range(start, end)]
        assert found == rows


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5), cp=st.sampled_from([1, 2, 4]), tp=TP)
def test_packs_are_cut_as_slime_does_it_with_allgather_cp(lengths: list[int], cp: int, tp: int) -> None:
    stream = [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    stream += [(-1, -1)] * (-len(stream) % (cp * tp * 128))
    bounds = pack_bounds("slime_allgather", lengths, cp, tp)
    where = [
        (i, t) if t < n else (-1, -1) for i, n in enumerate(bounds.real) for t in range(bounds.padded[i])
    ]
    assert where == stream
    size = len(stream) // cp
    for rank in range(cp):
        assert local_rows("slime_allgather", bounds, cp, rank).tolist() == [
            *range(rank * size, (rank + 1) * size)
        ]


def test_a_zigzag_over_the_pack() -> None:
    bounds = pack_bounds("zigzag_pack", [3, 7], 2, 1)
    assert (bounds.padded, bounds.real) == ((3, 7, 2), (3, 7, 0))
    assert local_rows("zigzag_pack", bounds, 2, 0).tolist() == [0, 1, 2, 9, 10, 11]
    assert segments("zigzag_pack", bounds, 2, 0) == [(0, 0, 3, 0), (1, 6, 7, 3), (2, 0, 2, 4)]
    assert segments("zigzag_pack", bounds, 2, 1) == [(1, 0, 6, 0)]


def test_what_no_layout_does() -> None:
    with pytest.raises(ValueError, match="'slime' has no padding for FP8; megatron and verl have"):
        pack_bounds("slime", [3], 2, 1, fp8=True)
    with pytest.raises(ValueError, match="no context-parallel rank 2 of 2"):
        local_rows("megatron", [0, 8], 2, 2)
    with pytest.raises(ValueError, match=r"rows \[4, 10\) of a pack are 6, no multiple of 2 \* cp = 4"):
        local_rows("megatron", [0, 4, 10], 2, 0)
    with pytest.raises(ValueError, match="9 rows cannot be cut in 2 equal parts"):
        local_rows("contiguous", [0, 9], 2, 0)
