"""Scores finished sequences with the teachers of their sources."""

from __future__ import annotations

from services.process import Context


async def serve(ctx: Context) -> None:
    raise NotImplementedError
