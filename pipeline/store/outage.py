"""Waiting for a store that is away, for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.store.errors import StoreUnavailable

RETRY_S = 1.0
_T = TypeVar("_T")


async def outlasting(attempt: Callable[[], Awaitable[_T]], logger: logging.Logger) -> _T:
    """The attempt's result, however long the store is away: an outage is told once, and when it is over. Raises all else."""
    outage = False
    while True:
        try:
            result = await attempt()
        except StoreUnavailable as error:
            if not outage:
                logger.warning("waiting for the store: %s", error)
            outage = True
            await asyncio.sleep(RETRY_S)
        else:
            if outage:
                logger.info("the store is back")
            return result
