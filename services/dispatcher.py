"""Sends out prompts on demand, and ends the run. All decisions are `pipeline.batch.mixer`'s."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.batch.mixer import MixerCore
from pipeline.log.shell import run_core
from services.process import Context


async def _no_objects(objects: Mapping[str, bytes]) -> None:
    raise AssertionError(f"the mixer writes no objects, got {list(objects)}")


async def serve(ctx: Context) -> None:
    await run_core(ctx.log, MixerCore(ctx.run), _no_objects, ctx.stop, ctx.name, ctx.health.ready)
