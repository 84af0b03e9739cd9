"""What engines' servers answer to the same questions, whatever their wires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.engines.base import EngineUnavailable
from pipeline.engines.progress import BadAnswer, Prompt, version_number
from pipeline.engines.scores import Scores
from pipeline.engines.transport import Transport


async def weight_version(http: Transport, path: str, within: float) -> int:
    """The weight version that the server says at `path`. Raises EngineUnavailable when it cannot be had."""
    answer = await http.control("GET", path, within)
    if "weight_version" not in answer:
        raise EngineUnavailable(f"{http.base}{path} answered no weight_version")
    try:
        return version_number(answer["weight_version"])
    except BadAnswer as error:
        raise EngineUnavailable(f"{http.base} has {error}") from error


async def scored(
    http: Transport,
    data: bytes,
    token_ids: Prompt,
    top_k: int,
    read: Callable[[bytes, Prompt, int], Scores],
) -> Scores:
    """The scores in an answer, read on a thread: a long prompt's are megabytes. Raises EngineUnavailable."""
    try:
        return await asyncio.to_thread(read, data, token_ids, top_k)
    except BadAnswer as error:
        raise EngineUnavailable(f"{http.base} answered {error}") from error
