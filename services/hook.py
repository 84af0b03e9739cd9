"""Shapes accepted groups whose hooks need columns of the store, or are other people's code."""

from __future__ import annotations

from services.process import Context


async def serve(ctx: Context) -> None:
    raise NotImplementedError
