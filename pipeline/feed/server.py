"""The packer's end of the Unix socket: connections of ranks, without knowledge of how windows come about.

Promises:
- the socket is only its user's (0600); a stale one is replaced, a live one is never taken from its owner;
- each connection has at most one `ask` open; a rank that hangs up gives back what it holds and waits for;
- a malformed message costs its sender the connection, and nobody else anything.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Protocol as Interface

from pipeline.feed.ahead import WindowId
from pipeline.feed.wire import (
    PREFIX,
    Answer,
    Protocol,
    Request,
    checked_length,
    checked_path,
    frame,
    parse_request,
)

_LOG = logging.getLogger("packtrain.feed")
_BACKLOG = 64
_REASON = 2000
"""Characters of a refusal's reason: a message has room for them, even if JSON makes six bytes of each."""


class WindowRefused(Exception):
    """The rank will not get this window; the message says why and what to do."""


class Windows(Interface):
    """What a server serves. `rank` is a connection's identity."""

    async def hold(self, rank: object, window: WindowId, revision: int) -> tuple[Answer, int]:
        """Waits for the window in that revision or a newer one, and marks it as held by the rank. Returns a descriptor that
        stays the callee's, valid while held. Raises WindowRefused."""
        ...

    def release(self, rank: object, window: WindowId) -> None:
        """The rank is done with the window, or was never given it."""
        ...

    def gone(self, rank: object) -> None:
        """The rank has vanished."""
        ...


class SocketTaken(RuntimeError):
    """Another live process serves on the path."""


def listen(path: Path) -> socket.socket:
    """A listening, non-blocking socket at the path, mode 0600. Raises SocketPathTooLong, SocketTaken, OSError."""
    checked_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Or two that start at once would both find a stale socket, and the second would unlink the first's new one.
        fcntl.flock(directory, fcntl.LOCK_EX)
        return _listen(path)
    finally:
        os.close(directory)


def _listen(path: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its owner died
        except FileNotFoundError:
            pass
        else:
            raise SocketTaken(
                f"a live process serves {path}; stop it, or set packer.socket_dir to another directory"
            )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode is right from the first moment: chmod after bind would leave a gap.
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


async def serve_windows(listening: socket.socket, windows: Windows) -> None:
    """Serves ranks until cancelled; then hangs up on all of them."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:

        def accept() -> None:
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return  # hung up again already
            connection.setblocking(False)
            task = group.create_task(_Rank(connection, windows).serve())
            # A task that is cancelled before its first step runs none of its own clean-up.
            task.add_done_callback(lambda _: connection.close())

        # Not sock_accept: cancelled at the wrong moment, it loses the connection that it has accepted.
        loop.add_reader(listening, accept)
        try:
            await loop.create_future()
        finally:
            loop.remove_reader(listening)


class _Rank:
    def __init__(self, connection: socket.socket, windows: Windows) -> None:
        self._socket = connection
        self._windows = windows
        self._loop = asyncio.get_running_loop()
        self._answering: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        try:
            while (request := await self._receive()) is not None:
                window = WindowId(request.step, request.microbatch)
                if request.kind == "ack":
                    self._windows.release(self, window)
                elif self._answering is not None and not self._answering.done():
                    raise Protocol("a second ask before the first was answered")
                else:
                    self._answering = self._loop.create_task(self._answer(window, request.revision))
        except Protocol as error:
            _LOG.warning("a rank is hung up on: %s", error)
        except ConnectionError:
            _LOG.info("a rank is gone")
        finally:
            if self._answering is not None:
                self._answering.cancel()
                await asyncio.gather(self._answering, return_exceptions=True)
            self._windows.gone(self)
            self._socket.close()

    async def _receive(self) -> Request | None:
        prefix = await self._exactly(PREFIX.size)
        if prefix is None:
            return None
        body = await self._exactly(checked_length(PREFIX.unpack(prefix)[0]))
        if body is None:
            raise ConnectionError("hung up in mid-message")
        return parse_request(body)

    async def _exactly(self, size: int) -> bytes | None:
        """None at a clean end. Plain recv: descriptors that a rank may send are dropped by the kernel."""
        data = b""
        while len(data) < size:
            part = await self._loop.sock_recv(self._socket, size - len(data))
            if not part and data:
                raise ConnectionError("hung up in mid-message")
            if not part:
                return None
            data += part
        return data

    async def _answer(self, window: WindowId, revision: int) -> None:
        try:
            answer, fd = await self._windows.hold(self, window, revision)
        except WindowRefused as refusal:
            answer = Answer(step=window.step, microbatch=window.microbatch, error=str(refusal)[:_REASON])
            fd = None
        except Exception:
            # A fault of the packer's own: the rank must not wait for ever for an answer that will not come.
            _LOG.exception("no answer for step %d micro-batch %d", *window)
            self._hang_up()
            return
        try:
            await self._send(frame(answer), fd)
        except ConnectionError:
            pass  # seen by the reading side
        except OSError as error:
            # Too many descriptors on their way, say: the rank asks again.
            _LOG.warning("step %d micro-batch %d cannot be handed over: %s", *window, error)
            self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _send(self, data: bytes, fd: int | None) -> None:
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        while True:
            try:
                sent = self._socket.sendmsg([data], rights)
                break
            except BlockingIOError:
                await self._writable()
        await self._loop.sock_sendall(self._socket, data[sent:])

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._socket, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            self._loop.remove_writer(self._socket)
