"""Ranged reads of a payload: any rows of any columns, all of them verified, and little else fetched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.store import ObjectDamaged, ObjectStore
from pipeline.store.payload import encode_payload, planned_bytes, read_pieces, write_payload
from pipeline.store.payload_fetch import MOST_GETS, WASTE, Fetch
from pipeline.store.ranges import thrifty
from schemas.payload import BLOCK_TOKENS, GRANULE_ROWS, PayloadHeader, Span

KEY = "runs/r/payloads/s/x-a1.safetensors"
Array = np.ndarray[Any, Any]


def made(rows: int, **more: tuple[int, ...]) -> tuple[dict[str, Array], bytes, PayloadHeader]:
    """`more`: columns of uint8, by the shapes of their rows."""
    rng = np.random.default_rng(rows)
    columns: dict[str, Array] = {
        "tokens": rng.integers(0, 150_000, rows, np.int32),
        "loss_mask": rng.integers(0, 2, rows, np.uint8),
        "logprobs": -rng.random(rows, np.float32),
        "policy_version": rng.integers(0, 9, rows, np.int32),
        "segments": rng.integers(0, 9, (rows % 7, 5), np.int32),
        **{name: rng.integers(0, 256, (rows, *shape), np.uint8) for name, shape in more.items()},
    }
    return columns, *encode_payload(KEY, columns)


PAYLOADS = [
    made(0),
    made(1, wide=(2, 3)),
    made(3600, routed=(47, 8)),
    made(BLOCK_TOKENS),
    made(BLOCK_TOKENS + 1),
    made(2 * BLOCK_TOKENS + 3 * GRANULE_ROWS + 5, wide=(3,), routed=(5, 4), none=(0,)),
]


@st.composite
def asked(draw: st.DrawFn) -> tuple[dict[str, Array], bytes, PayloadHeader, dict[str, list[Span]]]:
    """A payload, and spans of some of its columns."""
    columns, data, header = draw(st.sampled_from(PAYLOADS))
    names = draw(st.lists(st.sampled_from(sorted(columns)), min_size=1, max_size=4, unique=True))
    spans: dict[str, list[Span]] = {}
    for name in names:
        rows = len(columns[name])
        edges = [edge for edge in (0, GRANULE_ROWS, BLOCK_TOKENS, 2 * BLOCK_TOKENS, rows) if edge <= rows]
        near = st.sampled_from(edges).flatmap(lambda edge: st.integers(max(0, edge - 2), edge))
        bound = st.one_of(st.integers(0, rows), near)
        pairs = draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=6))
        spans[name] = [Span(start=start, end=end) for start, end in pairs]
    return columns, data, header, spans


def bodies(fetch: Fetch, data: bytes) -> list[memoryview]:
    return [memoryview(data)[start:end] for start, end in fetch.gets]


@settings(max_examples=150, deadline=None)
@given(asked(), st.sampled_from([0, 1 << 20]))
def test_any_rows_come_back_as_views(
    given_: tuple[dict[str, Array], bytes, PayloadHeader, dict[str, list[Span]]], gap: int
) -> None:
    columns, data, header, spans = given_
    fetch = Fetch.of(header, list(spans), spans, gap)
    got = fetch.cut(bodies(fetch, data))
    assert list(got) == list(spans)
    for name, wanted in spans.items():
        assert len(got[name]) == len(wanted)
        for view, span in zip(got[name], wanted, strict=True):
            expected = columns[name][span.start : span.end]
            np.testing.assert_array_equal(view, expected)
            assert (view.dtype, view.flags.writeable) == (expected.dtype, False)
            assert view.size == 0 or not view.flags.owndata
    assert planned_bytes(header, list(spans), spans, gap) == fetch.bytes


@settings(max_examples=150, deadline=None)
@given(asked(), st.data())
def test_a_flipped_bit_in_the_rows_is_found_and_named(
    given_: tuple[dict[str, Array], bytes, PayloadHeader, dict[str, list[Span]]], data: st.DataObject
) -> None:
    _, body, header, spans = given_
    there = [
        (name, span)
        for name, wanted in spans.items()
        for span in wanted
        if span.start < span.end and header.column(name).bytes
    ]
    if not there:
        return
    name, span = data.draw(st.sampled_from(there))
    column = header.column(name)
    row = data.draw(st.integers(span.start, span.end - 1))
    width = column.bytes // column.shape[0]
    at = column.offset + row * width + data.draw(st.integers(0, width - 1))
    fetch = Fetch.of(header, list(spans), spans)
    wrong = [bytearray(each) for each in bodies(fetch, body)]
    for (start, end), each in zip(fetch.gets, wrong, strict=True):
        if start <= at < end:
            each[at - start] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(
        ObjectDamaged, match=rf"column {name}, block {row // BLOCK_TOKENS}, rows \["
    ) as caught:
        fetch.cut([memoryview(each) for each in wrong])
    assert (caught.value.key, caught.value.column, caught.value.block) == (KEY, name, row // BLOCK_TOKENS)


@settings(max_examples=150, deadline=None)
@given(asked())
def test_no_byte_is_fetched_beyond_the_budget(
    given_: tuple[dict[str, Array], bytes, PayloadHeader, dict[str, list[Span]]],
) -> None:
    columns, _, header, spans = given_
    fetch = Fetch.of(header, list(spans), spans)
    assert all(before[1] < after[0] for before, after in zip(fetch.gets, fetch.gets[1:], strict=False))
    names = [name for name, wanted in spans.items() if any(span.start < span.end for span in wanted)]
    whole = sum(columns[name].nbytes for name in names)
    if whole <= 1 << 20 and all(len(columns[name]) <= BLOCK_TOKENS for name in spans):
        assert fetch.bytes <= 1 << 20
        return
    wanted = least = 0
    tables: dict[str, set[int]] = {}
    tabled = {name: table for table in header.checksums for name in table.columns}
    for name in names:
        rows, width = len(columns[name]), columns[name].nbytes // len(columns[name])
        step = GRANULE_ROWS if name in tabled else BLOCK_TOKENS
        touched = np.zeros(-(-rows // step) * step, bool)
        for span in spans[name]:
            wanted += width * (span.end - span.start)
            if span.start < span.end:
                touched[span.start // step * step : -(-span.end // step) * step] = True
        least += width * int(touched[:rows].sum())
        if name in tabled:
            for block in range(0, rows, BLOCK_TOKENS):
                granules = touched[block : block + BLOCK_TOKENS : GRANULE_ROWS]
                if not granules.all():
                    tables.setdefault(tabled[name].table, set()).update(
                        (np.flatnonzero(granules) + block // GRANULE_ROWS).tolist()
                    )
    least += sum(4 * len(of) * header.column(name).shape[1] for name, of in tables.items())
    assert least <= fetch.bytes <= max(least, int((1 + WASTE) * wanted))


def test_of_hundreds_of_spans_there_are_few_gets() -> None:
    _, data, header = PAYLOADS[-1]
    spans = [Span(start=at, end=at + 10) for at in range(0, 2 * BLOCK_TOKENS, 400)]
    fetch = Fetch.of(header, ["tokens", "routed"], spans)
    assert len(fetch.gets) == MOST_GETS == 64
    assert len(fetch.cut(bodies(fetch, data))["routed"]) == len(spans)
    # Each column alone: not one byte of its neighbours.
    apart = Fetch.of(header, ["tokens", "routed"], spans, gap=0)
    within = [(column.offset, column.offset + column.bytes) for column in header.columns]
    assert all(any(a <= start and end <= b for a, b in within) for start, end in apart.gets)


def test_the_smallest_gaps_are_fetched_first() -> None:
    wanted = [(0, 10), (12, 20), (25, 30), (130, 140)]
    assert thrifty(wanted, 1, 9) == wanted
    assert thrifty(wanted, 6, 9) == [(0, 20), *wanted[2:]]
    assert thrifty(wanted, 7, 9) == [(0, 30), (130, 140)]
    assert thrifty(wanted, 1000, 9) == [(0, 140)]
    assert thrifty(wanted, 1000, 9, gap=99) == [(0, 30), (130, 140)]
    assert thrifty(wanted, 0, 3) == [(0, 20), *wanted[2:]]
    assert thrifty(wanted, 0, 1, gap=0) == [(0, 140)]
    assert thrifty([(5, 9), (0, 6), (9, 11)], 0, 9) == [(0, 11)]
    assert thrifty([], 0, 1) == []


def zigzag(tokens: int, cp: int, rank: int) -> list[tuple[int, int]]:
    chunk = -(-tokens // (2 * cp))
    ends = [(k * chunk, min((k + 1) * chunk, tokens)) for k in (rank, 2 * cp - 1 - rank)]
    return [(start, end) for start, end in ends if start < end]


@pytest.mark.parametrize("rows", [BLOCK_TOKENS + 1, 100_003])
@pytest.mark.parametrize("routing", [0, 376])
def test_a_context_parallel_rank_fetches_its_window_and_a_twentieth_at_most(rows: int, routing: int) -> None:
    """Of rows over 64 Ki tokens. What no loss is on is read here, too: the halo of a chunk costs most there."""
    _, _, header = made(rows, **({"routed": (routing,)} if routing else {}))
    for cp in (2, 4, 8, 16):
        fetched = wanted = 0
        for rank in range(cp):
            chunks = zigzag(rows, cp, rank)
            label = [Span(start=min(a + 1, rows), end=min(b + 1, rows)) for a, b in chunks]
            spans: dict[str, list[Span]] = dict.fromkeys(("loss_mask", "logprobs", "policy_version"), label)
            spans["tokens"] = [Span(start=a, end=min(b + 1, rows)) for a, b in chunks]
            if routing:
                spans["routed"] = [Span(start=a, end=b) for a, b in chunks]
            fetched += planned_bytes(header, list(spans), spans)
            wanted += sum(
                (span.end - span.start) * (header.column(name).bytes // rows)
                for name, of in spans.items()
                for span in of
            )
        assert fetched / wanted <= 1.05, cp


async def test_ranges_of_several_columns_go_out_together() -> None:
    store = ObjectStore.in_memory()
    columns, _, _ = PAYLOADS[-1]
    header = await write_payload(store, KEY, columns)
    scope = store.scope()
    span = [Span(start=1000, end=9000)]
    got = await read_pieces(scope, header, ["tokens", "routed"], span)
    np.testing.assert_array_equal(got["routed"][0], columns["routed"][1000:9000])
    assert scope.counters.operations == 4  # each, and its table
    assert scope.requests.seconds["get"].counts


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"shape": (3, 4), "bytes": 48}, "table checksums.0"),
        ({"dtype": "uint16", "bytes": 0}, "table checksums.0"),
        ({"offset": 1 << 40}, "checksums.0 contradicts itself"),
    ],
)
def test_a_table_that_contradicts_the_header_is_damage(change: dict[str, Any], what: str) -> None:
    _, _, header = PAYLOADS[-1]
    forged = header.model_copy(
        update={
            "columns": tuple(
                column.model_copy(update=change) if column.name == "checksums.0" else column
                for column in header.columns
            )
        }
    )
    with pytest.raises(ObjectDamaged, match=what):
        planned_bytes(forged, ["tokens"], [Span(start=1, end=2)])


def test_a_table_of_columns_of_two_lengths_is_damage() -> None:
    _, _, header = PAYLOADS[-1]
    table = header.checksums[0].model_copy(
        update={"columns": ("tokens", "segments", "loss_mask", "logprobs")}
    )
    forged = header.model_copy(update={"checksums": (table,)})
    with pytest.raises(ObjectDamaged, match=r"table checksums\.0"):
        planned_bytes(forged, ["tokens", "segments"], [Span(start=1, end=2)])
