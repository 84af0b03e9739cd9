"""Who waits for which verdict."""

from __future__ import annotations

import asyncio

from schemas.facts import SequenceVerified


class Verdicts:
    """Hands each `sequence.verified` that is addressed to this host to whoever waits for it."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[SequenceVerified]] = {}

    def expect(self, attempt: str) -> asyncio.Future[SequenceVerified]:
        """Resolves when the attempt's verdict arrives; `forget` it in the end."""
        future: asyncio.Future[SequenceVerified] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = future
        return future

    def forget(self, attempt: str) -> None:
        self._waiting.pop(attempt, None)

    def arrived(self, fact: SequenceVerified) -> None:
        future = self._waiting.get(fact.id())
        if future is not None and not future.done():
            future.set_result(fact)
