"""The reference trainer: one process a rank of dp x cp x tp, gloo on CPU. Its purpose is proof, not speed."""

from __future__ import annotations

import asyncio
import threading

from services.process import Context

_STOP_S = 3.0


async def serve(ctx: Context) -> None:
    """Runs rank `ctx.index`, a number, until the run stops or it is told to; raises what the rank raises."""
    import torch

    from pipeline.feed.feed import FeedStopped, open_feed
    from services.trainer import ranks
    from services.trainer.loop import Rank

    rank = ctx.index
    assert rank is not None, "a rank is given its number"
    torch.set_num_threads(ctx.config.trainer.threads)
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None or isinstance(error, FeedStopped):
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    def work() -> None:
        try:
            batch = ctx.config.batch
            mesh = ranks.join(ctx.config.trainer.rendezvous, rank, batch.sizes, batch.adaptive_cp)
            ctx.health.ready()
            with open_feed(ctx.config, rank, stop=ctx.stop.is_set) as feed:
                Rank(ctx, feed, mesh, loop).run()
            ranks.leave()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, error)
        else:
            loop.call_soon_threadsafe(settle, None)

    # A daemon: a rank that waits in a collective for one that is gone cannot be told to stop.
    threading.Thread(target=work, name=f"rank-{rank}", daemon=True).start()
    stopping = asyncio.create_task(ctx.stop.wait())
    await asyncio.wait([outcome, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done():
        await asyncio.wait([outcome], timeout=_STOP_S)
    stopping.cancel()
    if not outcome.done():
        ctx.logger.warning("stopped in mid-step; the step is taken again from the one before")
    elif not ctx.stop.is_set():
        outcome.result()
        # The run's last step is taken; the run itself may have evaluations to finish.
        await ctx.stop.wait()
