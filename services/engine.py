"""The engine as a service. The tiny engine (`engine.kind` tiny) is served; vLLM and SGLang, which others run, are kept at
the newest weights.

Promises:
- after a restart the newest published weights are sampled, never older ones than before;
- weights are swapped in mid-generation; every token says the version that sampled it;
- served: it ends, to be started anew, when a model step fails: an engine that cannot sample does not stay and answer errors;
- kept: every replica that answers has the newest weights, also one that was away; trouble with one is told once, and
  neither ends the service nor keeps the others from it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.engines.client import open_replicas
from pipeline.engines.policies import BESIDE_WEIGHTS, policy_dir
from pipeline.engines.push import bring_up, remove_old, write_version
from pipeline.engines.wire import PauseMode
from pipeline.log import end_tasks
from pipeline.secret_file import read_secret
from schemas.envelope import Event
from schemas.facts import PolicyPublished
from services.process import Context

if TYPE_CHECKING:
    from pipeline.engines.tiny.engine import TinyEngine

CHECK_S = 2.0
"""Between two looks at the replicas' versions, when nothing is published."""
_MODES: dict[str, PauseMode] = {"vllm": "keep", "sglang": "abort"}
"""What becomes of requests under way: vLLM computes them anew by itself, which spares sending them again."""


async def serve(ctx: Context) -> None:
    settings = ctx.config.engine
    token = read_secret(settings.token_file, "engine.token_file") if settings.token_file else None
    await (_serve_tiny(ctx, token) if settings.kind == "tiny" else _keep_current(ctx, token))


async def _serve_tiny(ctx: Context, token: str | None) -> None:
    import torch

    from pipeline.engines.tiny.engine import TinyEngine
    from pipeline.engines.tiny.server import create_app
    from pipeline.engines.tiny.server import serve as listen

    settings = ctx.config.engine
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
    fact = _published(event)
    await engine.load_weights(await ctx.store.get(fact.weights), fact.step)
    ctx.logger.info("loaded policy version %d", fact.step, extra={"step": fact.step})


def _published(event: Event) -> PolicyPublished:
    assert isinstance(event.fact, PolicyPublished)
    return event.fact


class _Newest:
    """What was published last, and word of it."""

    def __init__(self, event: Event | None) -> None:
        self.event, self.changed = event, asyncio.Event()

    async def follow(self, ctx: Context) -> None:
        start = self.event.seq + 1 if self.event is not None else 1
        async for event in ctx.log.subscribe("policy.published", start=start):
            self.event = event
            self.changed.set()


async def _keep_current(ctx: Context, token: str | None) -> None:
    settings = ctx.config.engine
    if not settings.weights_dir:
        raise ValueError(
            f"engine.weights_dir is empty: name a directory that the {settings.kind} engines read, or do not run this service"
        )
    root = Path(settings.weights_dir) / ctx.run
    policy = policy_dir(settings.policy, BESIDE_WEIGHTS)
    replicas = open_replicas(settings, token)
    newest = _Newest(await ctx.log.latest("policy.published"))
    following = asyncio.create_task(newest.follow(ctx))
    stopping = asyncio.create_task(ctx.stop.wait())
    told: dict[str, str | None] = {}
    try:
        while not ctx.stop.is_set():
            newest.changed.clear()
            if newest.event is not None:
                fact = _published(newest.event)
                directory = root / f"{fact.step:08d}"
                if not directory.is_dir():
                    blob = await ctx.store.get(fact.weights)
                    await asyncio.to_thread(write_version, root, fact.step, blob, policy)
                found = await bring_up(replicas, directory, fact.step, _MODES[settings.kind])
                _tell(ctx, fact.step, found, told)
                if not any(found.values()):
                    await asyncio.to_thread(remove_old, root)
            changed = asyncio.create_task(newest.changed.wait())
            try:
                done, _ = await asyncio.wait(
                    (changed, following, stopping), timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                await end_tasks([changed])
            if following in done:
                following.result()
    finally:
        await end_tasks((following, stopping))
        for replica in replicas:
            await replica.close()


def _tell(ctx: Context, step: int, found: dict[str, str | None], told: dict[str, str | None]) -> None:
    """Says what has changed since it was told last."""
    for url, problem in found.items():
        state = problem or f"version {step}"
        if told.get(url) != state:
            told[url] = state
            if problem is None:
                ctx.logger.info("%s has policy version %d", url, step, extra={"step": step})
            else:
                ctx.logger.error("%s is not at policy version %d: %s", url, step, problem)
