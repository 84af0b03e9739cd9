"""The payload object: safetensors, written once, read by column and by row range.

Promises:
- any safetensors tool opens the object (`payload_format`);
- it is written by one conditional PUT, from the memory in which its columns lie: a second writer gets ObjectExists, and a writer
  that dies leaves nothing under the key;
- the returned header holds absolute offsets, so that a reader fetches no header;
- a read returns only rows that were verified: damage names the object, the column, the block and the rows (`payload_fetch`);
- a payload without the columns of `schemas.payload.COLUMNS`, of other dtypes or lengths, or with a number that is not
  finite, is refused before it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.store.errors import ObjectExists
from pipeline.store.objects import ObjectStore, off_loop
from pipeline.store.payload_fetch import Spans
from pipeline.store.payload_format import TABLE, BadPayload, Column, Encoded, Pieces, as_pieces, encode
from pipeline.store.payload_read import MAX_HEADER, planned_bytes, read_columns, read_header, read_pieces
from schemas.payload import COLUMNS, ColumnHeader, PayloadHeader

__all__ = [
    "MAX_HEADER",
    "BadPayload",
    "Column",
    "Pieces",
    "Spans",
    "describe_payload",
    "encode_payload",
    "planned_bytes",
    "read_columns",
    "read_header",
    "read_pieces",
    "values",
    "write_payload",
    "write_sidecar",
]


async def write_payload(store: ObjectStore, key: str, columns: Mapping[str, Pieces]) -> PayloadHeader:
    """Writes a sequence's columns as one object and returns its header.

    `columns` has at least `schemas.payload.COLUMNS`, each an array, or a list of arrays that follow each other; the first dimension
    is the row. No array may change meanwhile. Raises BadPayload, ObjectExists, ValueError over 5 GiB, StoreUnavailable.
    """
    encoded = await _encoded(key, columns, tuple(COLUMNS))
    await store.put(key, encoded.buffers)
    return encoded.header


async def write_sidecar(store: ObjectStore, key: str, columns: Mapping[str, Pieces]) -> PayloadHeader:
    """Writes what was made of a payload later, in the same form, and returns its header: of what stands there already where
    another wrote it first, for which the header must be of the same columns.

    Columns of any names; as `write_payload` else.
    """
    encoded = await _encoded(key, columns, ())
    try:
        await store.put(key, encoded.buffers)
    except ObjectExists:
        # Scored or shaped twice, at once or after a crash: the first stands, as its fact may.
        found = await read_header(store, key)
        if _form(found) != _form(encoded.header):
            raise
        return found
    return encoded.header


def describe_payload(
    key: str, columns: Mapping[str, Pieces], required: Collection[str] = tuple(COLUMNS)
) -> PayloadHeader:
    """The header that the columns would have, with their checksums; nothing of them is copied. Raises BadPayload."""
    return encode(key, columns, required).header


def encode_payload(
    key: str, columns: Mapping[str, Pieces], required: Collection[str] = tuple(COLUMNS)
) -> tuple[bytes, PayloadHeader]:
    """The object's bytes in one, for tests and small tools, and its header; `required`: columns that it must have. Raises
    BadPayload."""
    encoded = encode(key, columns, required)
    return b"".join(encoded.buffers), encoded.header


def values(header: PayloadHeader) -> tuple[ColumnHeader, ...]:
    """Its columns but for the tables of checksums."""
    return tuple(column for column in header.columns if not column.name.startswith(TABLE))


async def _encoded(key: str, columns: Mapping[str, Pieces], required: Collection[str]) -> Encoded:
    size = sum(piece.nbytes for pieces in columns.values() for piece in as_pieces(pieces))
    return await off_loop(size, encode, key, columns, required)


def _form(header: PayloadHeader) -> list[tuple[object, ...]]:
    return sorted((column.name, column.dtype, column.shape) for column in header.columns)
