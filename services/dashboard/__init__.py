"""The dashboard: a run's numbers for Prometheus, at `metrics.bind`.

Promises:
- it folds the whole log, as every core does, so what it tells is the same after a restart, however often: counters do not begin
  anew. A start goes on from its snapshot; until the fold has come to where the log ended as it began it tells nothing of the
  run, and is not ready;
- it publishes no fact, and no other service waits for it; what is in the queues it asks the broker, every other second
  (`services.dashboard.watching`);
- it goes on when the run is over, so that what the run came to can still be read, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pipeline.hosts.metrics import BadBind
from pipeline.log import end_tasks
from pipeline.log.patience import LogError
from pipeline.log.shell import SNAPSHOT_EVERY
from pipeline.log.snapshot import Snapshots
from schemas.envelope import Event
from services.dashboard.families import run_families, watched_families
from services.dashboard.totals import STATE_VERSION, Totals
from services.dashboard.view import RATE_WINDOW, Mean, SourceRow, SourceView, StepRow, View, fold
from services.dashboard.watching import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from services.process import Context

__all__ = ["RATE_WINDOW", "Mean", "SourceRow", "SourceView", "StepRow", "View", "fold", "serve"]
_SNAPSHOT_COST = 20
"""A snapshot that takes t seconds is followed by 20 t without one."""
_TELL_EVENTS = 4096


async def serve(ctx: Context) -> None:
    if not ctx.config.metrics.bind:
        raise BadBind(
            "service dashboard tells its numbers at metrics.bind, which is empty; give it host:port"
        )
    board = _Board(ctx)
    ctx.measures.collectors.append(board.families)
    tasks = [asyncio.create_task(each) for each in (board.fold(), board.watch.run(), ctx.stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)


class _Board:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._totals = Totals()
        self._snapshots = Snapshots(ctx.log, ctx.name, STATE_VERSION)
        self._kept = 0
        self._next_snapshot = 0.0
        self._caught_up = False
        self.watch = Watch(ctx.log, ctx.config)

    def families(self) -> Iterator[Metric]:
        """For a scrape. Counts that are still being made up would be rates that never were."""
        if self._caught_up:
            yield from run_families(self._ctx.run, self._totals, self._ctx.log.skipped)
        yield from watched_families(self._ctx.run, self.watch, self._totals.seq)

    async def fold(self) -> None:
        """For ever. Raises LogError when the log has lost its beginning, and no snapshot covers it."""
        log, health = self._ctx.log, self._ctx.health
        snapshot = await self._snapshots.load()
        if snapshot is not None:
            self._totals = Totals.load(snapshot.state)
            self._kept = snapshot.seq
            self._ctx.logger.info("starts from a snapshot at %d", snapshot.seq)
        first = (await log.info()).state.first_seq
        if first > self._kept + 1:
            raise LogError(
                f"the log of run {log.run} begins at message {first}, and what was before is needed from {self._kept + 1} on: "
                "retention removed it (broker.max_age_s)"
            )
        head = await log.head()
        if self._kept >= head:
            self._ready()
        async for found in log.read(first=self._kept + 1):
            self._totals.read(found)
            if found.seq >= head:
                self._ready()
                await self._keep(found.seq)
            elif isinstance(found, Event) and self._totals.view.events % _TELL_EVENTS == 0:
                health.not_ready(f"reads the log: {found.seq} of {head} messages")

    def _ready(self) -> None:
        if not self._caught_up:
            self._caught_up = True
            self._ctx.health.ready()

    async def _keep(self, seq: int) -> None:
        now = time.monotonic()
        if seq - self._kept < SNAPSHOT_EVERY or now < self._next_snapshot:
            return
        await self._snapshots.save(seq, self._totals.dump())
        self._kept = seq
        self._next_snapshot = time.monotonic() + _SNAPSHOT_COST * (time.monotonic() - now)
