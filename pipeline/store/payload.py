"""The payload object: safetensors, written once, read by column and by row range.

Promises:
- any safetensors tool opens the object; its `__metadata__` has the version and a CRC32C per column and 65,536 rows;
- the returned header holds absolute offsets, so that a reader fetches no header;
- `read_columns` returns only rows whose blocks were verified: damage names the object, the column and the block;
- neighbouring columns and spans come in one GET (gaps of at most 1 MiB are fetched and dropped); a single span is a
  view of what was fetched, not a copy;
- a payload without the columns of `schemas.payload.COLUMNS`, of other dtypes or lengths, or with a number that is not
  finite, is refused before it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors.numpy import save

from pipeline.checksum import crc32c
from pipeline.store.errors import ObjectDamaged, ObjectExists, ObjectMissing
from pipeline.store.objects import ObjectStore, off_loop
from pipeline.store.ranges import COALESCE_GAP, Range
from schemas.payload import BLOCK_TOKENS, COLUMNS, PAYLOAD_VERSION, ColumnHeader, DType, PayloadHeader, Span

Column = NDArray[Any]

MAX_HEADER = 16 << 20
"""Bytes of safetensors header that `read_header` will fetch from an object it does not know."""
_DTYPES: frozenset[str] = frozenset(get_args(DType))
_SAFETENSORS: dict[str, DType] = {
    "U8": "uint8",
    "U16": "uint16",
    "I32": "int32",
    "I64": "int64",
    "F32": "float32",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HEADER = TypeAdapter(dict[str, dict[str, Any]])
_PREFIX = 8
"""safetensors: a little-endian uint64 with the length of the JSON header that follows."""
_save = cast("Callable[[dict[str, Column], dict[str, str]], bytes]", save)


class BadPayload(ValueError):
    """Columns that are no payload; names the column, what it is, and what it should be."""


async def write_payload(store: ObjectStore, key: str, columns: Mapping[str, Column]) -> PayloadHeader:
    """Writes a sequence's columns as one object and returns its header.

    `columns` has at least `schemas.payload.COLUMNS`; the first dimension is the row. Raises BadPayload, ObjectExists,
    StoreUnavailable.
    """
    size = sum(column.nbytes for column in columns.values())
    data, header = await off_loop(size, encode_payload, key, columns)
    await store.create(key, data)
    return header


async def write_sidecar(store: ObjectStore, key: str, columns: Mapping[str, Column]) -> PayloadHeader:
    """Writes what was made of a payload later, in the same form, and returns its header: of what stands there already where
    another wrote it first, for which the header must be of the same columns.

    Columns of any names; the first dimension is the row. Raises BadPayload, ObjectExists, StoreUnavailable.
    """
    size = sum(column.nbytes for column in columns.values())
    data, header = await off_loop(size, encode_payload, key, columns, ())
    try:
        await store.create(key, data)
    except ObjectExists:
        # Scored or shaped twice, at once or after a crash: the first stands, as its fact may.
        found = await read_header(store, key)
        if _form(found) != _form(header):
            raise
        return found
    return header


def _form(header: PayloadHeader) -> list[tuple[object, ...]]:
    return sorted((column.name, column.dtype, column.shape) for column in header.columns)


def encode_payload(
    key: str, columns: Mapping[str, Column], required: Collection[str] = tuple(COLUMNS)
) -> tuple[bytes, PayloadHeader]:
    """The object's bytes and its header; `required`: columns that it must have. Raises BadPayload."""
    _check(key, columns, required)
    tensors = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    sums = {name: _block_sums(column) for name, column in tensors.items()}
    metadata = {
        "version": str(PAYLOAD_VERSION),
        **{f"crc32c.{name}": json.dumps(crcs) for name, crcs in sums.items()},
    }
    data = _save(tensors, metadata)
    length = int.from_bytes(data[:_PREFIX], "little")
    return data, _parse(key, memoryview(data)[_PREFIX : _PREFIX + length], len(data))


