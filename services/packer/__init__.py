"""The packer of one (dp, cp, pp) coordinate: follows the batches, builds its windows ahead, hands them to its ranks.

Promises:
- which packer it is, it is told, or takes the lowest free place of its directory; while all are taken it stands by, and has
  one within `_AGAIN_S` of its being free, also that of a packer that was killed;
- a window is fetched once, by range, verified, built in a sealed memfd and shared; it is freed when every rank that
  holds it acknowledges or vanishes;
- at most `packer.memory_bytes` of windows exist at once; one that is larger is refused with the number needed, and a configuration
  of which the largest window would be larger does not start;
- `window.packed` is in the log once for every window that a rank was given, whatever is rebuilt, killed or restarted;
- while the store is away, building waits and goes on when it is back, with what is fetched already;
- a damaged or missing object puts its sequences in quarantine: the packer says so, waits until the batch is planned anew without
  them, and builds the window then. Of a batch in which too many are, and of a window that fails otherwise, it tells the rank that
  asks, with the reason, and tries anew at the next ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from pipeline.feed.memory import too_small
from pipeline.feed.places import Place, claim
from pipeline.feed.server import SocketTaken, listen, serve_windows
from pipeline.feed.wire import socket_path
from pipeline.log import end_tasks
from schemas.facts import StepTrained
from services.packer.building import give_back_memory
from services.packer.packer import Packer
from services.process import Context

_AGAIN_S = 0.5
"""Between two looks for a free place."""


async def serve(ctx: Context) -> None:
    """Runs until `ctx.stop`. Raises SocketTaken or SocketPathTooLong when it cannot serve its ranks, ValueError when its
    largest window would not fit its memory."""
    sizes = ctx.config.batch.sizes
    stage = None if ctx.index is None else sizes.coordinate(ctx.index).pp
    if (problem := too_small(ctx.config.batch, ctx.config.packer, stage)) is not None:
        raise ValueError(problem)
    taken = await _take(ctx)
    if taken is None:
        return
    place, listening = taken
    try:
        await _serve(ctx, place.number, listening)
    finally:
        listening.close()
        place.close()


async def _take(ctx: Context) -> tuple[Place, socket.socket] | None:
    """A place of this process and its listening socket; None when it is told to stop before it has one. Raises SocketTaken on a
    place that it was told."""
    numbers = range(ctx.config.batch.sizes.packers) if ctx.index is None else (ctx.index,)
    told = False
    while True:
        for number in numbers:
            path = socket_path(ctx.config, number)
            if (place := claim(path.parent, number)) is None:
                continue
            try:
                listening = listen(path)
            except SocketTaken:
                # By one that is not quite dead: its lock may go before its socket.
                place.close()
            except BaseException:
                place.close()
                raise
            else:
                ctx.health.not_ready(f"takes place {number}")
                return place, listening
        path = socket_path(ctx.config, numbers[-1])
        if ctx.index is not None:
            raise SocketTaken(
                f"a live packer has {path}; stop it, or set packer.socket_dir to another directory"
            )
        if not told:
            ctx.health.ready()
            ctx.logger.info("standing by: all %d places in %s are taken", len(numbers), path.parent)
            told = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S):
                await ctx.stop.wait()
                return None


async def _serve(ctx: Context, number: int, listening: socket.socket) -> None:
    sizes = ctx.config.batch.sizes
    give_back_memory()
    path = socket_path(ctx.config, number)
    ctx.logger.info("packer %d of %d, at %s", number, sizes.packers, path)
    mine = path.stat().st_ino
    packer = Packer(ctx, sizes.coordinate(number))
    try:
        trained = await ctx.log.latest("step.trained")
        if trained is not None and isinstance(trained.fact, StepTrained):
            packer.trained(trained.fact.step)
        ctx.health.ready()
        work = (
            packer.follow_batches(),
            packer.follow_training(),
            packer.follow_quarantine(),
            serve_windows(listening, packer),
        )
        tasks = [asyncio.create_task(each) for each in work]
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
