"""Whose objects a place holds: `runs/<run>/run.json` names the log that claimed it, by the id of its run.started."""

from __future__ import annotations

import orjson

from pipeline.store.errors import ObjectMissing
from pipeline.store.objects import ObjectStore
from schemas.keys import claim_key


def claim_body(log_id: str) -> bytes:
    """What the claim of a log says, byte for byte."""
    return orjson.dumps({"log": log_id})


async def claim_of(store: ObjectStore, run: str) -> bytes | None:
    """The claim that stands there; None: nobody has the place. Raises StoreUnavailable."""
    try:
        return await store.get(claim_key(run))
    except ObjectMissing:
        return None
