"""Shapes accepted groups whose hooks need columns of the store, or are other people's code. What it decides is
`pipeline.signal.shaping`'s.

Promises:
- for a group it reads the named columns, each once for each time that it is shaped, and nothing else of the store; columns of at
  most `_ROOM` bytes are in work at once, or one group's, and who wants more is not passed by who wants less;
- `sample.shaped` is in the log after its sidecars are in the store, once, whatever is killed or delivered again; a group's
  revision 1 is there only after its revision 0;
- while the store is away it waits, and uses up no delivery;
- a group that hooks cannot shape, `max_deliver` times, is rejected as failed: nothing is trained on advantages that nobody
  made, and its place is filled. One that cannot be shaped anew keeps the advantages that it has;
- hooks that give nothing for `HOOK_S` seconds are given up, and not tried again. Their call goes on, as a thread cannot be ended: of
  these there are `_THREADS` at most, and with so many, who waits for a thread is given up as well; a log line tells of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy.typing as npt

from pipeline.batch.arranging import fit
from pipeline.harnesses.blocking import Threads
from pipeline.log import Delivery, end_tasks, serve_work
from pipeline.signal.hooks import BadHook, Chain, Columns, Signal, built_in, chain, teacher_of
from pipeline.signal.shaping import (
    COLUMN,
    Gathered,
    Tokens,
    all_zero,
    by_token,
    loss_rows,
    rejected,
    shaped,
    stands,
)
from pipeline.store import ObjectStore
from pipeline.store.outage import outlasting
from pipeline.store.payload import read_columns, write_sidecar
from pipeline.store.spilled import spilled_spans
from schemas.envelope import Event
from schemas.facts import (
    Fact,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceFinished,
    SequenceScored,
)
from schemas.keys import sidecar_key
from schemas.payload import PayloadHeader, Span
from schemas.sources import Source
from services.process import Context

ACK_WAIT_S = 10.0
MAX_DELIVER = 5
_GROUPS = 16
_LOOKUPS = 64
"""Facts that are asked for at once."""
_ROOM = 1 << 30
HOOK_S = 300.0
"""For the hooks of one group, with the wait for a thread."""
_THREADS = 2 * _GROUPS
_FactT = TypeVar("_FactT", bound=Fact)
_Read = tuple[PayloadHeader, dict[str, str], bool]
"""Of one object: its header, its columns' names by those in the chain, and whether it is the payload, of which only the rows that
carry loss are read."""


async def serve(ctx: Context, ack_wait_s: float = ACK_WAIT_S, max_deliver: int = MAX_DELIVER) -> None:
    shaper = Shaper(ctx)
    if not shaper.chains:
        ctx.health.ready()
        ctx.logger.info("nothing to do: the built-in rules of every source are the sampler's own to apply")
        await ctx.stop.wait()
        return
    often = {"ack_wait_s": ack_wait_s, "max_deliver": max_deliver}
    accepted = await ctx.log.work("hook", SampleAccepted.type, **often)
    graded = await ctx.log.work("hook-graded", SampleGraded.type, **often)
    ctx.health.ready()
    try:
        await _all(
            (
                serve_work(accepted, _GROUPS, shaper.accepted, ctx.stop, shaper.reject),
                serve_work(graded, _GROUPS, shaper.graded, ctx.stop),
            )
        )
    finally:
        shaper.close()
        ctx.logger.info(
            "shaped %d groups; read %d bytes of the store, where the columns that their hooks name have %d",
            shaper.groups,
            shaper.bytes_read,
            shaper.bytes_named,
        )


class Hung(Exception):
    """Hooks that gave nothing in their time; the message is for people."""


class Shaper:
    """See the module's promises. `groups`, `bytes_read` and `bytes_named` count what was shaped since it was made."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.chains: dict[str, tuple[Source, Chain]] = {}
        for source in ctx.config.sources:
            if source.groups and not (built_in(source) and chain(source).pure):
                self.chains[source.name] = source, chain(source)
        self._lookups = asyncio.Semaphore(_LOOKUPS)
        self._room = Room(_ROOM)
        self._threads = Threads(_THREADS, ctx.measures.waits)
        self.groups = self.bytes_read = self.bytes_named = 0

    def close(self) -> None:
        """Ends the threads that are idle."""
        self._threads.close()

    async def accepted(self, delivery: Delivery) -> None:
        fact = delivery.event.fact
        assert isinstance(fact, SampleAccepted)
        try:
            if fact.source in self.chains:
                await self.shape(delivery.event, 0)
        except Hung as error:
            await self.reject(delivery, str(error))
            await delivery.bury(str(error))
        else:
            await delivery.ack()

    async def graded(self, delivery: Delivery) -> None:
        fact = delivery.event.fact
        assert isinstance(fact, SampleGraded)
        try:
            if fact.revision and fact.source in self.chains:
                await self._anew(fact, delivery.event)
        except Hung as error:
            await delivery.bury(str(error))
        else:
            await delivery.ack()

    async def _anew(self, late: SampleGraded, event: Event) -> None:
        accepted = await self._ctx.log.last(SampleAccepted.type, late.source, late.sample)
        # What came before a group was accepted is in its first revision.
        if accepted is not None and accepted.seq < event.seq:
            if await self._ctx.log.last(SampleRejected.type, late.source, late.sample) is not None:
                return
            first = await self._ctx.log.last(SampleShaped.type, late.source, late.sample)
            if first is not None or await self.shape(accepted, 0):
                await self.shape(accepted, late.revision, event)

    async def reject(self, delivery: Delivery, _: str) -> None:
        """The last word on a group that cannot be shaped."""
        fact = delivery.event.fact
        assert isinstance(fact, SampleAccepted)
        if await self._ctx.log.last(SampleShaped.type, fact.source, fact.sample) is None:
            await self._ctx.log.publish(rejected(fact), delivery.event)

    async def shape(self, accepted: Event, revision: int, cause: Event | None = None) -> bool:
        """Publishes what becomes of an accepted group of a source of ours; False: a rejection. Raises BadHook, Hung, what a hook
        raises, StoreError, BodyTooLarge."""
        fact = accepted.fact
        assert isinstance(fact, SampleAccepted)
        source, hooks = self.chains[fact.source]
        group, scores = await self._gather(accepted, source, hooks, revision)
        reads = [_reads(finished, scores, hooks.columns) for finished in group.finished]
        named = sum(h.column(name).bytes for each in reads for h, names, _ in each for name in names.values())
        store = self._ctx.store.scope()
        async with self._room.taken(named):
            columns = await outlasting(
                lambda: _all(_columns(store, *both) for both in zip(group.finished, reads, strict=True)),
                self._ctx.logger,
            )
            signal = await self._run(hooks, group.signal(columns))
            if not revision and source.accept.drop_all_zero and all_zero(signal):
                result = rejected(fact, "all_zero")
            else:
                sidecars = await self._write(group, signal, revision)
                result = shaped(fact, hooks, signal, sidecars, revision)
        self.groups += 1
        self.bytes_read += store.counters.bytes_read
        self.bytes_named += named
        await self._ctx.log.publish(result, cause or accepted)
        return isinstance(result, SampleShaped)

    async def _run(self, hooks: Chain, signal: Signal) -> Signal:
        named = f"its hooks ({', '.join(hooks.kinds)})"

        def run() -> Signal:
            return hooks.run(signal)

        # Under which the log tells of a call that goes on.
        run.__qualname__ = named
        limit = asyncio.timeout(HOOK_S)
        try:
            async with limit:
                return await self._threads.run(run)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Hung(f"{named} gave nothing in {HOOK_S:g} s") from error

    async def _gather(
        self, accepted: Event, source: Source, hooks: Chain, revision: int
    ) -> tuple[Gathered, dict[tuple[str, str], SequenceScored]]:
        """The group's facts, and the answers of the teachers that the hooks name, by sequence and teacher."""
        fact = accepted.fact
        assert isinstance(fact, SampleAccepted)
        completed, own, late = await _all(
            (
                self._fact(SampleCompleted, source.name, fact.sample),
                self._fact(SampleGraded, source.name, fact.sample),
                self._ctx.log.last(SampleGraded.type, source.name, f"{fact.sample}-r1"),
            )
        )
        graded = stands(own, late, accepted, revision)
        teachers = dict.fromkeys(teacher_of(name) for name in hooks.columns if teacher_of(name))
        asked = [(sequence, teacher) for sequence in completed.sequences for teacher in teachers]
        finished, scored = await _all(
            (
                _all(self._fact(SequenceFinished, source.name, sequence) for sequence in completed.sequences),
                _all(self._fact(SequenceScored, source.name, f"{each}-{teacher}") for each, teacher in asked),
            )
        )
        group = Gathered(source, fact, completed, graded, tuple(finished), fit(self._ctx.config.batch))
        return group, dict(zip(asked, scored, strict=True))

    async def _fact(self, model: type[_FactT], source: str, id_: str) -> _FactT:
        """A fact that stands before a group is accepted. Raises LookupError."""
        async with self._lookups:
            event = await self._ctx.log.last(model.type, source, id_)
        if event is None or not isinstance(event.fact, model):
            raise LookupError(f"{model.type} of {id_} is not in the log, and its group is accepted")
        return event.fact

    async def _write(self, group: Gathered, made: Signal, revision: int) -> list[PayloadHeader | None]:
        async def write(finished: SequenceFinished, tokens: Tokens) -> PayloadHeader | None:
            if tokens is None:
                return None
            key = sidecar_key(finished.payload.key, f"{COLUMN}.{revision}")
            return await write_sidecar(self._ctx.store, key, {COLUMN: tokens})

        members = list(zip(group.finished, by_token(made), strict=True))
        return await outlasting(lambda: _all(write(*member) for member in members), self._ctx.logger)


