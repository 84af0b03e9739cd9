"""The host's side of a workspace's root program: starts it, sends it programs, hears how they ended.

One event loop, no thread. See `overlay_init` for the protocol and for what the program promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import marshal
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from pipeline.harnesses.kernel import program, received
from pipeline.harnesses.workspaces.base import WorkspaceFailed

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_END_S = 10.0


def memfd(data: bytes) -> int:
    """A sealed memory file, at its beginning."""
    fd = os.memfd_create("packtrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class RootProgram:
    """Made and used on one loop. `listening` is there after `start` when a port was asked for."""

    def __init__(self) -> None:
        self.listening: socket.socket | None = None
        self.writable = False
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[None] | None = None
        self._number = 0
        self._gone = ""

    async def start(self, settings: dict[str, Any], groups: Sequence[int]) -> None:
        """Returns when programs can be run. Raises `WorkspaceFailed`."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        request = memfd(marshal.dumps(settings))
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds, and a thread's end would kill it
                    [
                        *program("pipeline.harnesses.workspaces.overlay_init"),
                        str(theirs.fileno()),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            loop.add_reader(self._control, self._heard)
            socket.send_fds(self._control, [b"start"], [request, *groups])
        except OSError as error:
            raise WorkspaceFailed(f"the workspace's root program cannot be started: {error}") from error
        finally:
            os.close(request)
        await self._ready

    async def run(self, what: dict[str, Any], fds: Sequence[int]) -> asyncio.Future[int]:
        """Starts a program with stdin, stdout, stderr and cgroup.procs `fds`; the future is its exit status."""
        self._number += 1
        number = self._number
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        request = memfd(marshal.dumps(what))
        try:
            while True:
                if self._control is None or self._gone:
                    raise WorkspaceFailed(f"the workspace is gone: {self._gone or 'it was closed'}")
                try:
                    socket.send_fds(self._control, [str(number).encode()], [request, *fds])
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.002)
                except OSError as error:
                    raise WorkspaceFailed(f"the workspace does not listen: {error}") from error
        finally:
            os.close(request)
        self._waiting[number] = ended
        return ended

    async def end(self) -> None:
        """Returns when every process in the workspace is dead. Raises `WorkspaceFailed` when they are not in ten seconds."""
        self._let_go("it was closed")
        if self.listening is not None:
            self.listening.close()
        process = self._process
        if process is None:
            return
        # Pid 1 inside ends at the end of file; the kernel then kills the others, and waits for them before it tells.
        if not await _exited(process, _END_S / 2):
            process.kill()
            if not await _exited(process, _END_S / 2):
                raise WorkspaceFailed(
                    f"the workspace's root program {process.pid} does not end within {_END_S} s"
                )

    def _heard(self) -> None:
        assert self._control is not None
        try:
            message, fds = received(self._control, 1)
        except BlockingIOError:
            return
        except OSError as error:
            message, fds = b"", []
            self._gone = str(error)
        if fds:
            self.listening = socket.socket(fileno=fds[0])
        if not message:
            self._let_go(self._gone or "its root program ended")
            return
        kind, _, rest = message.decode(errors="replace").partition(" ")
        if kind in ("ended", "failed"):
            number, _, how = rest.partition(" ")
            ended = self._waiting.pop(int(number), None)
            if ended is None or ended.done():
                return
            if kind == "ended":
                ended.set_result(int(how))
            else:
                ended.set_exception(WorkspaceFailed(f"the workspace starts no program: {how}"))
        elif self._ready is not None and not self._ready.done():
            if kind == "ready":
                self.writable = rest == "1"
                self._ready.set_result(None)
            else:
                self._ready.set_exception(WorkspaceFailed(_explained(rest)))

    def _let_go(self, why: str) -> None:
        self._gone = self._gone or why
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        for ended in (self._ready, *self._waiting.values()):
            if ended is not None and not ended.done():
                ended.set_exception(WorkspaceFailed(f"the workspace is gone: {self._gone}"))
                # Nobody need be waiting for it any more.
                ended.exception()
        self._waiting.clear()


def _explained(error: str) -> str:
    return (
        f"the workspace could not be made: {error}. It needs Linux >= 5.12 with namespaces: run as root, or allow user "
        "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        "kernel.apparmor_restrict_unprivileged_userns; in Docker, a seccomp profile that lets unshare and mount through)"
    )


async def _exited(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Waits on a pidfd, for which asyncio's own child watchers may take a thread each."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    done = asyncio.Event()
    loop.add_reader(pidfd, done.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), within_s)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.poll() is not None
