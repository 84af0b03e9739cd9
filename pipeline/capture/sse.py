"""An answer as server-sent events on one connection.

Promises:
- the status line is held back until there is something to send: the first piece, the turn's end, or the first ping
  interval; trouble before that is the caller's to answer, with a status of its own;
- while nothing else is sent, a ping is, every `ping_s`; events are never mixed;
- trouble later is told in the protocol's form, and for what is to be tried again the connection then breaks off;
- a client that is gone, or takes nothing for `stall_s`, ends its connection and nothing else: nothing is raised for it;
- a slow client holds one portion of events, not the rest of the answer: the next is not written before this one is on
  its way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from pipeline.capture.call import Piece
from pipeline.capture.dialects.base import Stream
from pipeline.capture.http_errors import Trouble
from pipeline.capture.turn import Turn

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies that buffer would hold pings and pieces back.
    "X-Accel-Buffering": "no",
}


class _Gone(Exception):
    """The client is not there any more."""


class _Events:
    """The one writer of a connection; `started` once the status line is sent."""

    def __init__(self, request: web.Request, stream: Stream, stall_s: float) -> None:
        self._request = request
        self._stream = stream
        self._stall_s = stall_s
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self.response = web.StreamResponse(headers=_HEADERS)
        self.sent_at = self._loop.time()

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, make: Callable[[], bytes]) -> None:
        """`make` is called in its turn: streams number their events. Raises _Gone."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._stall_s):
                    if not self.started:
                        await self.response.prepare(self._request)
                    events = b""
                    if not self._begun:
                        # Not with `prepare`: a ping that is cancelled in between leaves it to the next event.
                        self._begun = True
                        events = self._stream.start()
                    events += make()
                    if not events:
                        return
                    await self.response.write(events)
            except TimeoutError:
                self.cut(flush=False)
                raise _Gone from None
            except ConnectionError:
                raise _Gone from None
            self.sent_at = self._loop.time()

    async def finish(self) -> None:
        """Raises _Gone."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except TimeoutError:
            self.cut(flush=False)
            raise _Gone from None
        except ConnectionError:
            raise _Gone from None

    def cut(self, *, flush: bool) -> None:
        """Ends the connection without the end of its body, so that the client sees it broken."""
        transport = self._request.transport
        if isinstance(transport, asyncio.Transport):
            if flush:
                transport.close()
            else:
                transport.abort()


async def send_events(
    request: web.Request,
    turn: Turn,
    stream_of: Callable[[int], Stream],
    trouble_of: Callable[[Exception], Trouble],
    ping_s: float,
    stall_s: float,
) -> web.StreamResponse:
    """Sends the turn to its end. `stream_of` makes the stream of the prompt's number of tokens; `trouble_of` says what an
    error is to the client. Raises what the turn failed with as long as nothing was sent."""
    stream = stream_of(await turn.started())
    events = _Events(request, stream, stall_s)
    try:
        try:
            async with _pinging(events, stream, ping_s), contextlib.aclosing(turn.portions()) as portions:
                async for portion in portions:
                    await events.send(partial(_written, stream, portion))
                answer = await turn.whole()
            await events.send(partial(stream.end, answer))
        except _Gone:
            raise
        except Exception as error:
            if not events.started:
                raise
            told = trouble_of(error)
            await events.send(partial(stream.fail, told.status, told.message, told.code))
            if told.status >= 500:
                events.cut(flush=True)
                return events.response
        await events.finish()
    except _Gone:
        turn.lost()
    except asyncio.CancelledError:
        # So the server ends the work for a client that goes away.
        turn.lost()
        raise
    return events.response


def _written(stream: Stream, portion: Sequence[Piece]) -> bytes:
    return b"".join(map(stream.piece, portion))


@asynccontextmanager
async def _pinging(events: _Events, stream: Stream, ping_s: float) -> AsyncGenerator[None, None]:
    task = asyncio.create_task(_ping(events, stream, ping_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _ping(events: _Events, stream: Stream, ping_s: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            due = events.sent_at + ping_s
            if loop.time() < due:
                await asyncio.sleep(due - loop.time())
            else:
                await events.send(stream.ping)
    except _Gone:
        # The next piece finds out for itself; until there is one, nobody needs to know.
        return
