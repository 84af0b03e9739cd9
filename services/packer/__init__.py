"""The packer of one (dp, cp, pp) coordinate: follows the batches, builds its windows ahead, hands them to its ranks.

Promises:
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

from pipeline.feed.memory import too_small
from pipeline.feed.server import listen, serve_windows
from pipeline.feed.wire import socket_path
from pipeline.log import end_tasks
from schemas.facts import StepTrained
from services.packer.building import give_back_memory
from services.packer.packer import Packer
from services.process import Context


async def serve(ctx: Context) -> None:
    """Runs until `ctx.stop`. Raises SocketTaken or SocketPathTooLong when it cannot serve its ranks, ValueError when its
    largest window would not fit its memory."""
    coordinate = ctx.config.batch.sizes.coordinate(ctx.index)
    if (problem := too_small(ctx.config.batch, ctx.config.packer, coordinate.pp)) is not None:
        raise ValueError(problem)
    give_back_memory()
    path = socket_path(ctx.config, ctx.index)
    listening = listen(path)
    mine = path.stat().st_ino
    packer = Packer(ctx, coordinate)
    try:
        trained = await ctx.log.latest("step.trained")
        if trained is not None and isinstance(trained.fact, StepTrained):
            packer.trained(trained.fact.step)
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