async def read_header(store: ObjectStore, key: str) -> PayloadHeader:
    """The header of an object that no event describes to the caller. Raises ObjectMissing, ObjectDamaged, StoreUnavailable."""
    size = await store.size(key)
    if size is None:
        raise ObjectMissing(key, store.url)
    if size <= _PREFIX:
        raise ObjectDamaged(key, f"{size} bytes are no payload")
    (prefix,) = await store.get_ranges(key, [(0, _PREFIX)], size=size)
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(MAX_HEADER, size - _PREFIX):
        raise ObjectDamaged(key, f"its header claims {length} bytes of {size}, limit {MAX_HEADER}")
    (text,) = await store.get_ranges(key, [(_PREFIX, _PREFIX + length)], size=size)
    try:
        return _parse(key, text, size)
    except (ValueError, KeyError, TypeError) as error:
        raise ObjectDamaged(key, f"its header is no payload header ({error})") from error


async def read_columns(
    store: ObjectStore,
    header: PayloadHeader,
    names: Sequence[str],
    spans: Sequence[Span] | None = None,
    gap: int = COALESCE_GAP,
) -> dict[str, Column]:
    """The named columns, the rows of `spans` (default: all) one after the other, as read-only arrays.

    Fetches and verifies whole blocks of 65,536 rows, and what lies between two where that is at most `gap` bytes. Raises KeyError on a column that there is not, ValueError on a
    span outside it, ObjectDamaged, ObjectMissing, StoreUnavailable.
    """
    pieces = [_Pieces.of(header, header.column(name), spans) for name in names]
    ranges = [range_ for piece in pieces for range_ in piece.ranges]
    bodies = iter(await store.get_ranges(header.key, ranges, size=header.bytes, gap=gap) if ranges else [])
    found: dict[str, Column] = {}
    for piece in pieces:
        views = [next(bodies) for _ in piece.ranges]
        size = sum(len(view) for view in views)
        found[piece.column.name] = await off_loop(size, piece.cut, header.key, views)
    return found


@dataclass(frozen=True)
class _Pieces:
    """What one column must fetch: runs of whole blocks, ascending, that cover the spans."""

    column: ColumnHeader
    spans: tuple[Span, ...]
    runs: tuple[tuple[int, int], ...]
    """[first, last) in blocks."""
    row: int
    """Bytes of one row."""

    @classmethod
    def of(cls, header: PayloadHeader, column: ColumnHeader, spans: Sequence[Span] | None) -> _Pieces:
        rows = column.shape[0] if column.shape else 0
        row = np.dtype(column.dtype).itemsize * prod(column.shape[1:])
        if (
            not column.shape
            or min(column.shape) < 0
            or rows * row != column.bytes
            or column.offset + column.bytes > header.bytes
            or len(column.crc32c) != -(-rows // BLOCK_TOKENS)
        ):
            raise ObjectDamaged(
                header.key, f"header of column {column.name} contradicts itself: {column!r}", column.name
            )
        wanted = tuple(spans) if spans is not None else (Span(start=0, end=rows),)
        runs: list[tuple[int, int]] = []
        for span in sorted(wanted, key=lambda span: span.start):
            if not span.start <= span.end <= rows:
                raise ValueError(
                    f"payload {header.key}: rows [{span.start}, {span.end}) of column {column.name}, which has {rows}"
                )
            if span.start == span.end or row == 0:
                continue
            first, last = span.start // BLOCK_TOKENS, -(-span.end // BLOCK_TOKENS)
            if runs and first <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(runs[-1][1], last))
            else:
                runs.append((first, last))
        return cls(column, wanted, tuple(runs), row)

    @property
    def ranges(self) -> list[Range]:
        start, end, step = self.column.offset, self.column.offset + self.column.bytes, BLOCK_TOKENS * self.row
        return [(start + first * step, min(start + last * step, end)) for first, last in self.runs]

    def cut(self, key: str, views: Sequence[memoryview]) -> Column:
        """Verifies the runs' blocks and returns the spans' rows; a view when there is one span."""
        name, step = self.column.name, BLOCK_TOKENS * self.row
        for (first, last), view in zip(self.runs, views, strict=True):
            for block in range(first, last):
                found = crc32c(view[(block - first) * step : (block - first + 1) * step])
                if found != self.column.crc32c[block]:
                    what = f"column {name}, block {block}: CRC32C {found:08x}, written as {self.column.crc32c[block]:08x}"
                    raise ObjectDamaged(key, what, name, block)
        cuts = [self._span(span, views) for span in self.spans]
        result = cuts[0] if len(cuts) == 1 else np.concatenate([self._empty(), *cuts])
        result.flags.writeable = False
        return result

    def _span(self, span: Span, views: Sequence[memoryview]) -> Column:
        for (first, last), view in zip(self.runs, views, strict=True):
            if span.start < span.end and first * BLOCK_TOKENS <= span.start < last * BLOCK_TOKENS:
                shift = first * BLOCK_TOKENS
                body = view[(span.start - shift) * self.row : (span.end - shift) * self.row]
                return np.frombuffer(body, self.column.dtype).reshape(
                    span.end - span.start, *self.column.shape[1:]
                )
        return np.empty((span.end - span.start, *self.column.shape[1:]), self.column.dtype)

    def _empty(self) -> Column:
        return np.empty((0, *self.column.shape[1:]), self.column.dtype)


