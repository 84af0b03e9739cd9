"""The harness host as a service: one pool's codebase and environments, and the pool's work in the log.

It holds `tenants` trials, drains and is watched as every host is (`pipeline.hosts.host`). Before its first trial it removes
what killed hosts of this machine left of their workspaces.
"""

from __future__ import annotations

import asyncio

from pipeline.capture.secret import load_run_key
from pipeline.harnesses.base import Harness, Trial, Verdict, resolve
from pipeline.harnesses.environments.base import make_environment
from pipeline.harnesses.environments.folders import FolderEnvironment
from pipeline.hosts.host import Host, Place
from pipeline.hosts.metrics import Measures
from pipeline.log import end_tasks
from pipeline.log.limits import Limit
from pipeline.log.work import MAX_PENDING
from schemas.config import Pool
from schemas.facts import SequenceOpened
from schemas.names import harness_work
from services.harness.host import Host as Trials
from services.process import Context


class UnknownPool(ValueError):
    """A pool that the configuration does not have."""


class Measured:
    """A harness, of whose trials the phases and the memory are counted."""

    def __init__(self, harness: Harness, pool: str, measures: Measures) -> None:
        self._harness = harness
        self._pool = pool
        self._measures = measures

    async def run(self, trial: Trial) -> Verdict:
        """As of `Harness`."""
        try:
            return await self._harness.run(trial)
        finally:
            self._measures.trial(self._pool, trial.took, max(trial.peak_bytes, default=0))


def _pool(ctx: Context) -> Pool:
    for pool in ctx.config.pools:
        if pool.name == ctx.pool:
            return pool
    raise UnknownPool(f"no pool {ctx.pool!r}; pools: {[pool.name for pool in ctx.config.pools]}")


async def serve(ctx: Context) -> None:
    pool = _pool(ctx)
    run_key = load_run_key(ctx.config.agent_loop.run_key_file)
    harness = resolve(pool.harness, pool.options)
    # Environments import their data sets (seconds): before the first trial, not in the middle of one.
    environments = {
        s.name: make_environment(s.environment) for s in ctx.config.sources if s.pool == pool.name
    }
    for environment in environments.values():
        if isinstance(environment, FolderEnvironment) and (swept := await environment.workspaces.sweep()):
            ctx.logger.info("removed what killed hosts left of %d workspaces", swept)
    trials = Trials(ctx, Measured(harness, pool.name, ctx.measures), environments, run_key)
    limit = Limit(ctx.log, "pool", pool.name, pool.concurrency)
    work = await ctx.log.work(
        harness_work(pool.name),
        SequenceOpened.type,
        source=pool.name,
        ack_wait_s=ctx.config.agent_loop.ack_wait_s,
        max_pending=await limit.read() or MAX_PENDING,
    )
    ctx.health.ready()
    place = Place(ctx.name, "harness", pool.name)
    host = Host(ctx.log, place, pool.tenants, ctx.measures, threads=pool.threads, logger=ctx.logger)
    serving = host.serve(work, trials.handle, ctx.stop, drain_s=ctx.drain_s, hurry=ctx.hurry)
    tasks = [asyncio.create_task(serving), asyncio.create_task(limit.keep(work))]
    try:
        # One that no longer hears of its limit does not go on without.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)
