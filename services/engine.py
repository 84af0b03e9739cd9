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
import logging
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.engines.base import EngineUnavailable
from pipeline.engines.client import open_replicas
from pipeline.engines.policies import BESIDE_WEIGHTS, policy_dir
from pipeline.engines.push import bring_up, remove_old, write_version
from pipeline.engines.replicas import Replica
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
    address = urlsplit(f"//{settings.bind}" if settings.bind else settings.url)
    runner, port = await listen(
        create_app(engine, token, settings.policy),
        address.hostname or "127.0.0.1",
        address.port or 0,
        token,
    )
    ctx.logger.info("serving %s, version %d, on port %d", settings.policy, engine.version, port)
    ctx.health.ready()
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
    """What was published last; `changed` is of the next change, and set at the end, too."""

    def __init__(self, event: Event | None) -> None:
        self.event, self.changed = event, asyncio.Event()

    async def follow(self, ctx: Context) -> None:
        start = self.event.seq + 1 if self.event is not None else 1
        async for event in ctx.log.subscribe("policy.published", start=start):
            self.event = event
            self.tell()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class _Weights:
    """The directories that engines read. `reading`: the version that each replica is at, by url, while it loads."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._root = Path(ctx.config.engine.weights_dir) / ctx.run
        self._policy = policy_dir(ctx.config.engine.policy, BESIDE_WEIGHTS)
        self._writing = asyncio.Lock()
        self.reading: dict[str, int] = {}

    async def directory(self, fact: PolicyPublished) -> Path:
        async with self._writing:
            directory = self._root / f"{fact.step:08d}"
            if not directory.is_dir():
                blob = await self._ctx.store.get(fact.weights)
                await asyncio.to_thread(write_version, self._root, fact.step, blob, self._policy)
                await asyncio.to_thread(remove_old, self._root, {fact.step, *self.reading.values()})
            return directory


async def _keep_current(ctx: Context, token: str | None) -> None:
    settings = ctx.config.engine
    if not settings.weights_dir:
        raise ValueError(
            f"engine.weights_dir is empty: name a directory that the {settings.kind} engines read, or do not run this service"
        )
    weights = _Weights(ctx)
    replicas = open_replicas(settings, token)
    newest = _Newest(await ctx.log.latest("policy.published"))
    following = asyncio.create_task(newest.follow(ctx))
    ctx.health.ready()
    stopping = asyncio.create_task(ctx.stop.wait())
    # Each for itself: one that hangs in loading may take minutes.
    keeping = [asyncio.create_task(_keep(ctx, newest, weights, replica)) for replica in replicas]
    try:
        done, _ = await asyncio.wait((following, stopping, *keeping), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        newest.tell()
        # An update that has begun is ended, or the engine would stay paused.
        await asyncio.gather(*keeping)
    finally:
        await end_tasks((following, stopping, *keeping))
        for replica in replicas:
            await replica.close()


async def _keep(ctx: Context, newest: _Newest, weights: _Weights, replica: Replica) -> None:
    """Keeps one replica at the newest weights, and says what has changed since it was told last."""
    told, samples = "", False
    mode = _MODES[ctx.config.engine.kind]
    while not ctx.stop.is_set():
        changed = newest.changed
        if newest.event is not None:
            fact = _published(newest.event)
            weights.reading[replica.url] = fact.step
            try:
                await bring_up(replica, await weights.directory(fact), fact.step, mode, samples)
                samples, state = True, f"has policy version {fact.step}"
            except EngineUnavailable as error:
                samples, state = False, f"is not at policy version {fact.step}: {error}"
            finally:
                weights.reading.pop(replica.url, None)
            if state != told:
                ctx.logger.log(
                    logging.INFO if samples else logging.ERROR,
                    "%s %s",
                    replica.url,
                    state,
                    extra={"step": fact.step},
                )
                told = state
        try:
            async with asyncio.timeout(CHECK_S):
                await changed.wait()
        except TimeoutError:
            continue
