"""What a scaffold sends, recorded, and faults for it: an aiohttp middleware around capture's application.

Bodies are recorded as the server reads them, unpacked, so that nothing stands between the scaffold and the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pipeline.capture import server as capture_server
from pipeline.capture.session import Session
from tests.scaffolds.policy import ASKED

Answers = Callable[["Exchange"], "int | None"]
"""Whether an exchange gets a fault instead of an answer: its status; CUT cuts the connection in mid-answer."""
CUT = 0


def on_call(number: int, status: int) -> Answers:
    """The fault for the model call of this number, from 1."""
    seen = 0

    def fault(exchange: Exchange) -> int | None:
        nonlocal seen
        seen += 1
        return status if seen == number else None

    return fault


POSTS = ("/chat/completions", "/responses", "/messages")


@dataclass(slots=True)
class Exchange:
    """One request; `path` has no session and no secret. `status` is 0 while there is none."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    at: float
    status: int = 0
    raw: bytes = b""
    transport: asyncio.Transport | None = None
    cut: bool = False
    portions: int = 0

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def asks(self) -> bool:
        """Whether it is a model call."""
        return self.method == "POST" and self.path.partition("?")[0].endswith(POSTS)


@dataclass(slots=True)
class Wire:
    """`patience`: how many portions of an answer are sampled before its connection is cut."""

    fault: Answers = lambda _: None
    patience: int = 1
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    began: float = field(default_factory=time.monotonic)
    session: Session | None = None

    @property
    def calls(self) -> list[Exchange]:
        """The model calls, in order."""
        return [exchange for exchange in self.exchanges if exchange.asks]

    @property
    def statuses(self) -> list[int]:
        """Of the model calls, in order."""
        return [exchange.status for exchange in self.calls]

    def around(self, app: web.Application) -> None:
        """Puts the recorder around an application that is not yet running."""
        app.middlewares.insert(0, self._record)

    @web.middleware
    async def _record(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        exchange = Exchange(
            len(self.exchanges),
            request.method,
            "/" + request.path_qs.split("/", 4)[-1],
            {name.lower(): value for name, value in request.headers.items()},
            time.monotonic() - self.began,
        )
        self.exchanges.append(exchange)
        if isinstance(request.transport, asyncio.Transport):
            exchange.transport = request.transport
        ASKED.set(exchange)
        fault = self.fault(exchange) if exchange.asks else None
        if fault:
            exchange.raw = await request.read()
            exchange.status = fault
            return web.json_response(_ERROR, status=fault)
        exchange.cut = fault == CUT and fault is not None
        response = await handler(request)
        exchange.status = response.status
        return response

    def cut_now(self) -> None:
        """Cuts the connection of the generation that is being sampled, if its exchange is to be cut."""
        exchange = ASKED.get()
        if exchange is not None and exchange.cut and exchange.transport is not None:
            exchange.portions += 1
            if exchange.portions >= self.patience:
                exchange.transport.abort()


_ERROR = {
    "type": "error",
    "error": {"type": "api_error", "message": "a fault of the test", "code": "fault", "param": None},
}


def keep_bodies(monkeypatch: Any) -> None:
    """Lets exchanges know their bodies as the server reads them."""
    read = capture_server.read_body

    async def reading(request: web.Request, *given: Any) -> bytes:
        body = await read(request, *given)
        exchange = ASKED.get()
        if exchange is not None:
            exchange.raw = body
        return body

    monkeypatch.setattr(capture_server, "read_body", reading)
