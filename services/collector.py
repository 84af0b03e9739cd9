"""Removes from the store what the run's policy no longer keeps, as its steps are trained. What may go is `pipeline.retention`'s.

Promises:
- it removes nothing before it has folded the whole log, nothing of a log whose beginning is gone or that it cannot read, and
  nothing from a place that is another log's, or that an import only borrowed: then it says why, and waits for the end of the run;
- killed at any time it goes on: what it took and did not remove is taken again, and to remove twice is to remove once;
- it waits for a store that is away, and the run never waits for it;
- its snapshot is of one policy: with another, the log is folded anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from pipeline.log import end_tasks
from pipeline.log.shell import SNAPSHOT_EVERY
from pipeline.log.snapshot import Snapshots
from pipeline.retention.core import RetentionCore
from pipeline.store.claims import claim_body, claim_of
from pipeline.store.outage import outlasting
from schemas.envelope import Event
from schemas.facts import ALL, RunStarted, StepTrained
from schemas.keys import claim_key
from services.imported import borrows
from services.process import Context

_SNAPSHOT_COST = 20
"""A snapshot that takes t seconds is followed by 20 t without one."""


async def serve(ctx: Context) -> None:
    collecting = asyncio.create_task(_Collector(ctx).run())
    stopping = asyncio.create_task(ctx.stop.wait())
    try:
        done, _ = await asyncio.wait([collecting, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        # Without its log it has nothing to do, and a service that ends is started again.
        await stopping
    finally:
        await end_tasks((collecting, stopping))


class _Collector:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._policy = ctx.config.retention
        self._core = RetentionCore(ctx.run)
        self._snapshots = Snapshots(ctx.log, ctx.name, RetentionCore.STATE_VERSION)
        self._kept = 0
        self._next_snapshot = 0.0
        self._mine = False

    async def run(self) -> None:
        """Ends only when nothing may be removed, having said why."""
        if borrows(self._ctx.config):
            self._refuse(
                f"the objects were in {self._ctx.store.url} before this import, and the log that was exported may use them"
            )
            return
        await self._restore()
        first = (await self._ctx.log.info()).state.first_seq
        if first > self._kept + 1:
            self._refuse(f"the log begins at message {first}, what was before is gone (broker.max_age_s)")
            return
        head = await self._ctx.log.head()
        if self._kept >= head:
            self._ctx.health.ready()
        behind = True
        async for event in self._ctx.log.read(first=self._kept + 1):
            self._core.read(event)
            if event.seq < head:
                continue
            if behind or (isinstance(event, Event) and isinstance(event.fact, StepTrained)):
                behind = False
                if not await self._collect():
                    return
                await self._keep(event.seq)
                self._ctx.health.ready()

    async def _collect(self) -> bool:
        """Removes what may go now; whether it may go on."""
        taken = self._core.take(self._policy)
        if self._core.unreadable:
            self._refuse(self._core.unreadable)
            return False
        if not taken:
            return True
        store = self._ctx.store
        if not self._mine and not await outlasting(self._is_mine, self._ctx.logger):
            self._refuse(f"{claim_key(self._ctx.run)} in {store.url} does not name this log")
            return False
        await outlasting(lambda: store.remove(list(taken)), self._ctx.logger)
        reasons = Counter(taken.values())
        self._ctx.measures.removed.update(reasons)
        told = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
        step = self._core.trained
        self._ctx.logger.info(
            "removed %d objects after step %d: %s", len(taken), step, told, extra={"step": step}
        )
        return True

    async def _is_mine(self) -> bool:
        started = await self._ctx.log.last(RunStarted.type, ALL, self._ctx.run)
        claimed = await claim_of(self._ctx.store, self._ctx.run)
        self._mine = started is not None and claimed == claim_body(started.id)
        return self._mine

    def _refuse(self, why: str) -> None:
        self._ctx.health.ready()
        self._ctx.logger.error("nothing more is removed from the store: %s", why)

    async def _restore(self) -> None:
        snapshot = await self._snapshots.load()
        if snapshot is not None and snapshot.state["policy"] == self._policy.model_dump(mode="json"):
            self._core.load(snapshot.state["core"])
            self._kept = snapshot.seq

    async def _keep(self, seq: int) -> None:
        """What was taken is removed: the state without it may be kept."""
        now = time.monotonic()
        if seq - self._kept < SNAPSHOT_EVERY or now < self._next_snapshot:
            return
        policy = self._policy.model_dump(mode="json")
        await self._snapshots.save(seq, {"core": self._core.dump(), "policy": policy})
        self._kept = seq
        self._next_snapshot = time.monotonic() + _SNAPSHOT_COST * (time.monotonic() - now)
