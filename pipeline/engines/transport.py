"""HTTP to one engine: whole answers, answers as they come, and what their failures mean.

Promises: what blames the request (400, 413, 422, also inside a stream that began with 200) is EngineRefused; what blames
the deployment (401, 403, 404) is EngineUnavailable; everything else is `Broken`: worth another try. The token is sent as
a header and never part of a message, also where the engine says it back.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import orjson

from pipeline.engines.base import EngineRefused, EngineUnavailable

_REFUSALS = frozenset({400, 413, 422})
# Of an engine that is starting, paused, overloaded or behind a proxy that cannot reach it.
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_CONNECT_S = 10.0
_LARGE = 1 << 20
"""Bytes of a body from which on it is sent in pieces, so that the loop gets its turns."""
_END = b"[DONE]"


class Broken(Exception):
    """A request that came to no end, not by its own fault: to be repeated elsewhere at once, or here `after` seconds.

    `gone`: nobody answers there at all.
    """

    def __init__(self, reason: str, after: float = 0.0, gone: bool = False) -> None:
        super().__init__(reason)
        self.after, self.gone = after, gone


class Events:
    """Splits a stream of server-sent events into their data, however it is cut. A large event is not copied per piece."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes."""
        # The end of an event may be split between two pieces.
        scan = max(len(self._rest) - 1, 0)
        self._rest += piece
        found: list[bytes] = []
        begin = 0
        while (end := self._rest.find(b"\n\n", scan)) >= 0:
            for line in bytes(memoryview(self._rest)[begin:end]).split(b"\n"):
                # Others are comments and event names.
                if line.startswith(b"data:"):
                    found.append(line[5:].strip())
            begin = scan = end + 2
        if begin:
            del self._rest[:begin]
        return found


class Transport:
    """Connections to one engine."""

    def __init__(self, base_url: str, token: str | None = None) -> None:
        self.base = base_url.rstrip("/")
        self._token = token
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def whole(self, path: str, body: bytes, headers: Mapping[str, str], deadline: float) -> bytes:
        """The body of the answer to a POST, by `deadline` (time.monotonic)."""
        async with self._post(path, body, headers, deadline) as response:
            return await _read(response)

    async def events(
        self, path: str, body: bytes, headers: Mapping[str, str], deadline: float
    ) -> AsyncGenerator[bytes, None]:
        """The data of the events that answer a POST, up to `[DONE]`; Broken when the connection ends before that.

        Closing the generator before its end closes the connection, by which the engine drops the request.
        """
        splitter = Events()
        async with self._post(path, body, headers, deadline) as response:
            if not response.content_type.startswith("text/event-stream"):
                raise EngineUnavailable(f"{self.base} answered {response.content_type}, not a stream")
            try:
                async for piece in response.content.iter_any():
                    for data in splitter.feed(piece):
                        if data == _END:
                            # What is left of the answer is its end: read it, so that the connection is used again.
                            await response.content.read()
                            return
                        yield data
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Broken(repr(error)) from error
        raise Broken("the stream ended before its end")

    def refuse(self, error: Mapping[str, Any]) -> Exception:
        """What an error object inside a stream means."""
        code = error.get("code")
        return self._meaning(code if isinstance(code, int) else 500, str(error.get("message"))[:500], 0.0)

    async def control(
        self,
        method: str,
        path: str,
        within: float,
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        data: bytes | None = None,
    ) -> dict[str, Any]:
        """An object from one of the engine's other paths; {} where it answers none. Raises EngineUnavailable."""
        try:
            async with self._session().request(
                method,
                f"{self.base}{path}",
                params=params,
                json=json,
                data=None if data is None else io.BytesIO(data),
                timeout=aiohttp.ClientTimeout(total=within),
            ) as response:
                body = await response.read()
                if response.status != 200:
                    raise EngineUnavailable(
                        f"{self.base}{path} answered {response.status}: {self._shown(body, 300)}"
                    )
            answer: object = orjson.loads(body) if body else {}
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise EngineUnavailable(f"{self.base}{path}: {error!r}") from error
        return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}

    async def answers(self, path: str, within: float) -> bool:
        """Whether a GET gives 200 in time."""
        try:
            async with self._session().get(
                f"{self.base}{path}", timeout=aiohttp.ClientTimeout(total=within)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _session(self) -> aiohttp.ClientSession:
        # Made at first use: aiohttp binds a session to the running loop.
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, socket_factory=_kept_alive),
                read_bufsize=1 << 18,
            )
        return self._http

    @asynccontextmanager
    async def _post(
        self, path: str, body: bytes, headers: Mapping[str, str], deadline: float
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Broken("the deadline has passed")
        try:
            response = await self._session().post(
                f"{self.base}{path}",
                data=body if len(body) < _LARGE else io.BytesIO(body),
                headers={"Content-Type": "application/json", **headers},
                timeout=aiohttp.ClientTimeout(total=left, sock_connect=min(left, _CONNECT_S)),
            )
        except aiohttp.ClientConnectorError as error:
            raise Broken(repr(error), gone=True) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Broken(repr(error)) from error
        async with response:
            if response.status != 200:
                shown = self._shown(await _read(response), 500)
                after = response.headers.get("Retry-After", "")
                raise self._meaning(response.status, shown, float(after) if after.isdigit() else 0.0)
            yield response

    def _shown(self, body: bytes, most: int) -> str:
        """The beginning of an answer, for people. Some say which key they refuse."""
        text = body.decode(errors="replace")
        return (text.replace(self._token, "[token]") if self._token else text)[:most]

    def _meaning(self, status: int, message: str, after: float) -> Exception:
        reason = f"status {status}: {message}"
        if status in _REFUSALS:
            return EngineRefused(f"{self.base}: {reason}")
        if status in _RETRYABLE:
            return Broken(reason, after)
        return EngineUnavailable(f"{self.base}: {reason}")


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    """A host that vanishes closes no connection: a generation on it would wait for its deadline, hours away."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 30),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Broken(repr(error)) from error
