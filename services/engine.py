"""The tiny engine as a service: serves the policy and follows `policy.published`.

Promises:
- after a restart it serves the newest published weights, never older ones than before;
- weights are swapped in mid-generation; every token says the version that sampled it;
- it ends, to be started anew, when a model step fails: an engine that cannot sample does not stay and answer errors.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.engines.policies import policy_dir
from pipeline.log import end_tasks
from pipeline.secret_file import read_secret
from schemas.envelope import Event
from schemas.facts import PolicyPublished
from services.process import Context

if TYPE_CHECKING:
    from pipeline.engines.tiny.engine import TinyEngine


async def serve(ctx: Context) -> None:
    import torch

    from pipeline.engines.tiny.engine import TinyEngine
    from pipeline.engines.tiny.server import create_app
    from pipeline.engines.tiny.server import serve as listen

    settings = ctx.config.engine
    token = read_secret(settings.token_file, "engine.token_file") if settings.token_file else None
    torch.set_num_threads(settings.threads)
    engine = TinyEngine(policy_dir(settings.policy), settings.max_running, settings.max_context)
    newest = await ctx.log.latest("policy.published")
    if newest is not None:
        await _load(ctx, engine, newest)
    address = urlsplit(settings.url)
    runner, port = await listen(
        create_app(engine, token, settings.policy),
        address.hostname or "127.0.0.1",
        address.port or 0,
        token,
    )
    ctx.logger.info("serving %s, version %d, on port %d", settings.policy, engine.version, port)
    following = asyncio.create_task(_follow(ctx, engine, newest.seq + 1 if newest is not None else 1))
    ended = asyncio.create_task(engine.ended())
    stopping = asyncio.create_task(ctx.stop.wait())
    tasks = (following, ended, stopping)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)
        await runner.cleanup()


async def _follow(ctx: Context, engine: TinyEngine, start: int) -> None:
    async for event in ctx.log.subscribe("policy.published", start=start):
        await _load(ctx, engine, event)


async def _load(ctx: Context, engine: TinyEngine, event: Event) -> None:
    fact = event.fact
    assert isinstance(fact, PolicyPublished)
    await engine.load_weights(await ctx.store.get(fact.weights), fact.step)
    ctx.logger.info("loaded policy version %d", fact.step, extra={"step": fact.step})
