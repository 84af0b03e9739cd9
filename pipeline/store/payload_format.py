"""The payload object's bytes: a safetensors header of our own making, then the columns as they lie in memory. Pure.

Promises:
- any safetensors tool opens the object; columns stand in the order of that library's own writer (widest element first, then by
  name), so that each is aligned to its elements; `__metadata__` has the version, the CRC32C of each column's blocks, and
  which columns the tables of `schemas.payload.Checksums` are of;
- of the columns nothing is copied, but for a piece that does not lie in one run of memory;
- columns of which none is long have no table: rows of at most 65,536 tokens, of at most 1 MiB together;
- columns that are no payload are refused: see `check`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.checksum import crc32c
from pipeline.store.ranges import COALESCE_GAP
from schemas.payload import (
    BLOCK_TOKENS,
    COLUMNS,
    GRANULE_ROWS,
    PAYLOAD_VERSION,
    Checksums,
    ColumnHeader,
    DType,
    PayloadHeader,
)

Column: TypeAlias = NDArray[Any]
Pieces: TypeAlias = Column | Sequence[Column]
"""A column, or what it is made of, one after the other: arrays of one dtype and one shape but for the rows."""

PREFIX = 8
"""safetensors: a little-endian uint64 with the length of the JSON header that follows."""
TABLE = "checksums."
"""What the name of a column with checksums begins with."""
WIDE = 16
"""Bytes of a row from which a column has its checksums apart from the narrow ones: who reads only these is spared those."""
_SAFETENSORS: dict[DType, str] = {
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "uint16": "U16",
    "uint8": "U8",
}
"""In the order in which the library writes them."""
_DTYPES: dict[str, DType] = {short: dtype for dtype, short in _SAFETENSORS.items()}
_NAMED: dict[str, DType] = {dtype: dtype for dtype in _SAFETENSORS}
_ORDER = {dtype: at for at, dtype in enumerate(_SAFETENSORS)}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HEADER = TypeAdapter(dict[str, dict[str, Any]])
_TABLES = TypeAdapter(tuple[Checksums, ...])


class BadPayload(ValueError):
    """Columns that are no payload; names the column, what it is, and what it should be."""


@dataclass(frozen=True)
class Encoded:
    """An object before it is written: its header, and its bytes one run of memory after the other."""

    header: PayloadHeader
    buffers: list[memoryview]


def as_pieces(column: Pieces) -> Sequence[Column]:
    return [column] if isinstance(column, np.ndarray) else column


def encode(key: str, columns: Mapping[str, Pieces], required: Collection[str] = tuple(COLUMNS)) -> Encoded:
    """The object of the columns; `required`: those that it must have. Raises BadPayload."""
    given = {name: as_pieces(column) for name, column in columns.items()}
    check(key, given, required)
    made = {name: _Body.of(pieces) for name, pieces in given.items()}
    tables = _families(made)
    for table in tables:
        small = [made[name].sums(GRANULE_ROWS) for name in table.columns]
        made[table.table] = _Body.of([np.ascontiguousarray(np.array(small, np.uint32).T).view(np.int32)])
    order = sorted(made, key=lambda name: (_ORDER[made[name].dtype], name))
    sums = {name: made[name].sums(BLOCK_TOKENS) for name in order}
    metadata = {
        "version": str(PAYLOAD_VERSION),
        **{f"crc32c.{name}": json.dumps(sums[name]) for name in order},
    }
    if tables:
        metadata["checksums"] = _TABLES.dump_json(tables).decode()
    content: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        body = made[name]
        content[name] = {
            "dtype": _SAFETENSORS[body.dtype],
            "shape": list(body.shape),
            "data_offsets": [at, at + body.bytes],
        }
        at += body.bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as the library does: data begin aligned
    buffers = [memoryview(len(text).to_bytes(PREFIX, "little") + text)]
    buffers += [buffer for name in order for buffer in made[name].buffers]
    return Encoded(parse(key, memoryview(text), PREFIX + len(text) + at), buffers)


def parse(key: str, text: memoryview, size: int) -> PayloadHeader:
    """The header from the object's own; raises ValueError, LookupError or TypeError on anything else."""
    content = _HEADER.validate_json(bytes(text))
    metadata = content.pop("__metadata__")
    if metadata["version"] != str(PAYLOAD_VERSION):
        raise ValueError(f"payload version {metadata['version']!r}, this reader knows {PAYLOAD_VERSION}")
    base = PREFIX + len(text)
    columns = [
        ColumnHeader(
            name=name,
            dtype=_DTYPES[tensor["dtype"]],
            shape=tensor["shape"],
            offset=base + tensor["data_offsets"][0],
            bytes=tensor["data_offsets"][1] - tensor["data_offsets"][0],
            crc32c=orjson.loads(metadata[f"crc32c.{name}"]),
        )
        for name, tensor in content.items()
    ]
    return PayloadHeader(
        key=key,
        bytes=size,
        columns=tuple(sorted(columns, key=lambda column: column.offset)),
        checksums=_TABLES.validate_json(metadata["checksums"]) if "checksums" in metadata else (),
    )


