"""What a process under load tells of itself, on a port beside its work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

_DUE_S = 0.005
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Lag:
    """How late the loop is with what was due."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _DUE_S
            await asyncio.sleep(_DUE_S)
            self.late.append(loop.time() - due)

    def taken(self) -> list[float]:
        """Seconds, sorted, since the last time that this was asked."""
        late, self.late = sorted(self.late), []
        return late


def quantile(late: list[float], q: float) -> float:
    """Of sorted values."""
    return late[int(q * (len(late) - 1))]


def resident(pid: int | str = "self") -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


@asynccontextmanager
async def telling(state: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """Serves the state as JSON; its URL."""

    async def tell(request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(state()), content_type="application/json")

    beside = web.Application()
    beside.router.add_get("/", tell)
    runner = web.AppRunner(beside, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
