"""The end of a sequence: its payload in the store, then its fact in the log."""

from __future__ import annotations

import asyncio

from pipeline.capture.export import Export
from pipeline.capture.routing import Column, by_stage
from pipeline.capture.spilling import fitting
from pipeline.capture.uploads import Uploads
from pipeline.store import ObjectDamaged, ObjectExists, ObjectMissing, StoreUnavailable
from pipeline.store.keys import payload_key
from pipeline.store.payload import describe_payload, read_header, write_payload
from schemas.envelope import BodyTooLarge, Event
from schemas.facts import Failure, SequenceDispatched, SequenceFailed, SequenceFinished, SequenceOpened
from schemas.names import attempt_id
from schemas.payload import PayloadHeader
from services.process import Context


class Ending:
    def __init__(self, ctx: Context, uploads: Uploads) -> None:
        self._ctx = ctx
        self._uploads = uploads

    async def finish(
        self, opened: Event, reward: float, termination: str, turns: int, exported: Export
    ) -> Failure | None:
        """Publishes `sequence.finished` of the attempt that `opened` began; why not, if the world did not let it."""
        fact = opened.fact
        assert isinstance(fact, SequenceOpened)
        payload = await self._stored(exported) or await self._write(fact.source, fact.id(), exported)
        if isinstance(payload, Failure):
            return payload
        finished = SequenceFinished(
            source=fact.source,
            sample=fact.sample,
            sequence=fact.sequence,
            attempt=fact.attempt,
            reward=reward,
            termination=termination,
            turns=turns,
            contexts=exported.contexts,
            payload=payload,
        )
        try:
            await self._ctx.log.publish(fitting(finished), opened)
        except BodyTooLarge as error:
            return Failure(kind="infra", reason="event_too_large", detail=str(error)[:2000])
        return None

    async def fail(
        self,
        cause: Event,
        fact: SequenceDispatched,
        attempts: int,
        failure: Failure,
        attempt: int,
        exported: Export | None,
    ) -> None:
        """Publishes `sequence.failed`, with the tokens that the attempt had sampled when they can be kept."""
        payload = None
        if exported is not None and exported.contexts:
            written = await self._write(fact.source, attempt_id(fact.sequence, attempt), exported)
            if isinstance(written, Failure):
                self._ctx.logger.warning(
                    "tokens of a failed sequence are not kept: %s (%s)", written.reason, written.detail,
                    extra={"sequence": fact.sequence},
                )  # fmt: skip
            else:
                payload = written
        failed = SequenceFailed(
            source=fact.source,
            sample=fact.sample,
            sequence=fact.sequence,
            attempts=attempts,
            failure=failure,
        )
        if exported is not None and payload is not None:
            kept = failed.model_copy(update={"contexts": exported.contexts, "payload": payload})
            try:
                await self._ctx.log.publish(fitting(kept), cause)
            except BodyTooLarge as error:
                self._ctx.logger.warning(
                    "%s; the payload is at %s", error, payload.key, extra={"sequence": fact.sequence}
                )
            else:
                return
        await self._ctx.log.publish(failed, cause)

    async def _stored(self, exported: Export) -> Failure | None:
        """None once the images that the contexts show are in the store."""
        shown = {image.digest for context in exported.contexts for image in context.images}
        try:
            await self._uploads.settle(shown)
        except StoreUnavailable as error:
            return Failure(kind="infra", reason="store_unavailable", detail=str(error)[:2000])
        except ObjectMissing as error:
            # A journal has turns, and no bytes of images: they died with their host.
            return Failure(kind="infra", reason="image_missing", detail=str(error)[:2000])
        return None

    async def _write(self, source: str, attempt: str, exported: Export) -> PayloadHeader | Failure:
        key, batch = payload_key(self._ctx.run, source, attempt), self._ctx.config.batch
        try:
            columns = by_stage(exported.pieces, batch.pp, batch.pp_layers)
        except ValueError as error:
            return Failure(kind="infra", reason="routing_layers", detail=str(error)[:2000])
        try:
            return await write_payload(self._ctx.store, key, columns)
        except StoreUnavailable as error:
            return Failure(kind="infra", reason="store_unavailable", detail=str(error)[:2000])
        except ObjectExists as error:
            exists = str(error)
        try:
            # Its host wrote it, and died or was refused before it could say so.
            written = await self._written(key, columns)
        except (StoreUnavailable, ObjectMissing, ObjectDamaged) as error:
            return Failure(kind="infra", reason="store_unavailable", detail=str(error)[:2000])
        return written or Failure(kind="infra", reason="payload_exists", detail=exists[:2000])

    async def _written(self, key: str, columns: dict[str, list[Column]]) -> PayloadHeader | None:
        """The header of the object that is there, if its columns are these."""
        found = await read_header(self._ctx.store, key)
        ours = await asyncio.to_thread(describe_payload, key, columns)
        return found if _content(found) == _content(ours) else None


def _content(header: PayloadHeader) -> dict[str, tuple[object, ...]]:
    return {column.name: (column.dtype, column.shape, column.crc32c) for column in header.columns}