@dataclass(frozen=True)
class _Body:
    dtype: DType
    shape: tuple[int, ...]
    row: int
    """Bytes of one row."""
    buffers: list[memoryview]

    @classmethod
    def of(cls, pieces: Sequence[Column]) -> _Body:
        first = pieces[0]
        return cls(
            _NAMED[first.dtype.name],
            (sum(len(piece) for piece in pieces), *first.shape[1:]),
            first.dtype.itemsize * prod(first.shape[1:]),
            [np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data for piece in pieces if piece.size],
        )

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row

    def sums(self, rows: int) -> list[int]:
        """CRC32C of every `rows` rows, across pieces."""
        step = rows * self.row
        if not step:
            return [0] * -(-self.shape[0] // rows)
        found: list[int] = []
        crc, room = 0, step
        for buffer in self.buffers:
            at = 0
            while at < len(buffer):
                part = buffer[at : at + room]
                crc, at, room = crc32c(part, crc), at + len(part), room - len(part)
                if not room:
                    found.append(crc)
                    crc, room = 0, step
        return [*found, crc] if room < step else found


def _families(made: Mapping[str, _Body]) -> tuple[Checksums, ...]:
    """The tables: of columns of equal length, narrow and wide ones apart, where they are worth reading in part."""
    of_rows: dict[int, list[str]] = {}
    for name in sorted(made):
        if made[name].row:
            of_rows.setdefault(made[name].shape[0], []).append(name)
    families: list[list[str]] = []
    for rows, names in sorted(of_rows.items()):
        if rows > BLOCK_TOKENS or sum(made[name].bytes for name in names) > COALESCE_GAP:
            families.append([name for name in names if made[name].row <= WIDE])
            families.append([name for name in names if made[name].row > WIDE])
    return tuple(
        Checksums(table=f"{TABLE}{at}", columns=tuple(names))
        for at, names in enumerate(filter(None, families))
    )


def check(key: str, columns: Mapping[str, Sequence[Column]], required: Collection[str]) -> None:
    """Raises BadPayload on a column that is missing, or has a name, dtype or shape that it may not have, or a number that is
    not finite."""
    missing = sorted(set(required) - set(columns))
    if missing:
        raise BadPayload(f"payload {key} lacks column {missing[0]!r}; every payload has {sorted(COLUMNS)}")
    for name, pieces in columns.items():
        if not _NAME.fullmatch(name) or name == "__metadata__" or name.startswith(TABLE):
            raise BadPayload(
                f"payload {key}: column name {name[:140]!r} is not 1 to 128 of A-Z a-z 0-9 _ . -, or is reserved"
            )
        if not pieces:
            raise BadPayload(f"payload {key}: column {name!r} is of no pieces; give an array of no rows")
        first = pieces[0]
        if first.dtype.name not in _NAMED or first.dtype.str.startswith(">") or first.ndim == 0:
            raise BadPayload(
                f"payload {key}: column {name!r} is {first.dtype.str} of {first.ndim} dimensions; "
                f"give little-endian {sorted(_ORDER)} of at least 1"
            )
        if name in required and first.dtype.name != COLUMNS[name]:
            raise BadPayload(f"payload {key}: column {name!r} is {first.dtype.name}, must be {COLUMNS[name]}")
        for piece in pieces:
            if piece.dtype != first.dtype or piece.ndim == 0 or piece.shape[1:] != first.shape[1:]:
                raise BadPayload(
                    f"payload {key}: column {name!r} is of pieces {first.dtype.str}{list(first.shape)} and "
                    f"{piece.dtype.str}{list(piece.shape)}; give all one dtype and one shape but for the rows"
                )
        if first.dtype == np.float32:
            _check_finite(key, name, pieces)
    rows = {name: sum(len(piece) for piece in columns[name]) for name in required}
    for name in required:
        shape = (rows[name], *columns[name][0].shape[1:])
        if (shape[1:] != (5,)) if name == "segments" else (shape != (rows["tokens"],)):
            raise BadPayload(
                f"payload {key}: column {name!r} has shape {shape}, must be {'[S, 5]' if name == 'segments' else (rows['tokens'],)}"
            )


def _check_finite(key: str, name: str, pieces: Sequence[Column]) -> None:
    row = 0
    for piece in pieces:
        # By blocks: the answer is an array, too.
        for first in range(0, len(piece), BLOCK_TOKENS):
            block = piece[first : first + BLOCK_TOKENS]
            if not (finite := np.isfinite(block)).all():
                at = int(np.argmin(finite.reshape(len(block), -1).all(axis=1)))
                raise BadPayload(
                    f"payload {key}: column {name!r}, row {row + first + at} is {block[at]!r}, not a finite number"
                )
        row += len(piece)