def _reads(
    finished: SequenceFinished, scores: Mapping[tuple[str, str], SequenceScored], columns: Sequence[str]
) -> list[_Read]:
    """What to read of a member: of a teacher that could not score it nothing. Raises KeyError on a column that there is not."""
    objects: dict[str, dict[str, str]] = {}
    for name in columns:
        teacher = teacher_of(name)
        objects.setdefault(teacher, {})[name] = name.removeprefix(f"teacher.{teacher}.")
    found: list[_Read] = []
    for teacher, names in objects.items():
        if not teacher:
            found.append((finished.payload, names, True))
        elif (scores_ := scores[finished.sequence, teacher].scores) is not None:
            found.append((scores_, names, False))
    return found


async def _columns(store: ObjectStore, finished: SequenceFinished, reads: Sequence[_Read]) -> Columns:
    """A member's columns by their names in the chain, a row for each loss token. Raises BadHook on one that is not by token."""
    loss_tokens = sum(context.loss_tokens() for context in finished.contexts)
    found: dict[str, npt.NDArray[Any]] = {}
    rows: list[Span] = []
    if any(own for _, _, own in reads):
        rows = loss_rows(finished.contexts, await spilled_spans(store, finished.payload, finished.contexts))
    for header, names, own in reads:
        for name, column in names.items():
            has, tokens = header.column(column).shape[0], loss_tokens
            if own:
                tokens = header.column("tokens").shape[0]
            if has != tokens:
                raise BadHook(
                    f"column {name!r} of {header.key} has {has} rows, and is read by token: {tokens}"
                )
        # No gap is read over: what is between two named columns is not asked for.
        read = await read_columns(store, header, tuple(names.values()), rows if own else None, gap=0)
        found |= {name: read[column] for name, column in names.items()}
    return found


class Room:
    """Bytes that may be taken at once; who wants more than there are has them alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        # In turn: past those that take little, one that wants much would wait for ever.
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: not self._taken or self._taken + size <= self._size)
            self._taken += size
        try:
            yield
        finally:
            self._taken -= size
            async with self._changed:
                self._changed.notify_all()


async def _all(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results in order. After a failure, which is raised, nothing of it goes on."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(task for task in tasks if not task.done())
