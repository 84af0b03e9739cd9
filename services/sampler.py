"""Completes, judges and shapes groups, and yields batches. All decisions are `pipeline.batch.sampler`'s."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from pipeline.batch.sampler import SamplerCore
from pipeline.log.shell import run_core
from pipeline.store import ObjectExists
from services.process import Context


async def serve(ctx: Context) -> None:
    async def write(objects: Mapping[str, bytes]) -> None:
        for key, body in objects.items():
            # A plan's key holds its checksum: one that exists is the same decision, written before.
            with contextlib.suppress(ObjectExists):
                await ctx.store.create(key, body)

    await run_core(ctx.log, SamplerCore(ctx.run), write, ctx.stop, ctx.name, ctx.health.ready)
