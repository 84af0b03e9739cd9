"""The payload format: any safetensors tool reads it, ranges fetch little and verify all, damage is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from pipeline.checksum import crc32c
from pipeline.store import ObjectDamaged, ObjectMissing, ObjectStore
from pipeline.store.payload import (
    BadPayload,
    describe_payload,
    encode_payload,
    planned_bytes,
    read_columns,
    read_header,
    write_payload,
)
from pipeline.store.payload_format import encode
from schemas.payload import BLOCK_TOKENS, GRANULE_ROWS, Checksums, ColumnHeader, PayloadHeader, Span

KEY = "runs/r/payloads/s/x-a1.safetensors"
NAMES = ["tokens", "loss_mask", "logprobs", "policy_version", "segments"]


def columns_of(rows: int, seed: int = 0, **extra: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 150_000, rows, np.int32),
        "loss_mask": rng.integers(0, 2, rows, np.uint8),
        "logprobs": -rng.random(rows, np.float32),
        "policy_version": rng.integers(0, 9, rows, np.int32),
        "segments": rng.integers(0, 9, (rows % 7, 5), np.int32),
        **extra,
    }


def test_crc32c_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32/ISCSI
    assert crc32c(memoryview(bytes(32))) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"") == 0


def test_the_object_is_safetensors_and_the_header_is_absolute(tmp_path: Path) -> None:
    rows = BLOCK_TOKENS * 2 + 1
    columns = columns_of(
        rows, **{"routed_experts.L0-3": np.ones((rows, 6, 3), np.uint8), "empty": np.zeros((0, 3), np.int64)}
    )
    data, header = encode_payload(KEY, columns)
    path = tmp_path / "payload.safetensors"
    path.write_bytes(data)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {*columns, "checksums.0", "checksums.1"}
        metadata = file.metadata()
        for name, column in columns.items():
            np.testing.assert_array_equal(file.get_tensor(name), column)
    for name, column in columns.items():
        entry = header.column(name)
        assert (entry.dtype, entry.shape, entry.bytes) == (column.dtype.name, column.shape, column.nbytes)
        assert data[entry.offset : entry.offset + entry.bytes] == column.tobytes()
    assert header.bytes == len(data)
    assert len(header.column("routed_experts.L0-3").crc32c) == 3
    assert header.column("empty").crc32c == ()
    tokens = columns["tokens"]
    assert header.column("tokens").crc32c == (
        crc32c(tokens[:BLOCK_TOKENS].tobytes()),
        crc32c(tokens[BLOCK_TOKENS : 2 * BLOCK_TOKENS].tobytes()),
        crc32c(tokens[2 * BLOCK_TOKENS :].tobytes()),
    )
    assert metadata["version"] == "1"
    assert json.loads(metadata["crc32c.tokens"]) == list(header.column("tokens").crc32c)
    assert PayloadHeader.model_validate_json(header.model_dump_json()) == header


def test_long_columns_of_one_length_have_the_checksums_of_their_granules() -> None:
    rows = BLOCK_TOKENS + GRANULE_ROWS + 1
    columns = columns_of(rows, routed=np.random.default_rng(0).integers(0, 9, (rows, 31), np.uint8))
    data, header = encode_payload(KEY, columns)
    narrow = ("logprobs", "loss_mask", "policy_version", "tokens")
    assert header.checksums == (
        Checksums(table="checksums.0", columns=narrow),
        Checksums(table="checksums.1", columns=("routed",)),
    )
    found = load(data)["checksums.0"].view(np.uint32)
    assert found.shape == (-(-rows // GRANULE_ROWS), 4)
    for at, name in enumerate(narrow):
        of = [columns[name][first : first + GRANULE_ROWS] for first in range(0, rows, GRANULE_ROWS)]
        assert found[:, at].tolist() == [crc32c(each.tobytes()) for each in of]
    # What wide columns make long enough to be read in part has checksums of its narrow ones, too.
    _, short = encode_payload(KEY, columns_of(3600, routed=np.zeros((3600, 376), np.uint8)))
    assert [table.columns for table in short.checksums] == [narrow, ("routed",)]
    _, none = encode_payload(KEY, columns_of(BLOCK_TOKENS))
    assert none.checksums == ()
    assert "checksums" not in none.model_dump()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_short_payload_is_what_the_library_writes_and_pieces_are_one_column(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 300))
    more: dict[str, Any] = {
        name: np.full(
            (data.draw(st.integers(0, 9)), *data.draw(st.sampled_from([(), (3,), (2, 0), (2, 5)]))), 7, dtype
        )
        for name, dtype in data.draw(
            st.dictionaries(
                st.text("abz._-019", min_size=1, max_size=6),
                st.sampled_from(["uint8", "uint16", "int32", "int64", "float32"]),
                max_size=5,
            )
        ).items()
    }
    columns = columns_of(rows) | more
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=6).map(sorted))
    pieces = {
        name: np.split(column, [min(cut, len(column)) for cut in cuts]) for name, column in columns.items()
    }
    body, header = encode_payload(KEY, pieces)
    assert (body, header) == encode_payload(KEY, columns)
    assert describe_payload(KEY, pieces) == header
    theirs = save(
        columns, {"version": "1", **{f"crc32c.{c.name}": json.dumps(c.crc32c) for c in header.columns}}
    )
    length = int.from_bytes(body[:8], "little")
    assert theirs[:8] == body[:8]
    assert json.loads(theirs[8 : 8 + length]) == json.loads(body[8 : 8 + length])
    assert theirs[8 + length :] == body[8 + length :]
    assert all(column.offset % np.dtype(column.dtype).itemsize == 0 for column in header.columns)


def test_pieces_lie_in_the_object_as_they_lie_in_memory() -> None:
    """Checksums are of blocks and granules, wherever the pieces end; and of no piece there is a copy."""
    columns = columns_of(2 * BLOCK_TOKENS + 9)
    pieces = {
        name: np.split(column, [min(len(column), cut) for cut in (1, 70_000)])
        for name, column in columns.items()
    }
    encoded = encode(KEY, pieces)
    assert encoded.header == encode(KEY, columns).header
    mine = [piece for each in pieces.values() for piece in each if piece.size]
    theirs = [np.asarray(buffer) for buffer in encoded.buffers]
    assert all(any(np.shares_memory(piece, buffer) for buffer in theirs) for piece in mine)


def test_a_strided_column_is_written_as_its_values() -> None:
    wide = np.arange(20, dtype=np.int32).reshape(10, 2)
    data, _ = encode_payload(KEY, columns_of(10) | {"tokens": wide[:, 1]})
    np.testing.assert_array_equal(load(data)["tokens"], wide[:, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(4, np.int64)}, "'tokens' is int64, must be int32"),
        ({"loss_mask": np.zeros(3, np.uint8)}, r"'loss_mask' has shape \(3,\), must be \(4,\)"),
        ({"tokens": np.zeros((4, 1), np.int32)}, "'tokens' has shape"),
        ({"segments": np.zeros((2, 4), np.int32)}, r"'segments' has shape \(2, 4\), must be \[S, 5\]"),
        ({"more": np.zeros(4, np.float64)}, "'more' is <f8"),
        ({"more": np.zeros(4, ">i4")}, "'more' is >i4"),
        ({"more": np.array(1, np.int32)}, "0 dimensions"),
        ({"a/b": np.zeros(4, np.int32)}, "column name 'a/b'"),
        ({"__metadata__": np.zeros(4, np.int32)}, "column name '__metadata__'"),
        ({"checksums.0": np.zeros(4, np.int32)}, "column name 'checksums.0'"),
        ({"more": []}, "'more' is of no pieces"),
        (
            {"more": [np.zeros(4, np.int32), np.zeros(4, np.uint8)]},
            r"'more' is of pieces <i4\[4\] and \|u1\[4\]",
        ),
        ({"more": [np.zeros(4, np.int32), np.zeros((4, 1), np.int32)]}, "'more' is of pieces"),
        (
            {"logprobs": [np.zeros(3, np.float32), np.array([np.inf], np.float32)]},
            "'logprobs', row 3 is .*inf",
        ),
        ({"tokens": [np.zeros(3, np.int32), np.zeros(2, np.int32)]}, "'loss_mask' has shape"),
        ({"logprobs": np.array([0, 0, np.nan, 0], np.float32)}, "'logprobs', row 2 is .*nan"),
        ({"logprobs": np.array([0, -np.inf, 0, 0], np.float32)}, "'logprobs', row 1 is .*inf"),
    ],
)
def test_what_is_no_payload_is_refused(change: dict[str, np.ndarray[Any, Any]], message: str) -> None:
    with pytest.raises(BadPayload, match=message):
        encode_payload(KEY, columns_of(4) | change)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_column_is_refused(name: str) -> None:
    columns = columns_of(4)
    del columns[name]
    with pytest.raises(BadPayload, match=f"lacks column {name!r}"):
        encode_payload(KEY, columns)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_spans_of_any_payload_come_back(data: st.DataObject) -> None:
    rows = data.draw(
        st.sampled_from([0, 1, 5, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 5])
    )
    wide = np.random.default_rng(rows).integers(0, 256, (rows, 3), np.uint8)
    columns = columns_of(rows, seed=1, wide=wide)
    names = data.draw(
        st.lists(st.sampled_from(["tokens", "loss_mask", "logprobs", "policy_version", "wide"]), unique=True)
    )
    bound = st.integers(0, rows)
    pairs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=5))
    spans = None if not pairs else [Span(start=a, end=b) for a, b in pairs]

    async def round_trip() -> dict[str, np.ndarray[Any, Any]]:
        store = ObjectStore.in_memory()
        header = await write_payload(store, KEY, columns)
        assert PayloadHeader.model_validate_json(header.model_dump_json()) == header
        assert await read_header(store, KEY) == header
        return await read_columns(store, header, names, spans)

    got = asyncio.run(round_trip())
    assert list(got) == names
    for name in names:
        expected = (
            columns[name]
            if spans is None
            else np.concatenate([columns[name][s.start : s.end] for s in spans])
        )
        np.testing.assert_array_equal(got[name], expected)
        assert got[name].dtype == columns[name].dtype


async def test_a_short_row_is_one_get_and_a_view() -> None:
    store = ObjectStore.in_memory()
    header = await write_payload(store, KEY, columns_of(3600))
    scope = store.scope()
    got = await read_columns(
        scope, header, ["tokens", "loss_mask", "logprobs", "policy_version"], [Span(start=7, end=3000)]
    )
    assert scope.counters.operations == 1
    assert not any(column.flags.writeable or column.flags.owndata for column in got.values())


async def test_a_long_row_fetches_only_what_it_needs() -> None:
    store = ObjectStore.in_memory()
    rows = 40 * BLOCK_TOKENS
    header = await write_payload(store, KEY, columns_of(rows))
    scope = store.scope()
    spans = [
        Span(start=BLOCK_TOKENS + 5, end=BLOCK_TOKENS + 9),
        Span(start=30 * BLOCK_TOKENS, end=31 * BLOCK_TOKENS),
    ]
    got = await read_columns(scope, header, ["tokens"], spans)
    assert got["tokens"].shape == (BLOCK_TOKENS + 4,)
    # A granule, its row of the table of four columns, and a block; no table for that.
    assert scope.counters.operations == 3
    assert scope.counters.bytes_read == 4 * GRANULE_ROWS + 4 * 4 + 4 * BLOCK_TOKENS
    assert planned_bytes(header, ["tokens"], spans) == scope.counters.bytes_read


async def test_damage_names_object_column_and_block_and_only_where_it_is() -> None:
    rows = 3 * BLOCK_TOKENS
    data, header = encode_payload(KEY, columns_of(rows))
    at = header.column("logprobs").offset + 4 * (BLOCK_TOKENS + 17)
    row = BLOCK_TOKENS
    store = ObjectStore.in_memory()
    await store.create(KEY, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(
        ObjectDamaged, match=rf"{KEY}.*logprobs, block 1, rows \[{row}, {row + 64}\)"
    ) as caught:
        await read_columns(
            store, header, ["tokens", "logprobs"], [Span(start=BLOCK_TOKENS, end=BLOCK_TOKENS + 1)]
        )
    assert (caught.value.key, caught.value.column, caught.value.block) == (KEY, "logprobs", 1)
    for start in (0, 2 * BLOCK_TOKENS):
        await read_columns(store, header, ["logprobs"], [Span(start=start, end=start + BLOCK_TOKENS)])
    with pytest.raises(ObjectDamaged):
        await read_columns(store, header, ["logprobs"])


@pytest.mark.parametrize("cut", [1, 100_000])
async def test_a_truncated_payload_is_damage(cut: int) -> None:
    data, header = encode_payload(KEY, columns_of(BLOCK_TOKENS))
    store = ObjectStore.in_memory()
    await store.create(KEY, data[:-cut])
    # The first column is whole; that the object is not is told all the same.
    with pytest.raises(ObjectDamaged, match=f"it is {len(data) - cut} bytes, expected {len(data)}"):
        await read_columns(store, header, [header.columns[0].name])


async def test_spans_and_columns_that_are_not_there() -> None:
    store = ObjectStore.in_memory()
    header = await write_payload(store, KEY, columns_of(10))
    with pytest.raises(ValueError, match=r"rows \[5, 11\) of column tokens, which has 10"):
        await read_columns(store, header, ["tokens"], [Span(start=5, end=11)])
    with pytest.raises(ValueError, match="rows"):
        await read_columns(store, header, ["tokens"], [Span(start=6, end=5)])
    with pytest.raises(KeyError, match="no column 'routed'"):
        await read_columns(store, header, ["routed"])


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40},
        {"bytes": 1 << 40},
        {"shape": (1 << 40,)},
        {"shape": (-5, -2)},
        {"shape": (10, 1 << 32, 1 << 31), "bytes": 0},  # 0 in 64 bits
        {"crc32c": ()},
        {"shape": ()},
    ],
)
async def test_a_header_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    store = ObjectStore.in_memory()
    header = await write_payload(store, KEY, columns_of(10))
    forged = header.model_copy(
        update={
            "columns": tuple(
                column.model_copy(update=change) for column in header.columns if column.name == "tokens"
            )
        }
    )
    with pytest.raises(ObjectDamaged, match="contradicts itself"):
        await read_columns(store, forged, ["tokens"])


def headed(columns: dict[str, Any], **metadata: str) -> bytes:
    """An object whose header claims that."""
    text = json.dumps({"__metadata__": {"version": "1", **metadata}, **columns}).encode()
    return len(text).to_bytes(8, "little") + text + b"data"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"short",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}" + b"x",
        (2).to_bytes(8, "little") + b"{{" + b"x",
        (4).to_bytes(8, "little") + b"null" + b"x",
        headed({"t": {"dtype": "I32", "shape": [1], "data_offsets": [0]}}),
        headed({"t": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}, **{"crc32c.t": "[" * 200_000}),
        headed({"t": {"dtype": ["I32"], "shape": [1], "data_offsets": [0, 4]}}),
        headed({}, checksums="[[[["),
    ],
)
async def test_an_object_that_is_no_payload(body: bytes) -> None:
    store = ObjectStore.in_memory()
    await store.create(KEY, body)
    with pytest.raises(ObjectDamaged):
        await read_header(store, KEY)
    with pytest.raises(ObjectMissing):
        await read_header(store, "other")


def test_a_column_is_looked_up_by_name() -> None:
    _, header = encode_payload(KEY, columns_of(3))
    assert isinstance(header.column("tokens"), ColumnHeader)
