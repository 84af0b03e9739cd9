"""Parts for tests of capture's HTTP face: a proxy on a real socket, an engine that is stopped in mid-turn, raw requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from pipeline.capture.secret import session_url
from pipeline.capture.server import Capture, Limits
from pipeline.capture.session import Session
from schemas.config import Behaviour
from tests.capture_parts import Script, ScriptedEngine, served

KEY = b"k" * 32
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}

MESSAGES = {**ASK, "max_tokens": 100}
RESPONSES = {"model": "m", "input": "q"}
CALLS = [("chat/completions", ASK), ("responses", RESPONSES), ("messages", MESSAGES)]
"""A path and its smallest body, of every protocol."""


def form(told: dict[str, Any]) -> str:
    """Whose protocol's an error's body is."""
    if told.get("type") == "error":
        assert set(told["error"]) == {"type", "message"}
        return "anthropic"
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return "openai"


class PacedEngine(ScriptedEngine):
    """Waits before the portion number `held` of a turn that is watched, until `go` is set. `broken` is raised then."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.held: int | None = None
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.broken: Exception | None = None
        self._steps = 0

    async def step(self) -> None:
        self._steps += 1
        if self._steps == self.held:
            self.waiting.set()
            await self.go.wait()
            if self.broken is not None:
                self._steps = 0
                self.held = None
                raise self.broken
        await asyncio.sleep(0)


class Proxy:
    def __init__(self, capture: Capture, engine: PacedEngine, base_url: str) -> None:
        self.capture = capture
        self.engine = engine
        self.base_url = base_url

    def url(self, session: str = "s1") -> str:
        """With /v1 at its end."""
        return session_url(self.base_url, KEY, session)

    def bare_url(self, session: str = "s1") -> str:
        return self.url(session).removesuffix("/v1")

    def open(self, session: str = "s1", **behaviour: Any) -> Session:
        return self.capture.open(session, Behaviour(**{"max_turns": 100, "max_tokens": 512, **behaviour}))

    def client(self, session: str = "s1", retries: int = 0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url(session), api_key="x", max_retries=retries)

    async def raw(self, path: str, body: bytes | dict[str, Any], session: str = "s1") -> Raw:
        """POSTs over a socket of its own; the answer is read by the test."""
        raw = await Raw.connect(self.base_url)
        await self.send(raw, path, body, session)
        return raw

    async def send(self, raw: Raw, path: str, body: bytes | dict[str, Any], session: str = "s1") -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        target = self.url(session).removeprefix(self.base_url)
        head = f"POST {target}/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.writer.write(head.encode() + body)
        await raw.writer.drain()


class Raw:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, base_url: str) -> Raw:
        return cls(*await asyncio.open_connection("127.0.0.1", int(base_url.rsplit(":", 1)[1])))

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers, names in lower case."""
        async with asyncio.timeout(20):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes | None:
        """The next chunk of a chunked body; b"" is its end, None a connection that ended without one."""
        async with asyncio.timeout(20):
            try:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                return (await self.reader.readexactly(size + 2))[:-2]
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    async def events(self) -> tuple[str, bool]:
        """The rest of the body, and whether it ended as it should."""
        text = b""
        while chunk := await self.chunk():
            text += chunk
        return text.decode(), chunk == b""

    def cut(self) -> None:
        transport = self.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def proxied(
    script: Script = lambda _: "hello", limits: Limits | None = None, max_context: int = 10_000
) -> AsyncIterator[Proxy]:
    """A proxy over an engine double."""
    engine = PacedEngine(script)
    capture = Capture(KEY, engine.renderer, engine, max_context, limits or Limits())
    async with served(capture) as base_url:
        yield Proxy(capture, engine, base_url)


async def eventually(condition: Any) -> None:
    """Waits until the condition holds, for 20 s at most."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
