"""A place to run an agent scaffold in: no network but one listening socket of ours, a home and a work directory of its own.

Promises: the scaffold sees a loopback interface and nothing else, on which only our server listens; it sees no process but
its own and none of our environment; when the stage is left, every process that it started is dead.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PORT = 8080
"""Free in every namespace, since each is its own."""

_ENTER = Path(__file__).with_name("enter.py")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a scaffold ended; `seconds` of wall time."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f"status {self.status} after {self.seconds:.1f} s\nstdout: {self.stdout[-3000:]}\nstderr: {self.stderr[-3000:]}"


@dataclass(frozen=True, slots=True)
class Stage:
    """`listening` is to be served before `run` is called, once; `url` is what the scaffold reaches it by."""

    folder: Path
    listening: socket.socket
    _channel: socket.socket
    _process: asyncio.subprocess.Process

    url = f"http://127.0.0.1:{PORT}"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def environment(self, path: Sequence[Path] = ()) -> dict[str, str]:
        """What every scaffold gets: nothing of ours but where programs are."""
        return {
            "HOME": str(self.home),
            "TMPDIR": str(self.folder / "tmp"),
            "PATH": os.pathsep.join([*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"]),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }

    async def run(
        self, argv: Sequence[str | Path], env: Mapping[str, str], within: float, stdin: str = ""
    ) -> Ended:
        """Runs the command to its end. Raises TimeoutError, with what it printed, after `within` seconds."""
        (self.folder / "stdin").write_text(stdin)
        command = {
            "argv": [str(a) for a in argv],
            "env": dict(env),
            "cwd": str(self.work),
            "stdin": str(self.folder / "stdin"),
        }
        began = time.monotonic()
        await asyncio.get_running_loop().sock_sendall(self._channel, json.dumps(command).encode())
        self._channel.shutdown(socket.SHUT_WR)
        try:
            status = await asyncio.wait_for(self._process.wait(), within)
        except TimeoutError:
            ended = self._ended(-1, within)
            raise TimeoutError(f"{argv[0]} ran past {within} s: {ended}") from None
        return self._ended(status, time.monotonic() - began)

    def _ended(self, status: int, seconds: float) -> Ended:
        texts = [(self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        return Ended(status, texts[0], texts[1], seconds)


@cache
def refusal() -> str:
    """Why there can be no stage on this machine; "" when there can."""
    try:
        done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return "unshare is missing (Debian: util-linux)"
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    for name in ("home", "work", "tmp"):
        (folder / name).mkdir()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    enter = [sys.executable, "-I", str(_ENTER), str(theirs.fileno()), str(PORT)]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *_unshare(),
            *enter,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[theirs.fileno()],
            env={},
        )
    theirs.close()
    try:
        with ours:
            yield Stage(folder, await _received(ours), ours, process)
    finally:
        if process.returncode is None:
            # unshare's death kills pid 1 of the namespace (--kill-child), and that all the others.
            process.kill()
            await process.wait()


def _unshare() -> list[str]:
    flags = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *flags]


async def _received(channel: socket.socket) -> socket.socket:
    ready = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    loop.add_reader(channel, lambda: ready.done() or ready.set_result(None))
    try:
        async with asyncio.timeout(20):
            await ready
    finally:
        loop.remove_reader(channel)
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if not fds:
        raise RuntimeError("the stage ended before it listened: see its stderr")
    return socket.socket(fileno=fds[0])
