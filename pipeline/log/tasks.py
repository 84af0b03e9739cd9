"""Ending tasks that wait on the broker's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels the tasks and waits until they are done; what they raise stays in them.

    Cancels again and again: `asyncio.wait_for`, on which nats-py waits, loses a cancellation that meets a result in
    Python 3.11, and a task cancelled once could run on for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
