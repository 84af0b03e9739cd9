"""One answer under way, or done: what its clients read while it is sampled, and after.

Promises: it goes on without its clients; whoever comes, whenever, gets it from its first piece on; nobody waits for ever
(it ends with its task). What a client left unread is told to the session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from pipeline.capture.call import Answer, Piece, Text, Thought

_PORTION = 64
"""Pieces that are handed on at once, at most: what a client that reads slowly may hold."""


class SessionClosed(Exception):
    """The session is over."""


class Turn:
    def __init__(self, name: str, left: Callable[[], None]) -> None:
        """`name` for errors; `left` is called when a client goes away before it has its answer."""
        self._name = name
        self._left = left
        self._pieces: list[Piece] = []
        self._prompt_tokens: int | None = None
        self._readers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Answer] | None = None

    def run(self, task: asyncio.Task[Answer]) -> None:
        """`task` samples the turn and gives its answer."""
        self._task = task
        task.add_done_callback(lambda _: self._settle())

    @property
    def done(self) -> bool:
        return self._task is not None and self._task.done()

    def start(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._tell()

    def add(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            self._pieces += pieces
            self._tell()

    def lost(self) -> None:
        """A client that had read it all did not get it all."""
        self._left()

    async def started(self) -> int:
        """Tokens of the prompt, once known. Raises what the turn failed with."""
        while self._prompt_tokens is None:
            if self.done:
                self._result()
            await self._wait()
        return self._prompt_tokens

    async def pieces(self) -> AsyncIterator[Piece]:
        """From the first piece on, to the end. Raises what the turn failed with."""
        async with contextlib.aclosing(self.portions()) as portions:
            async for portion in portions:
                for piece in portion:
                    yield piece

    async def portions(self) -> AsyncGenerator[Sequence[Piece], None]:
        """The pieces, as many at once as there are by then, of up to `_PORTION`. Raises what the turn failed with."""
        self._readers += 1
        try:
            at = 0
            while True:
                while at < len(self._pieces):
                    portion = self._pieces[at : at + _PORTION]
                    at += len(portion)
                    yield portion
                if self.done:
                    break
                await self._wait()
            self._result()
        except GeneratorExit:
            self._left()
            raise
        finally:
            self._readers -= 1
            self._forget()

    async def whole(self) -> Answer:
        """Raises what the turn failed with."""
        while not self.done:
            await self._wait()
        return self._result()

    def _result(self) -> Answer:
        assert self._task is not None
        if self._task.cancelled():
            raise SessionClosed(f"session {self._name} is closed")
        return self._task.result()

    async def _wait(self) -> None:
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self._left()
            raise

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _settle(self) -> None:
        self._tell()
        self._forget()

    def _forget(self) -> None:
        """Puts the pieces together, once nobody is in the middle of them: there may be one a token."""
        if self._readers or not self.done or self._task is None or self._task.cancelled():
            return
        if self._task.exception() is None:
            answer = self._task.result()
            whole = [Thought(answer.reasoning), Text(answer.content), *answer.tool_calls]
            self._pieces = [piece for piece in whole if not isinstance(piece, Text | Thought) or piece.text]
