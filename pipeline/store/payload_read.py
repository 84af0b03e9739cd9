"""Reads of payload objects: the header where no event gives it, and columns by rows. See `payload_fetch` for what is fetched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.store.errors import ObjectDamaged, ObjectMissing
from pipeline.store.objects import ObjectStore, off_loop
from pipeline.store.payload_fetch import Fetch, Spans
from pipeline.store.payload_format import PREFIX, Column, parse
from pipeline.store.ranges import COALESCE_GAP
from schemas.payload import PayloadHeader

MAX_HEADER = 16 << 20
"""Bytes of safetensors header that `read_header` will fetch from an object it does not know."""


async def read_header(store: ObjectStore, key: str) -> PayloadHeader:
    """The header of an object that no event describes to the caller. Raises ObjectMissing, ObjectDamaged, StoreUnavailable."""
    size = await store.size(key)
    if size is None:
        raise ObjectMissing(key, store.url)
    if size <= PREFIX:
        raise ObjectDamaged(key, f"{size} bytes are no payload")
    (prefix,) = await store.get_ranges(key, [(0, PREFIX)], size=size)
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(MAX_HEADER, size - PREFIX):
        raise ObjectDamaged(key, f"its header claims {length} bytes of {size}, limit {MAX_HEADER}")
    (text,) = await store.get_ranges(key, [(PREFIX, PREFIX + length)], size=size)
    try:
        return parse(key, text, size)
    except (ValueError, LookupError, TypeError) as error:
        raise ObjectDamaged(key, f"its header is no payload header ({error})") from error


async def read_columns(
    store: ObjectStore,
    header: PayloadHeader,
    names: Sequence[str],
    spans: Spans = None,
    gap: int = COALESCE_GAP,
) -> dict[str, Column]:
    """The named columns, the rows of `spans` (default: all) one after the other, as read-only arrays: views of what was fetched
    where there is one span, else a copy.

    `spans` by column: of each its own. `gap` 0: no byte between two columns is fetched. Raises KeyError on a column that there
    is not, ValueError on a span outside it, ObjectDamaged, ObjectMissing, StoreUnavailable.
    """
    pieces = await read_pieces(store, header, names, spans, gap)
    size = sum(view.nbytes for views in pieces.values() if len(views) > 1 for view in views)
    return await off_loop(size, _joined, header, pieces)


async def read_pieces(
    store: ObjectStore,
    header: PayloadHeader,
    names: Sequence[str],
    spans: Spans = None,
    gap: int = COALESCE_GAP,
) -> dict[str, list[Column]]:
    """`read_columns` without a copy: of each column a read-only view for each span. A view keeps the answer of a whole GET in
    memory."""
    fetch = Fetch.of(header, names, spans, gap)
    bodies = await store.get_ranges(header.key, fetch.gets, size=header.bytes, gap=0) if fetch.gets else []
    return await off_loop(fetch.bytes, fetch.cut, bodies)


def planned_bytes(
    header: PayloadHeader, names: Sequence[str], spans: Spans = None, gap: int = COALESCE_GAP
) -> int:
    """Bytes that `read_columns` would fetch. Pure; raises as it does."""
    return Fetch.of(header, names, spans, gap).bytes


def _joined(header: PayloadHeader, pieces: dict[str, list[Column]]) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for name, views in pieces.items():
        if len(views) == 1:
            found[name] = views[0]
            continue
        column = header.column(name)
        found[name] = np.concatenate([np.empty((0, *column.shape[1:]), column.dtype), *views])
        found[name].flags.writeable = False
    return found
