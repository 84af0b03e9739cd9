"""Carries connections from a workspace's one listening socket to one address, and to nothing else.

Promises: bytes go on as they come, both ways, with back-pressure; each end of stream is passed on by itself; when the peer
cannot be reached or a side breaks off, so does the other; `close` ends all connections; a workspace has at most `MOST` at
once, and one more is broken off: each takes two descriptors of a process that many tenants share.
"""

from __future__ import annotations

import asyncio
import socket

CHUNK = 1 << 16
MOST = 256
BACKLOG = 128
"""Connections that are taken in one go, before the first of them can be broken off."""


class Relay:
    """Serves on the running loop. Made by `start`."""

    def __init__(self, peer: tuple[str, int]) -> None:
        self._peer = peer
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Takes the socket over."""
        listening.setblocking(False)
        self._server = await asyncio.start_server(
            self._accepted, sock=listening, backlog=BACKLOG, limit=CHUNK
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sides = [writer]
        try:
            far_reader, far = await asyncio.open_connection(*self._peer, limit=CHUNK)
            sides.append(far)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pump(reader, far))
                ways.create_task(_pump(far_reader, writer))
            for side in sides:
                side.close()
        except (OSError, ExceptionGroup):
            # Whichever side broke off: the other hears of it below, which is all that there is to say.
            pass
        finally:
            for side in sides:
                if not side.is_closing():
                    side.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()
