"""Spans that an event has no room for: they are left to the payload, whose column `segments` has them. Pure.

Promises: a context gives up all of its spans or none, and none where it has flags; the longest lists go first, and no more of
them than must; what is left says how many tokens carry loss. `pipeline.batch.segments` is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import orjson

from schemas.facts import MAX_BODY, SequenceFailed, SequenceFinished
from schemas.payload import ContextMeta, Frozen

Told = TypeVar("Told", SequenceFinished, SequenceFailed)


def fitting(fact: Told) -> Told:
    """The fact with its contexts' spans, or, where it would be over the limit of an event, without the longest of them."""
    room = MAX_BODY - _size(fact.model_copy(update={"contexts": ()}))
    return fact.model_copy(update={"contexts": spill(fact.contexts, room)})


def spill(contexts: Sequence[ContextMeta], room: int) -> tuple[ContextMeta, ...]:
    """The contexts, of which those with the longest lists of spans have left them to the payload until all fit into `room` bytes
    of JSON, or none is left that could."""
    found = list(contexts)
    sizes = [_size(context) for context in contexts]
    over = sum(sizes) + len(sizes) - 1 - room
    shorter = {
        i: context.model_copy(update={"loss_spans": (), "spilled": context.loss_tokens()})
        for i, context in enumerate(contexts if over > 0 else ())
        if context.loss_spans and not context.flags
    }
    saved = {i: sizes[i] - _size(context) for i, context in shorter.items()}
    for i in sorted(saved, key=lambda i: -saved[i]):
        if over <= 0 or saved[i] <= 0:
            break
        found[i] = shorter[i]
        over -= saved[i]
    return tuple(found)


def _size(part: Frozen) -> int:
    """Bytes in an event: as `schemas.envelope.encode` writes it."""
    return len(orjson.dumps(part.model_dump(mode="json")))
