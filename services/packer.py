"""The packer of one data-parallel coordinate: follows the batches, builds its windows ahead, hands them to its ranks.

Promises:
- a window is fetched once, by range, verified, built in a sealed memfd and shared; it is freed when every rank that
  holds it acknowledges or vanishes;
- at most `packer.memory_bytes` of windows exist at once; one that is larger is refused with the number needed;
- `window.packed` is in the log once for every window that a rank was given, whatever is rebuilt, killed or restarted;
- while the store is away, building waits and goes on when it is back; a window that cannot be built (a damaged or
  missing object) is refused to the rank that asks, with its reason, and tried anew at the next ask.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from pipeline.batch.windows import Array, Window, pack, plan_window, shapes, split
from pipeline.feed.ahead import WindowId, decide
from pipeline.feed.memfd import Layout, plan_layout, seal
from pipeline.feed.server import WindowRefused, listen, serve_windows
from pipeline.feed.wire import Answer, socket_path
from pipeline.log import end_tasks
from pipeline.store import ObjectStore, StoreError
from pipeline.store.outage import outlasting
from pipeline.store.payload import read_columns
from schemas.envelope import Event
from schemas.facts import BatchYielded, StepTrained, WindowPacked
from schemas.plan import Plan
from services.process import Context


async def serve(ctx: Context) -> None:
    """Runs until `ctx.stop`. Raises SocketTaken or SocketPathTooLong when it cannot serve its ranks."""
    path = socket_path(ctx.config, ctx.index)
    listening = listen(path)
    mine = path.stat().st_ino
    packer = Packer(ctx)
    try:
        trained = await ctx.log.latest("step.trained")
        if trained is not None and isinstance(trained.fact, StepTrained):
            packer.trained(trained.fact.step)
        tasks = [
            asyncio.create_task(work)
            for work in (packer.follow_batches(), packer.follow_training(), serve_windows(listening, packer))
        ]
        stopping = asyncio.create_task(ctx.stop.wait())
        done, pending = await asyncio.wait(
            [*tasks, stopping, packer.fault], return_when=asyncio.FIRST_COMPLETED
        )
        await end_tasks(pending)
        for task in done:
            task.result()
    finally:
        await packer.close()
        listening.close()
        # A successor may have replaced it already.
        if path.exists() and path.stat().st_ino == mine:
            path.unlink()


@dataclass
class _Planned:
    """A window that may be built."""

    window: Window
    layout: Layout
    last: bool
    count: int
    event: Event


@dataclass
class _Standing:
    """A window that is built, or being built."""

    planned: _Planned
    task: asyncio.Task[None] | None = None
    fd: int | None = None
    holders: set[object] = field(default_factory=set[object])


@dataclass
class _Ask:
    rank: object
    window: WindowId
    answer: asyncio.Future[tuple[Answer, int]]


class Packer:
    """State and effects; which window is built or dropped is decided by `pipeline.feed.ahead`.

    Every change of state ends in `_settle`, which brings the world in line with the decision: nothing polls.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._settings = ctx.config.packer
        self._trained = 0
        self._cursor = WindowId(1, 0)
        self._planned: dict[WindowId, _Planned] = {}
        self._counts: dict[int, int] = {}
        self._unusable: dict[int, str] = {}
        """Steps whose plan cannot be used, and why."""
        self._failed: set[WindowId] = set()
        """Not built ahead again: the reason is for the rank that asks."""
        self._standing: dict[WindowId, _Standing] = {}
        self._asks: list[_Ask] = []
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a window's building met what nobody foresaw."""

    # What happens.

    async def follow_batches(self) -> None:
        """Loads and checks the plan of every batch that is not trained yet."""
        async for event in self._ctx.log.subscribe("batch.yielded"):
            if isinstance(event.fact, BatchYielded) and event.fact.step > self._trained:
                await self._load(event, event.fact)
                self._settle()

    async def follow_training(self) -> None:
        async for event in self._ctx.log.subscribe("step.trained"):
            if isinstance(event.fact, StepTrained):
                self.trained(event.fact.step)
                self._settle()

    def trained(self, step: int) -> None:
        """Steps up to this one are never asked for again: one step, one parent checkpoint."""
        if step <= self._trained:
            return
        self._trained = step
        self._cursor = max(self._cursor, WindowId(step + 1, 0))
        self._planned = {window: planned for window, planned in self._planned.items() if window.step > step}
        self._counts = {s: count for s, count in self._counts.items() if s > step}
        self._unusable = {s: reason for s, reason in self._unusable.items() if s > step}
        self._failed = {window for window in self._failed if window.step > step}

    async def hold(self, rank: object, window: WindowId) -> tuple[Answer, int]:
        if (refusal := self._refusal(window)) is not None:
            raise WindowRefused(refusal)
        self._cursor = window.after()
        self._failed.discard(window)
        ask = _Ask(rank, window, asyncio.get_running_loop().create_future())
        self._asks.append(ask)
        try:
            self._settle()
            return await ask.answer
        finally:
            if ask in self._asks:
                self._asks.remove(ask)
                self._settle()

    def release(self, rank: object, window: WindowId) -> None:
        standing = self._standing.get(window)
        if standing is not None and rank in standing.holders:
            standing.holders.discard(rank)
            if not standing.holders:
                self._drop(window)
            self._settle()

    def gone(self, rank: object) -> None:
        for window in [window for window, standing in self._standing.items() if rank in standing.holders]:
            self.release(rank, window)

    async def close(self) -> None:
        """Drops every window."""
        await end_tasks({standing.task for standing in self._standing.values() if standing.task})
        for window in list(self._standing):
            self._drop(window)

    # What is done about it.

    def _settle(self) -> None:
        for ask in list(self._asks):
            if (refusal := self._refusal(ask.window)) is not None:
                self._refuse(ask.window, refusal)
            elif (standing := self._standing.get(ask.window)) is not None and standing.fd is not None:
                self._asks.remove(ask)
                # A rank that was cancelled while this ran holds nothing.
                if not ask.answer.done():
                    standing.holders.add(ask.rank)
                    planned = standing.planned
                    answer = Answer(
                        step=ask.window.step,
                        microbatch=ask.window.microbatch,
                        microbatches=planned.count,
                        last=planned.last,
                    )
                    ask.answer.set_result((answer, standing.fd))
        decision = decide(
            known={w: planned.layout.size for w, planned in self._planned.items() if w not in self._failed},
            standing={w: standing.planned.layout.size for w, standing in self._standing.items()},
            held=frozenset(w for w, standing in self._standing.items() if standing.holders),
            asked=[ask.window for ask in self._asks],
            cursor=self._cursor,
            prefetch=self._settings.prefetch,
            budget=self._settings.memory_bytes,
        )
        for window in decision.drop:
            self._drop(window)
        for window in decision.build:
            standing = self._standing[window] = _Standing(self._planned[window])
            standing.task = asyncio.create_task(self._build(window, standing))
            standing.task.add_done_callback(self._built)

    def _refusal(self, window: WindowId) -> str | None:
        if window.step <= self._trained:
            return f"step {window.step} is trained already (the log is at step {self._trained}); resume from its checkpoint"
        if window.step in self._unusable:
            return self._unusable[window.step]
        if window.step in self._counts and window.microbatch >= self._counts[window.step]:
            return f"step {window.step} has {self._counts[window.step]} micro-batches a rank; there is no {window.microbatch}"
        planned = self._planned.get(window)
        if planned is not None and planned.layout.size > self._settings.memory_bytes:
            return (
                f"step {window.step} micro-batch {window.microbatch} needs {planned.layout.size} bytes, packer.memory_bytes is "
                f"{self._settings.memory_bytes}; raise it to at least {planned.layout.size}, or lower batch.token_budget"
            )
        return None

    def _refuse(self, window: WindowId, reason: str) -> None:
        for ask in [ask for ask in self._asks if ask.window == window]:
            self._asks.remove(ask)
            if not ask.answer.done():
                ask.answer.set_exception(WindowRefused(reason))

    def _drop(self, window: WindowId) -> None:
        standing = self._standing.pop(window)
        if standing.task is not None:
            standing.task.cancel()
        if standing.fd is not None:
            os.close(standing.fd)
            standing.fd = None

    async def _load(self, event: Event, fact: BatchYielded) -> None:
        dp = self._ctx.index
        try:
            body = await outlasting(lambda: self._ctx.store.get(fact.plan), self._ctx.logger)
            planned = await asyncio.to_thread(_read_plan, body, self._ctx.run, fact, dp, event)
        except (StoreError, ValueError, IndexError) as error:
            reason = f"the plan of step {fact.step} cannot be used: {error}"
            self._ctx.logger.error(reason, extra={"step": fact.step})
            self._unusable[fact.step] = reason
            return
        if fact.step > self._trained:
            self._planned.update(planned)
            self._counts[fact.step] = fact.microbatches

    async def _build(self, window: WindowId, standing: _Standing) -> None:
        scope = self._ctx.store.scope()
        planned = standing.planned
        try:
            columns = await outlasting(lambda: _fetch(scope, planned.window), self._ctx.logger)
            # A thread cannot be cancelled: it is waited for, so that its descriptor is never lost.
            sealing = asyncio.create_task(asyncio.to_thread(_seal, planned, columns))
            try:
                fd = await asyncio.shield(sealing)
            except asyncio.CancelledError:
                await asyncio.wait([sealing])
                if sealing.exception() is None:
                    os.close(sealing.result())
                raise
        except (StoreError, ValueError, KeyError, OSError) as error:
            reason = f"step {window.step} micro-batch {window.microbatch} cannot be packed: {error}"
            self._ctx.logger.error(reason, extra={"step": window.step})
            standing.task = None
            self._drop(window)
            self._failed.add(window)
            self._refuse(window, reason)
        else:
            try:
                # Before it is handed over: what a rank has read is in the log, whoever is killed next. A rebuilt window
                # is decided already, and the first fact stands.
                await self._ctx.log.publish(_fact(planned, scope.counters.bytes_read), cause=planned.event)
            except BaseException:
                os.close(fd)
                raise
            standing.fd = fd
            standing.task = None
        self._settle()

    def _built(self, task: asyncio.Task[None]) -> None:
        """A fault that nobody foresaw ends the service: a rank must not wait for ever for a window that will not come."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.fault.done():
            self.fault.set_exception(error)


def _read_plan(body: bytes, run: str, fact: BatchYielded, dp: int, event: Event) -> dict[WindowId, _Planned]:
    """The coordinate's windows. Raises ValueError on a plan that is not the event's, or breaks its promises."""
    try:
        plan = Plan.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(
            f"{fact.plan.key} is no plan ({error.error_count()} errors, first: {error.errors()[0]['msg']})"
        ) from error
    plan.check()
    if (plan.run, plan.step, plan.microbatches) != (run, fact.step, fact.microbatches):
        raise ValueError(
            f"{fact.plan.key} is for {plan.run}/{plan.step} with {plan.microbatches} micro-batches, "
            f"the event for {run}/{fact.step} with {fact.microbatches}"
        )
    found: dict[WindowId, _Planned] = {}
    for microbatch in range(plan.microbatches):
        window = plan_window(plan, dp, microbatch)
        meta: dict[str, Any] = {
            "run": run,
            "step": plan.step,
            "microbatch": microbatch,
            "dp": dp,
            "sequences": [row.sequence for row in window.rows],
        }
        layout = plan_layout(meta, shapes(window))
        last = microbatch == plan.microbatches - 1
        found[WindowId(plan.step, microbatch)] = _Planned(window, layout, last, plan.microbatches, event)
    return found


async def _fetch(store: ObjectStore, window: Window) -> list[dict[str, Array]]:
    """The columns of the window's reads; the store bounds how many requests are in flight."""
    reads = [
        asyncio.ensure_future(read_columns(store, read.header, read.columns, read.spans))
        for read in window.reads
    ]
    try:
        return await asyncio.gather(*reads)
    finally:
        # After a failure the window is fetched anew: what is still on its way would be fetched twice.
        for read in reads:
            read.cancel()


def _fact(planned: _Planned, fetched: int) -> WindowPacked:
    window = planned.window
    return WindowPacked(
        step=window.step,
        microbatch=window.microbatch,
        dp=window.dp,
        tokens=window.tokens,
        bytes=planned.layout.size,
        fetched=fetched,
    )


def _seal(planned: _Planned, columns: list[dict[str, Array]]) -> int:
    return seal(planned.layout, pack(planned.window, split(planned.window, columns)))
