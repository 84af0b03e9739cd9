"""A run's place in the object store: there, writable, written once, and of one log alone.

`runs/<run>/run.json` names the log that the objects beside it belong to, by the id of its `run.started`.

Promises:
- a bucket that does not exist is made, and expires the run's payloads if the configuration asks for that; a store that cannot be written, or that lets a second writer replace an object,
  is refused before a service starts;
- a run whose place holds the objects of another log is refused: two runs of one name in two brokers are never mixed;
- a run that goes on finds the objects that it left, or is refused.
"""

from __future__ import annotations

import asyncio
import time

from pipeline.store import ObjectExists, ObjectMissing, ObjectStore, StoreUnavailable
from pipeline.store.claims import claim_body
from schemas.config import RunConfig
from schemas.keys import claim_key
from services.cli.embedded import LaunchError

_PATIENCE_S = 10.0
_AGAIN_S = 0.5
_REFUSED = (401, 403)


async def open_place(config: RunConfig, resumed: bool, wait_s: float = 0.0) -> ObjectStore:
    """The store, with its bucket; refuses a new run whose place is taken. A store that does not answer is waited for so long.

    Raises StoreError, LaunchError.
    """
    store = ObjectStore.open(config.store, patience_s=max(_PATIENCE_S, wait_s))
    if config.store.url.startswith("s3://"):
        await _bucket(config, wait_s)
    if not resumed and await store.size(claim_key(config.run)) is not None:
        raise _taken(config)
    return store


async def _bucket(config: RunConfig, wait_s: float) -> None:
    from pipeline.store.bucket import ensure_bucket

    deadline = time.monotonic() + wait_s
    while True:
        try:
            await asyncio.to_thread(ensure_bucket, config.store)
            return
        except StoreUnavailable as error:
            # S3's own answer hangs on the SDK's error: who is refused is told at once.
            answer = getattr(error.__cause__, "response", None)
            if getattr(answer, "status", 0) in _REFUSED or time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_AGAIN_S)


async def claim(store: ObjectStore, config: RunConfig, log_id: str, begun: bool) -> None:
    """Writes the claim of the log whose `run.started` has this id, or finds it; then has the bucket expire the run's payloads
    where that is configured: never those of a run whose place it is not.

    `begun`: the log names objects that are not here, so that the claim must be. Raises StoreError, LaunchError.
    """
    key = claim_key(config.run)
    mine = claim_body(log_id)
    if begun:
        try:
            found = await store.get(key)
        except ObjectMissing:
            raise LaunchError(
                f"run {config.run} has begun, but {config.store.url} does not hold its objects; give the store that it was "
                "started with, or name another run"
            ) from None
    else:
        try:
            await store.create(key, mine)
            # Some servers take no notice of If-None-Match: every promise of a single writer would be void. Other bytes,
            # as our own are what a retry is content to find.
            await store.create(key, b"{}")
        except ObjectExists:
            pass
        else:
            raise LaunchError(
                f"object store {config.store.url} lets a second writer replace an object: it ignores If-None-Match on PUT; "
                "use a server that honours it"
            )
        found = await store.get(key)
    if found != mine:
        raise _taken(config)
    if config.retention.expire_days and config.store.url.startswith("s3://"):
        from pipeline.store.expiry import set_expiry

        await asyncio.to_thread(set_expiry, config.store, config.run, config.retention.expire_days)


def _taken(config: RunConfig) -> LaunchError:
    return LaunchError(
        f"{config.store.url} holds the objects of another run {config.run}, one that is not in this broker; name another run "
        "or another store"
    )
