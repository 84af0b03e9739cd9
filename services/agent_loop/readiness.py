"""Whether the engine is there, and how new its policy is: what an attempt waits for before it is opened.

Promises: an engine that is away is waited for, however long that takes; one tenant asks for all that wait; of an engine
that is there, the wait for a policy version is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from pipeline.engines.base import Engine, EngineUnavailable

VERSION_POLL_S = 0.1
ANSWERED_S = 1.0
"""How long after an answer the engine is taken to be there."""
PROBE_S = (0.1, 2.0)
"""Between two questions whether it is there: the first pause and the longest."""


class Readiness:
    def __init__(self, engine: Engine, logger: logging.Logger) -> None:
        self._engine = engine
        self._logger = logger
        self._version = 0
        self._answered = -math.inf
        self._pause = PROBE_S[0]
        self._asking = asyncio.Lock()

    def doubt(self) -> None:
        """An attempt failed: the engine is asked anew before the next one."""
        self._answered = -math.inf

    async def there(self) -> None:
        """Returns when the engine answers."""
        while not self._fresh():
            async with self._asking:
                if self._fresh():
                    return
                if await self._engine.healthy():
                    self._answered, self._pause = time.monotonic(), PROBE_S[0]
                    return
                self._logger.info("waiting for the engine, which does not answer")
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, PROBE_S[1])

    async def has_version(self, wanted: int, within: float) -> bool:
        """Whether the engine comes to the policy version while it is there for `within` seconds."""
        while self._version < wanted:
            await self.there()
            began = time.monotonic()
            async with self._asking:
                if self._version < wanted and self._fresh():
                    await self._ask(wanted)
            within -= time.monotonic() - began
            if within <= 0 and self._version < wanted:
                return False
        return True

    def _fresh(self) -> bool:
        return time.monotonic() - self._answered < ANSWERED_S

    async def _ask(self, wanted: int) -> None:
        try:
            self._version = await self._engine.version()
        except EngineUnavailable as error:
            self._logger.info("waiting for the engine: %s", error)
            self.doubt()
        if self._version < wanted:
            await asyncio.sleep(VERSION_POLL_S)
