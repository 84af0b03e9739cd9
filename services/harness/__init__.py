"""The harness host as a service: one pool's codebase and environments, and the pool's work in the log."""

from __future__ import annotations

from pipeline.capture.secret import load_run_key
from pipeline.harnesses.base import resolve
from pipeline.harnesses.environments.base import make_environment
from pipeline.log import serve_work
from schemas.config import Pool
from schemas.facts import SequenceOpened
from services.harness.host import Host
from services.process import Context


class UnknownPool(ValueError):
    """A pool that the configuration does not have."""


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
    host = Host(ctx, harness, environments, run_key)
    work = await ctx.log.work(
        f"harness-{pool.name}",
        SequenceOpened.type,
        source=pool.name,
        ack_wait_s=ctx.config.agent_loop.ack_wait_s,
    )
    await serve_work(work, pool.tenants, host.handle, ctx.stop)
