"""What may be on its way from the store at one time: so many bytes, those of the earliest window first.

Promises:
- the bytes of those inside never exceed the gate's, unless one alone does;
- whoever waits for an earlier window goes in before all that wait for later ones, and of one window in order of arrival;
- one that is cancelled, waiting or inside, takes nothing with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

from pipeline.feed.ahead import WindowId


class Gate:
    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes, at least 1."""
        self._capacity = self._free = capacity
        self._arrivals = count()
        self._queue: list[tuple[WindowId, int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def entered(self, window: WindowId, size: int) -> AsyncGenerator[None]:
        """Waits until so many bytes may be fetched for the window. One that is larger than the gate has it for itself."""
        size = min(size, self._capacity)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._queue, (window, next(self._arrivals), size, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if not admitted.cancelled():
                self._free += size
            self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0][3].cancelled() or self._queue[0][2] <= self._free):
            *_, size, admitted = heappop(self._queue)
            if not admitted.cancelled():
                self._free -= size
                admitted.set_result(None)
