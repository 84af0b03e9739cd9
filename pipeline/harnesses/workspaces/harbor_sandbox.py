"""One environment of Harbor's that was started, as a workspace.

Promise: no value of a program's environment or of its stdin is on a command line of this machine, nor is an address that
came from `reach`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipeline.harnesses.workspaces import script
from pipeline.harnesses.workspaces.base import Ended, WorkspaceFailed
from pipeline.harnesses.workspaces.owners import owned

T = TypeVar("T")
GRACE_S = 60.0
"""What a provider gets beside a program's own time before it is taken for gone."""
_INLINE = 60_000
"""Bytes of a script that go on a command line; Linux takes 128 KiB in one argument."""


class Sandbox:
    """One started environment."""

    def __init__(self, there: Loop, environment: Any, name: str, host: str, port: int) -> None:
        self._there = there
        self._environment = environment
        self._name = name
        self._host, self._port = host, port
        self._reached: set[str] = set()
        self._workdir = "/"
        self._root = True
        self._own: list[int] = []

    async def begin(self) -> None:
        """Learns where and as whom programs run; raises `WorkspaceFailed` where they do not."""
        said = await self._shell('id -u && pwd && echo /proc/[0-9]* | sed "s,/proc/,,g"', "", GRACE_S)
        found = re.search(r"^(\d+)\n(/.*)\n([\d ]+)\n", said, re.MULTILINE)
        if found is None:
            raise WorkspaceFailed(f"harbor:{self._name} runs no program: {said[-500:]!r}")
        self._root, self._workdir = found[1] == "0", found[2]
        self._own = [int(pid) for pid in found[3].split()]

    @property
    def workdir(self) -> str:
        return self._workdir

    def reach(self, url: str) -> str:
        parts = urlsplit(url)
        host = self._host or parts.hostname or ""
        port = self._port or parts.port
        out = parts._replace(
            netloc=f"{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"
        ).geturl()
        self._reached.add(out)
        return out

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> Ended:
        mark = secrets.token_hex(8)
        text = script.program(
            mark,
            argv,
            timeout_s=timeout_s,
            cwd=cwd,
            env=env,
            stdin=stdin,
            output_bytes=output_bytes,
        )
        secret = bool(env or stdin) or any(url in word for url in self._reached for word in argv)
        began = time.monotonic()
        running = asyncio.ensure_future(self._program(mark, text, user, timeout_s + GRACE_S, secret))
        try:
            said = await asyncio.shield(running)
        except asyncio.CancelledError:
            await whole(self._kill, mark, running)
            raise
        seconds = time.monotonic() - began
        try:
            ended = script.ended(mark, said, seconds)
        except ValueError as error:
            raise WorkspaceFailed(f"harbor:{self._name}: {error}") from error
        if ended.stopped and not self._is_root(user):
            # What it started as another user, by sudo, is not its to kill.
            await self._shell(script.kill(mark), "root", GRACE_S)
        return ended

    async def put(self, source: Path, target: str) -> None:
        # A provider may take a link for itself.
        real, folder = await asyncio.to_thread(lambda: (source.resolve(), source.is_dir()))
        parent = target if folder else str(PurePosixPath(target).parent)
        await self._shell(f"mkdir -p -- {shlex.quote(parent)}", "root", GRACE_S)
        move = self._environment.upload_dir if folder else self._environment.upload_file
        await self._harbor(move(real, target), None)

    async def write(self, target: str, data: bytes, mode: int = 0o644) -> None:
        with tempfile.TemporaryDirectory(prefix=owned("write-")) as scratch:
            # Named as it will be: some providers look at the name.
            file = Path(scratch) / PurePosixPath(target).name
            file.touch(mode=0o600)
            file.write_bytes(data)
            file.chmod(mode)
            await self.put(file, target)
        if not self._environment.capabilities.mounted:
            # An engine's copy keeps the mode; who knows of others.
            await self._shell(f"chmod {mode:o} {shlex.quote(target)}", "root", GRACE_S)

    async def get(self, source: str, most: int) -> bytes:
        mark = secrets.token_hex(8)
        said = await self._shell(script.read(mark, source, most), "root", GRACE_S)
        try:
            data = script.contents(mark, said)
        except ValueError as error:
            raise WorkspaceFailed(f"harbor:{self._name}: {error}") from error
        if data is None:
            raise FileNotFoundError(f"{source} is no file in the workspace")
        if len(data) > most:
            raise ValueError(f"{source} is over {most} bytes")
        return data

    async def end_processes(self, grace_s: float) -> None:
        mark = secrets.token_hex(8)
        said = await self._shell(script.end(mark, self._own, grace_s), "root", grace_s + GRACE_S)
        if f"{mark} 0 left\n" not in said:
            raise WorkspaceFailed(f"harbor:{self._name}: processes cannot be ended: {said[-500:]!r}")

    async def peak_bytes(self) -> int:
        # Version 2 of the kernel's interface, and 1.
        files = "/sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory/memory.max_usage_in_bytes"
        said = (await self._shell(f"cat {files} 2>/dev/null", "root", GRACE_S)).strip()
        return int(said) if said.isdigit() else 0

    def _is_root(self, user: str) -> bool:
        return user in ("root", "0") or (not user and self._root)

    async def _program(self, mark: str, text: str, user: str, seconds: float, secret: bool) -> str:
        if not secret and len(text) < _INLINE:
            return await self._shell(text, user, seconds)
        file = f"/tmp/.packtrain-{mark}.sh"  # noqa: S108  # in the sandbox, under a name that cannot be guessed
        root = self._is_root(user)
        await self.write(file, f"rm -f {file} 2>/dev/null\n{text}".encode(), 0o600 if root else 0o644)
        try:
            return await self._shell(f"exec bash {file}", user, seconds)
        finally:
            if not root:
                # Who runs it may not remove it from /tmp.
                await self._shell(f"rm -f {file}", "root", GRACE_S)

    async def _kill(self, mark: str, running: asyncio.Future[str]) -> None:
        with suppress(WorkspaceFailed):
            await self._shell(script.kill(mark), "root", GRACE_S)
        await asyncio.wait([running], timeout=GRACE_S / 3)
        running.cancel()
        with suppress(asyncio.CancelledError, WorkspaceFailed):
            await running

    async def _shell(self, command: str, user: str, seconds: float) -> str:
        """What a bash command printed; raises `WorkspaceFailed` when that takes longer."""
        done = self._environment.exec(command, timeout_sec=int(seconds) + 1, user=user or None)
        return (await self._harbor(done, seconds)).stdout or ""

    async def _harbor(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await self._there.do(work)
        except TimeoutError as error:
            raise WorkspaceFailed(f"harbor:{self._name} did not answer within {seconds:.0f} s") from error
        except Exception as error:
            raise WorkspaceFailed(f"harbor:{self._name}: {line(error)}") from error


class _OwnSessions(asyncio.SelectorEventLoop):
    """A signal to the host's process group is no signal to the clients of an engine: its trials end first."""

    async def subprocess_exec(self, *arguments: Any, **more: Any) -> Any:
        more["start_new_session"] = True
        return await super().subprocess_exec(*arguments, **more)


class Loop:
    """An event loop on a thread of its own, started when it is first needed; it ends with the process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = _OwnSessions()
            threading.Thread(target=self._loop.run_forever, name="harbor", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def whole(work: Any, *arguments: Any) -> None:
    """Runs it to its end, whoever cancels; then is cancelled."""
    task = asyncio.ensure_future(work(*arguments))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def line(error: BaseException) -> str:
    """An error in one line, its end kept: that is where a command's own words are."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 1500 else f"{text[:300]} ... {text[-1200:]}"