def _block_sums(column: Column) -> list[int]:
    body = column.reshape(-1).view(np.uint8).data if column.size else memoryview(b"")
    step = BLOCK_TOKENS * (column.nbytes // column.shape[0] if column.shape[0] else 0)
    return [crc32c(body[at * step : (at + 1) * step]) for at in range(-(-column.shape[0] // BLOCK_TOKENS))]


def _check(key: str, columns: Mapping[str, Column], required: Collection[str]) -> None:
    missing = sorted(set(required) - set(columns))
    if missing:
        raise BadPayload(f"payload {key} lacks column {missing[0]!r}; every payload has {sorted(COLUMNS)}")
    for name, column in columns.items():
        if not _NAME.fullmatch(name) or name == "__metadata__":
            raise BadPayload(
                f"payload {key}: column name {name[:140]!r} is not 1 to 128 of A-Z a-z 0-9 _ . -, or is reserved"
            )
        if column.dtype.name not in _DTYPES or column.dtype.str.startswith(">") or column.ndim == 0:
            raise BadPayload(
                f"payload {key}: column {name!r} is {column.dtype.str} of {column.ndim} dimensions; "
                f"give little-endian {sorted(_DTYPES)} of at least 1"
            )
        if name in required and column.dtype.name != COLUMNS[name]:
            raise BadPayload(
                f"payload {key}: column {name!r} is {column.dtype.name}, must be {COLUMNS[name]}"
            )
        if column.dtype == np.float32 and not (finite := np.isfinite(column)).all():
            at = int(np.argmin(finite.reshape(len(column), -1).all(axis=1)))
            raise BadPayload(
                f"payload {key}: column {name!r}, row {at} is {column[at]!r}, not a finite number"
            )
    for name in required:
        length = columns["tokens"].shape[0]
        shape = columns[name].shape
        if (shape[1:] != (5,)) if name == "segments" else (shape != (length,)):
            raise BadPayload(
                f"payload {key}: column {name!r} has shape {shape}, must be {'[S, 5]' if name == 'segments' else (length,)}"
            )


def _parse(key: str, text: memoryview, size: int) -> PayloadHeader:
    """The header from the object's own; raises ValueError, KeyError or TypeError on anything else."""
    content = _HEADER.validate_json(bytes(text))
    metadata = content.pop("__metadata__")
    if metadata["version"] != str(PAYLOAD_VERSION):
        raise ValueError(f"payload version {metadata['version']!r}, this reader knows {PAYLOAD_VERSION}")
    base = _PREFIX + len(text)
    columns = [
        ColumnHeader(
            name=name,
            dtype=_SAFETENSORS[tensor["dtype"]],
            shape=tensor["shape"],
            offset=base + tensor["data_offsets"][0],
            bytes=tensor["data_offsets"][1] - tensor["data_offsets"][0],
            crc32c=json.loads(metadata[f"crc32c.{name}"]),
        )
        for name, tensor in content.items()
    ]
    return PayloadHeader(
        key=key, bytes=size, columns=tuple(sorted(columns, key=lambda column: column.offset))
    )
