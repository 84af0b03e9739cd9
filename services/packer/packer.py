"""State and effects of a packer; which window is built or dropped is decided by `pipeline.feed.ahead`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.feed.ahead import WindowId, decide
from pipeline.feed.gate import Gate
from pipeline.feed.server import WindowRefused
from pipeline.feed.wire import Answer
from pipeline.log import end_tasks
from pipeline.store import ObjectDamaged, ObjectMissing, StoreError
from pipeline.store.outage import outlasting
from pipeline.vision.owners import showing
from schemas.envelope import Event
from schemas.facts import BatchReplanned, BatchYielded, SequenceQuarantined, StepTrained
from schemas.parallel import Coordinate
from schemas.plan import Plan
from services.packer.building import IN_FLIGHT, build
from services.packer.steps import (
    Planned,
    Revision,
    Step,
    absent,
    current,
    may_be_built,
    parse,
    planned,
    quarantined,
    too_many,
)
from services.process import Context

_NONE = Revision()


class _NoRoom(Exception):
    """A window for which there is no room, by its exact size."""


@dataclass
class _Standing:
    """A window that is built, or being built."""

    planned: Planned
    task: asyncio.Task[None] | None = None
    fd: int | None = None
    holders: set[object] = field(default_factory=set[object])


@dataclass
class _Ask:
    rank: object
    window: WindowId
    revision: int
    answer: asyncio.Future[tuple[Answer, int]]


class Packer:
    """Every change of state ends in `_settle`, which brings the world in line with the decision: nothing polls."""

    def __init__(self, ctx: Context, coordinate: Coordinate) -> None:
        self._ctx = ctx
        self._settings = ctx.config.packer
        self._coordinate = coordinate
        self._trained = 0
        self._cursor = WindowId(1, 0)
        self._steps: dict[int, Step] = {}
        self._revisions: dict[int, Revision] = {}
        self._failed: set[WindowId] = set()
        """Not built ahead again: the reason is for the rank that asks."""
        self._standing: dict[WindowId, _Standing] = {}
        self._asks: list[_Ask] = []
        self._gate = Gate(IN_FLIGHT)
        self._planning = asyncio.Lock()
        self._planning_anew: set[int] = set()
        """Steps of which a revision is on its way."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a window's building met what nobody foresaw."""

    # What happens.

    async def follow_batches(self) -> None:
        """Loads and checks the plan of every batch that is not trained yet."""
        async for event in self._ctx.log.subscribe("batch.yielded"):
            if isinstance(event.fact, BatchYielded) and event.fact.step > self._trained:
                await self._load(event, event.fact)

    async def follow_training(self) -> None:
        async for event in self._ctx.log.subscribe("step.trained"):
            if isinstance(event.fact, StepTrained):
                self.trained(event.fact.step)
                self._settle()

    async def follow_quarantine(self) -> None:
        async for event in self._ctx.log.subscribe("batch.replanned"):
            fact = event.fact
            if not isinstance(fact, BatchReplanned) or fact.step <= self._trained:
                continue
            if fact.revision > self._revisions.get(fact.step, _NONE).number:
                self._revisions[fact.step] = Revision(fact.revision, frozenset(fact.without))
                self._settle()
                if fact.step in self._steps and fact.step not in self._planning_anew:
                    self._planning_anew.add(fact.step)
                    self._start(self._plan_anew(fact.step))

    async def _plan_anew(self, step: int) -> None:
        """In the newest revision: those that come while this goes on are planned together, as each reads the whole plan."""
        planned = -1
        try:
            while (kept := self._steps.get(step)) is not None and self._revision(step).number > planned:
                planned = self._revision(step).number
                await self._load(kept.event, kept.fact)
        finally:
            self._planning_anew.discard(step)

    def trained(self, step: int) -> None:
        """Steps up to this one are never asked for again: one step, one parent checkpoint."""
        if step <= self._trained:
            return
        self._trained = step
        self._cursor = max(self._cursor, WindowId(step + 1, 0))
        self._steps = {s: kept for s, kept in self._steps.items() if s > step}
        self._revisions = {s: kept for s, kept in self._revisions.items() if s > step}
        self._failed = {window for window in self._failed if window.step > step}

    async def hold(self, rank: object, window: WindowId, revision: int) -> tuple[Answer, int]:
        if (refusal := self._refusal(window)) is not None:
            raise WindowRefused(refusal)
        self._cursor = window.after()
        self._failed.discard(window)
        ask = _Ask(rank, window, revision, asyncio.get_running_loop().create_future())
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
        await end_tasks(self._tasks)
        for window in list(self._standing):
            self._drop(window)

    # What is done about it.

    def _settle(self) -> None:
        for window, standing in list(self._standing.items()):
            if not standing.holders and not current(standing.planned, self._revision(window.step)):
                self._drop(window)
        for ask in list(self._asks):
            if (refusal := self._refusal(ask.window)) is not None:
                self._refuse(ask.window, refusal)
            elif (standing := self._standing.get(ask.window)) is not None and standing.fd is not None:
                self._answer(ask, standing, standing.fd)
        decision = decide(
            known=self._known(),
            standing={window: standing.planned.size for window, standing in self._standing.items()},
            held=frozenset(window for window, standing in self._standing.items() if standing.holders),
            asked=[ask.window for ask in self._asks],
            cursor=self._cursor,
            prefetch=self._settings.prefetch,
            budget=self._settings.memory_bytes,
        )
        for window in decision.drop:
            self._drop(window)
        for window in decision.build:
            standing = self._standing[window] = _Standing(self._steps[window.step].windows[window.microbatch])
            standing.task = self._start(self._build(window, standing))

    def _revision(self, step: int) -> Revision:
        return self._revisions.get(step, _NONE)

    def _known(self) -> dict[WindowId, int]:
        """What may be built, and its bytes."""
        return {
            window: planned.size
            for number, step in self._steps.items()
            if step.unusable is None and self._over(number) is None
            for microbatch, planned in step.windows.items()
            if (window := WindowId(number, microbatch)) not in self._failed
            and may_be_built(step, planned, self._revision(number))
        }

    def _over(self, number: int) -> str | None:
        """Why a step that has lost too many sequences is not trained."""
        step = self._steps[number]
        return too_many(self._settings, number, step, self._revision(number))

    def _answer(self, ask: _Ask, standing: _Standing, fd: int) -> None:
        step, revision = self._steps[ask.window.step], self._revision(ask.window.step)
        good = current(standing.planned, revision)
        number = revision.number if good else standing.planned.revision
        if number < ask.revision:
            return  # once its holders have left it, it is built anew
        self._asks.remove(ask)
        # A rank that was cancelled while this ran holds nothing.
        if not ask.answer.done():
            standing.holders.add(ask.rank)
            count = step.fact.microbatches
            answer = Answer(
                step=ask.window.step,
                microbatch=ask.window.microbatch,
                microbatches=count,
                last=ask.window.microbatch == count - 1,
                revision=number,
            )
            ask.answer.set_result((answer, fd))

    def _refusal(self, window: WindowId) -> str | None:
        if window.step <= self._trained:
            return f"step {window.step} is trained already (the log is at step {self._trained}); resume from its checkpoint"
        step = self._steps.get(window.step)
        if step is None:
            return None
        if step.unusable is not None:
            return step.unusable
        if window.microbatch >= step.fact.microbatches:
            return f"step {window.step} has {step.fact.microbatches} micro-batches a rank; there is no {window.microbatch}"
        if (over := self._over(window.step)) is not None:
            return over
        planned = step.windows.get(window.microbatch)
        return self._too_large(window, planned.size) if planned is not None else None

    def _too_large(self, window: WindowId, size: int) -> str | None:
        if size <= self._settings.memory_bytes:
            return None
        return (
            f"step {window.step} micro-batch {window.microbatch} needs {size} bytes, packer.memory_bytes is "
            f"{self._settings.memory_bytes}; raise it to at least {size}, or lower batch.token_budget"
        )

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
        """Plans the windows of a batch in its newest revision, in order: the first is under way while others are planned."""
        async with self._planning:
            step = self._steps.get(fact.step) or Step(event, fact)
            try:
                body = await outlasting(lambda: self._ctx.store.get(fact.plan), self._ctx.logger)
                plan = await asyncio.to_thread(parse, body, self._ctx.run, fact)
                step.sequences = len(plan.sequences)
                for column in absent(plan, self._settings.columns):
                    # Routing replay without routing would be none, without a word.
                    message = (
                        "no payload of step %d has %s, which packer.columns asks for: windows come without"
                    )
                    self._ctx.logger.warning(message, fact.step, column, extra={"step": fact.step})
                shows = await asyncio.to_thread(showing, plan)
                for number in range(plan.microbatches):
                    await self._plan(plan, shows, WindowId(fact.step, number), step)
            except (StoreError, ValueError, LookupError) as error:
                step.unusable = f"the plan of step {fact.step} cannot be used: {error}"
                self._ctx.logger.error(step.unusable, extra={"step": fact.step})
                if fact.step > self._trained:
                    self._steps[fact.step] = step
                self._settle()

    async def _plan(
        self, plan: Plan, shows: Mapping[str, Sequence[int]], window: WindowId, step: Step
    ) -> None:
        made = step.windows.get(window.microbatch)
        # Another revision may come while one is planned.
        while made is None or not current(made, self._revision(window.step)):
            revision = self._revision(window.step)
            made = await asyncio.to_thread(
                planned,
                plan,
                shows,
                self._ctx.config,
                self._coordinate,
                window.microbatch,
                step.event,
                revision,
            )
        if window.step <= self._trained:
            return
        if (problem := self._too_large(window, made.size)) is not None:
            self._ctx.logger.error(problem, extra={"step": window.step})
        step.windows[window.microbatch] = made
        self._steps[window.step] = step
        self._settle()

    async def _build(self, window: WindowId, standing: _Standing) -> None:
        def sized(size: int) -> None:
            standing.planned.size = size
            if (problem := self._too_large(window, size)) is not None:
                raise ValueError(problem)
            if sum(each.planned.size for each in self._standing.values()) > self._settings.memory_bytes:
                raise _NoRoom

        try:
            built = await build(self._ctx, standing.planned, self._gate, sized)
        except _NoRoom:
            # It is larger than it was thought to be: what is built now is decided anew.
            self._leave(window, standing)
        except (ObjectDamaged, ObjectMissing) as error:
            self._lost(window, standing, error)
        except (StoreError, ValueError, KeyError, OSError) as error:
            self._fail(window, standing, str(error))
        else:
            try:
                # Before it is handed over: what a rank has read is in the log, whoever is killed next. A rebuilt window
                # is decided already, and the first fact stands.
                await self._ctx.log.publish(built.fact, cause=standing.planned.event)
            except BaseException:
                os.close(built.fd)
                raise
            standing.fd, standing.task = built.fd, None
        self._settle()

    def _lost(self, window: WindowId, standing: _Standing, error: ObjectDamaged | ObjectMissing) -> None:
        """Puts the sequences of the object in quarantine; the window is built once the batch is planned without them."""
        step = self._steps.get(window.step)
        lost = standing.planned.owners.get(error.key, ())
        if step is None or not lost:
            self._fail(window, standing, str(error))
            return
        self._leave(window, standing)
        new = [each for each in lost if each.sequence not in self._revision(window.step).without]
        step.found |= {each.sequence: str(error) for each in new}
        if (over := self._over(window.step)) is not None:
            self._ctx.logger.error(over, extra={"step": window.step})
            return
        # A task of its own: a window that is dropped meanwhile takes its building task with it.
        facts = [quarantined(each, window.step, error) for each in new]
        self._start(self._tell(facts, standing.planned.event))

    async def _tell(self, facts: Sequence[SequenceQuarantined], event: Event) -> None:
        for fact in facts:
            await self._ctx.log.publish(fact, cause=event)
            message = "sequence %s is in quarantine, and its windows wait for the sampler to plan the batch without it: %s"
            self._ctx.logger.warning(
                message, fact.sequence, fact.detail, extra={"step": fact.step, "sequence": fact.sequence}
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _leave(self, window: WindowId, standing: _Standing) -> None:
        """Drops a window by its own building task, which goes on."""
        standing.task = None
        if self._standing.get(window) is standing:
            self._drop(window)

    def _fail(self, window: WindowId, standing: _Standing, problem: str) -> None:
        reason = f"step {window.step} micro-batch {window.microbatch} cannot be packed: {problem}"
        self._ctx.logger.error(reason, extra={"step": window.step})
        self._leave(window, standing)
        self._failed.add(window)
        self._refuse(window, reason)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A fault that nobody foresaw ends the service: a rank must not wait for ever for a window that will not come."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.fault.done():
            self.fault.set_exception(error)
