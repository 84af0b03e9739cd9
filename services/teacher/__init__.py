"""Scores finished sequences with the teachers of their sources, for on-policy distillation.

Promises:
- each teacher of a source answers once for every finished sequence of it: with scores, or with why there will be none;
- scores are at temperature 1 over the whole vocabulary, of exactly the sequence's loss tokens, in a sidecar beside its
  payload; the payload is read by the one column that is needed, and never written;
- while a teacher or the store is away nothing is lost and nobody else waits: of each teacher and source at most
  `concurrency` sequences are with one process and `_PROCESSES` times as many with all, and the others stay in the log;
- a number that is no log-probability (NaN, or the -9999 that vLLM writes for -inf) fails its sequence. It is not clipped:
  an advantage would be made of it.

A further process of this service shares the work of the first.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import numpy.typing as npt

from pipeline.engines.scores import Scores
from pipeline.log import Delivery, Work, end_tasks, serve_work
from pipeline.log.dead_letters import printable
from pipeline.signal.chunks import chunks, rows_of
from pipeline.store import ObjectDamaged, ObjectExists, ObjectMissing
from pipeline.store.outage import outlasting
from pipeline.store.payload import read_columns, write_sidecar
from pipeline.store.spilled import spilled_spans
from schemas.config import Teacher
from schemas.facts import SequenceFinished, SequenceScored
from schemas.keys import sidecar_key
from schemas.names import attempt_id, teacher_work
from schemas.payload import PayloadHeader, Span
from services.process import Context
from services.teacher.asking import Asker, Unscorable
from services.teacher.engines import open_scorer

ACK_WAIT_S = 10.0
_PROCESSES = 4
"""Of this service that find work at the same time, at most."""
_REASON = 500
_LOWEST, _HIGHEST = -9999.0, 1e-3
"""Nats: between them is a log-probability, up to rounding."""


async def serve(ctx: Context) -> None:
    """Runs until `ctx.stop`, with nothing to do where no source has a teacher. Raises what `open_scorer` raises."""
    named = {name for source in ctx.config.sources for name in source.teachers}
    teachers = [teacher for teacher in ctx.config.teachers if teacher.name in named]
    if not teachers:
        ctx.health.ready()
        ctx.logger.info("nothing to do: no source names a teacher in sources.teachers")
        await ctx.stop.wait()
        return
    askers: list[Asker] = []
    tasks: list[asyncio.Task[None]] = []
    watching: list[asyncio.Task[None]] = []
    try:
        for teacher in teachers:
            scorer = await open_scorer(teacher, ctx.config.engine.threads)
            askers.append(asker := Asker(teacher, scorer, ctx.logger))
            watching.append(asyncio.create_task(asker.watch()))
            for source in ctx.config.sources:
                if teacher.name in source.teachers:
                    work = await _work(ctx, teacher, source.name)
                    desk = Desk(ctx, teacher, asker)
                    scoring = serve_work(work, teacher.concurrency, desk.handle, ctx.stop, desk.last_word)
                    tasks.append(asyncio.create_task(scoring))
        ctx.health.ready()
        done, _ = await asyncio.wait((*tasks, *watching), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await asyncio.gather(*tasks)
    finally:
        await end_tasks((*tasks, *watching))
        for asker in askers:
            await asker.close()


async def _work(ctx: Context, teacher: Teacher, source: str) -> Work:
    return await ctx.log.work(
        teacher_work(teacher.name, source),
        "sequence.finished",
        source=source,
        ack_wait_s=ACK_WAIT_S,
        max_pending=_PROCESSES * teacher.concurrency,
    )


class Desk:
    """Scores the sequences of one source with one teacher."""

    def __init__(self, ctx: Context, teacher: Teacher, asker: Asker) -> None:
        self._ctx, self._teacher, self._asker = ctx, teacher, asker

    async def handle(self, delivery: Delivery) -> None:
        fact = _finished(delivery)
        scored = f"{fact.sequence}-{self._teacher.name}"
        if await self._ctx.log.last(SequenceScored.type, fact.source, scored) is None:
            began = time.monotonic()
            try:
                header = await self._scored(fact)
            except (Unscorable, ObjectMissing, ObjectDamaged, ObjectExists) as error:
                self._ctx.logger.warning(
                    "teacher %s: %s", self._teacher.name, error, extra={"sequence": fact.sequence}
                )
                answer = self._answer(fact, None, str(error))
            else:
                answer = self._answer(fact, header, seconds=time.monotonic() - began)
            await self._ctx.log.publish(answer, delivery.event)
        await delivery.ack()

    async def last_word(self, delivery: Delivery, reason: str) -> None:
        """A sequence that fails its scoring in ways that nobody foresaw does not hold its group for ever."""
        await self._ctx.log.publish(self._answer(_finished(delivery), None, reason), delivery.event)

    def _answer(
        self,
        fact: SequenceFinished,
        header: PayloadHeader | None,
        failure: str | None = None,
        seconds: float = 0.0,
    ) -> SequenceScored:
        return SequenceScored(
            source=fact.source,
            sample=fact.sample,
            sequence=fact.sequence,
            teacher=self._teacher.name,
            tokens=sum(context.loss_tokens() for context in fact.contexts) if header is not None else 0,
            scores=header,
            failure=printable(failure, _REASON) if failure is not None else None,
            seconds=seconds,
        )

    async def _scored(self, fact: SequenceFinished) -> PayloadHeader:
        """The sidecar of the sequence, written; one without rows where nothing carries loss."""
        teacher, store = self._teacher, self._ctx.store
        for number, context in enumerate(fact.contexts):
            if context.images and context.loss_tokens():
                # It would score the placeholders' text.
                raise Unscorable(f"context {number}: it shows images, and teachers are sent tokens alone")
        spilled = await outlasting(
            lambda: spilled_spans(store, fact.payload, fact.contexts), self._ctx.logger
        )
        every = [
            (context.offset, spilled.get(c, context.loss_spans)) for c, context in enumerate(fact.contexts)
        ]
        contexts = sorted(((offset, loss) for offset, loss in every if loss), key=lambda each: each[0])
        spans = [Span(start=offset, end=offset + loss[-1].end) for offset, loss in contexts]
        read = await outlasting(
            lambda: read_columns(store, fact.payload, ["tokens"], spans), self._ctx.logger
        )
        parts: list[Scores] = []
        at = 0
        for number, ((_, loss), span) in enumerate(zip(contexts, spans, strict=True)):
            row = read["tokens"][at : at + span.end - span.start]
            at += len(row)
            # A server is sent less than it takes, as it samples a token after them.
            for chunk in chunks(rows_of(loss), teacher.max_context - 1, teacher.overlap):
                if chunk.rows[0] == 0:
                    raise Unscorable(
                        f"context {number}: its first token carries loss, and nothing is before it"
                    )
                name = f"{attempt_id(fact.sequence, fact.attempt)}-{teacher.name}-{number}-{chunk.start}"
                scores = await self._asker.ask(row[chunk.start : chunk.end], name, fact.sequence)
                part = _of_rows(scores, chunk.rows - chunk.start)
                if (wrong := _wrong(part)) is not None:
                    place, value = wrong
                    raise Unscorable(
                        f"context {number}, token {chunk.rows[place]}: the teacher gives {value:g} for a log-probability"
                    )
                parts.append(part)
        key = sidecar_key(fact.payload.key, f"teacher.{teacher.name}")
        columns = _columns(parts, teacher.top_k)
        return await outlasting(lambda: write_sidecar(store, key, columns), self._ctx.logger)


def _finished(delivery: Delivery) -> SequenceFinished:
    assert isinstance(delivery.event.fact, SequenceFinished)
    return delivery.event.fact


def _of_rows(scores: Scores, rows: npt.NDArray[np.int64]) -> Scores:
    return Scores(scores.logprobs[rows], scores.top_ids[rows], scores.top_logprobs[rows])


def _wrong(scores: Scores) -> tuple[int, float] | None:
    """The first row with a number that is no log-probability, and that number."""
    every = np.column_stack((scores.logprobs, scores.top_logprobs))
    bad = np.argwhere(~((every > _LOWEST) & (every < _HIGHEST)))
    return (int(bad[0, 0]), float(every[tuple(bad[0])])) if len(bad) else None


def _columns(parts: list[Scores], top_k: int) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
    none = Scores(np.empty(0, np.float32), np.empty((0, top_k), np.int32), np.empty((0, top_k), np.float32))
    parts = [none, *parts]
    columns: dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]] = {
        "logprobs": np.concatenate([part.logprobs for part in parts])
    }
    if top_k:
        columns["top_ids"] = np.concatenate([part.top_ids for part in parts])
        columns["top_logprobs"] = np.concatenate([part.top_logprobs for part in parts])
    return columns
