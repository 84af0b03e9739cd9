"""Loss spans that were too many for an event, read from the payload that has them.

Promise: what an event says of their number is what is found, or the object counts as damaged.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.batch.segments import spans_of_segments
from pipeline.store.errors import ObjectDamaged
from pipeline.store.objects import ObjectStore
from pipeline.store.payload import read_columns
from schemas.payload import ContextMeta, PayloadHeader, Span


async def spilled_spans(
    store: ObjectStore, header: PayloadHeader, contexts: Sequence[ContextMeta]
) -> dict[int, tuple[Span, ...]]:
    """Of each context whose event left its loss spans to the payload, by its place in `contexts`, those spans. Reads nothing
    where there is none. `contexts`: all of the sequence's. Raises StoreError."""
    left = [c for c, context in enumerate(contexts) if context.spilled]
    if not left:
        return {}
    segments = (await read_columns(store, header, ["segments"]))["segments"]
    found: dict[int, tuple[Span, ...]] = {}
    for c in left:
        try:
            spans = found[c] = spans_of_segments(segments, c)
        except ValueError as error:
            raise ObjectDamaged(header.key, str(error), "segments") from error
        tokens = sum(span.end - span.start for span in spans)
        if tokens != contexts[c].spilled:
            raise ObjectDamaged(
                header.key,
                f"its segments have {tokens} loss tokens in context {c}, the event says {contexts[c].spilled}",
                "segments",
            )
    return found
