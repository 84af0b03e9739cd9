"""The HTTP face of capture: three protocols under /s/{session}/{secret}, one application for all of a host's tenants.

Promises:
- without the session's secret nothing is told: an unknown session and a wrong secret give the same 404;
- trouble is classified for the client's retries (`pipeline.capture.http_errors`) and told in the protocol's own form;
- a client that goes away does not end its generation;
- what a session's clients hold of the host at once, in calls and in bytes, is bounded;
- no URL, and so no secret, is logged.

A base URL works with /v1 at its end and without: clients differ in which of the two they are given.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.capture import http_models as models
from pipeline.capture.call import Call
from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import Dialect
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialects.responses import Responses
from pipeline.capture.http_body import read_body, refuse_dense
from pipeline.capture.http_errors import RETRY_AFTER_S, Refused, Trouble, trouble
from pipeline.capture.renderers.base import Renderer
from pipeline.capture.renderers.remembering import Remembering
from pipeline.capture.rules import Rules
from pipeline.capture.secret import is_session_secret, reasoning_key
from pipeline.capture.session import Journal, Session
from pipeline.capture.showing import Showing
from pipeline.capture.sse import send_events
from pipeline.capture.turn import Turn
from pipeline.engines.base import Engine
from pipeline.signal.rules import NO_RULES, Judge
from schemas.config import Behaviour

_LOG = logging.getLogger("packtrain.capture.http")
_REMEMBERED = 10_000
_COUNTED_FIELDS = 256
_FIELD_CHARACTERS = 64
_SMALL_BODY = 64 << 10
"""A body that is read in about the time that a thread takes to be asked."""
_BASE = "/s/{session}/{secret}"
_V1 = "{v1:(?:v1/)*}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the clients of one session may take.

    body_bytes: one body, packed and unpacked. calls: at once. held_bytes: of all bodies whose calls are under way.
    ping_s: seconds of silence before a stream pings. stall_s: seconds that a client may take nothing of what it is sent.
    """

    body_bytes: int = 32 << 20
    calls: int = 64
    held_bytes: int = 256 << 20
    ping_s: float = 10.0
    stall_s: float = 120.0


@dataclass(slots=True)
class _Door:
    """A session and what its clients hold now."""

    session: Session
    calls: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class _Visit:
    """One request to a session, let in. `hold` takes bytes of the session's share and raises Refused."""

    request: web.Request
    dialect: Dialect
    session: Session
    hold: Callable[[int], None]


_Work = Callable[[_Visit], Awaitable[web.StreamResponse]]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Capture:
    """The sessions of one host. `ignored` counts request fields that had no effect, by name."""

    def __init__(
        self,
        run_key: bytes,
        renderer: Renderer,
        engine: Engine,
        max_context: int,
        limits: Limits = Limits(),
        showing: Showing | None = None,
    ) -> None:
        self._run_key = run_key
        self._renderer = Remembering(renderer)
        self._engine = engine
        self._max_context = max_context
        self._limits = limits
        self._showing = showing
        self._doors: dict[str, _Door] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._chat, self._anthropic, self._responses = Chat(), Anthropic(), Responses()
        self.ignored: Counter[str] = Counter()

    def open(
        self,
        session_id: str,
        behaviour: Behaviour,
        rules: Rules = Rules(),  # noqa: B008  # frozen
        deadline: float | None = None,
        journal: Journal | None = None,
        judge: Judge = NO_RULES,
    ) -> Session:
        """A new session (see `Session`); raises ValueError when one of that id exists or existed."""
        if session_id in self._doors or session_id in self._closed:
            raise ValueError(f"session {session_id!r} exists already")
        session = Session(
            session_id,
            behaviour,
            self._max_context,
            self._renderer,
            self._engine,
            reasoning_key(self._run_key, session_id),
            rules,
            deadline,
            journal,
            judge,
            self._showing,
        )
        self._doors[session_id] = _Door(session)
        return session

    async def close(self, session: Session) -> None:
        """Ends the session: its URL answers 410 from now on."""
        if self._doors.pop(session.id, None) is not None:
            self._closed[session.id] = None
            while len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)
        await session.close()

    def application(self) -> web.Application:
        """The aiohttp application; `runner` runs it."""
        app = web.Application(middlewares=[self._in_protocol])
        add = app.router.add_route
        for path, dialect in (
            ("chat/completions", self._chat),
            ("responses", self._responses),
            ("messages", self._anthropic),
        ):
            add("POST", f"{_BASE}/{_V1}{path}", self._visited(self._answer, dialect))
        add("POST", f"{_BASE}/{_V1}messages/count_tokens", self._visited(self._count_tokens, self._anthropic))
        add("GET", f"{_BASE}/{_V1}responses", self._visited(_no_socket, self._responses))
        for path, work in (
            (f"{_BASE}/{_V1}models", self._models),
            (f"{_BASE}/{_V1}models/{{model:.+}}", self._model),
            # Clients knock before they call: on what they were given as base URL, and on Anthropic's own path.
            (f"{_BASE}{{v1:(?:/v1)*/?}}", _hello),
            (f"{_BASE}/{_V1}api/hello", _hello),
        ):
            app.router.add_get(path, self._visited(work))
        app.router.add_get("/healthz", self._health)
        return app

    def runner(self, shutdown_timeout: float) -> web.AppRunner:
        """Runs the application without logging a URL; a session learns when its client goes away."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            logger=_LOG,
            handler_cancellation=True,
            # Bodies are unpacked where what they unpack to is bounded.
            auto_decompress=False,
            shutdown_timeout=shutdown_timeout,
        )

    def _visited(self, work: _Work, dialect: Dialect | None = None) -> _Handler:
        """A handler that lets a request in, does the work, and tells its trouble."""

        async def handle(request: web.Request) -> web.StreamResponse:
            spoken = dialect or self._dialect(request)
            door = self._find(request)
            if isinstance(door, Trouble):
                return _told(spoken, door)
            held = 0

            def hold(size: int) -> None:
                nonlocal held
                if door.held + size > self._limits.held_bytes:
                    raise Refused(429, "too much is under way at once: try again", "too_many_bytes")
                door.held += size
                held += size

            door.calls += 1
            try:
                if door.calls > self._limits.calls:
                    raise Refused(
                        429,
                        f"{self._limits.calls} calls are under way on this session: try again",
                        "too_many_calls",
                    )
                return await work(_Visit(request, spoken, door.session, hold))
            except Exception as error:
                return _told(spoken, trouble(error, spoken, door.session.id))
            finally:
                door.calls -= 1
                door.held -= held

        return handle

    def _find(self, request: web.Request) -> _Door | Trouble:
        session_id, secret = request.match_info["session"], request.match_info["secret"]
        known = is_session_secret(self._run_key, session_id, secret)
        door = self._doors.get(session_id)
        if known and door is not None:
            return door
        if known and session_id in self._closed:
            return Trouble(410, "this session is over", "session_closed")
        return Trouble(404, "no such session", "not_found")

    async def _answer(self, visit: _Visit) -> web.StreamResponse:
        session, dialect = visit.session, visit.dialect
        reply = session.reply(int(time.time()))
        call: Call = await self._read(visit, lambda body: dialect.parse(body, reply))
        self._count(call.ignored)
        turn = session.answer(call, _lower(visit.request.headers))
        if call.stream:
            return await send_events(
                visit.request,
                turn,
                lambda prompt_tokens: dialect.stream(call, reply, prompt_tokens),
                lambda error: trouble(error, dialect, session.id),
                self._limits.ping_s,
                self._limits.stall_s,
            )
        answer = await turn.whole()
        return await self._deliver(visit, turn, _json(200, dialect.response(call, answer, reply)))

    async def _count_tokens(self, visit: _Visit) -> web.StreamResponse:
        reply = visit.session.reply(int(time.time()))
        dialogue = await self._read(visit, lambda body: self._anthropic.parse_count(body, reply))
        return _json(200, self._anthropic.count_response(await visit.session.count(dialogue)))

    async def _models(self, visit: _Visit) -> web.StreamResponse:
        make = models.anthropic_models if visit.dialect is self._anthropic else models.openai_models
        return _json(200, make(self._max_context))

    async def _model(self, visit: _Visit) -> web.StreamResponse:
        make = models.anthropic_model if visit.dialect is self._anthropic else models.openai_model
        name = visit.request.match_info["model"]
        if len(name) > models.MAX_ID_CHARACTERS:
            raise Refused(404, f"no model's name has over {models.MAX_ID_CHARACTERS} characters", "not_found")
        return _json(200, make(name, self._max_context))

    async def _health(self, request: web.Request) -> web.Response:
        return _json(200, {"sessions": len(self._doors)})

    async def _read(self, visit: _Visit, parse: Callable[[bytes], Any]) -> Any:
        body = await read_body(visit.request, self._limits.body_bytes, visit.hold)

        def read() -> Any:
            refuse_dense(body)
            return parse(body)

        return read() if len(body) <= _SMALL_BODY else await asyncio.to_thread(read)

    async def _deliver(self, visit: _Visit, turn: Turn, response: web.Response) -> web.Response:
        """Sends a response while the call still counts; a client that does not take it loses its connection."""
        try:
            async with asyncio.timeout(self._limits.stall_s):
                await response.prepare(visit.request)
                await response.write_eof()
        except TimeoutError:
            turn.lost()
            if visit.request.transport is not None:
                visit.request.transport.abort()
        except ConnectionError:
            turn.lost()
        except asyncio.CancelledError:
            # So the server ends the work for a client that goes away.
            turn.lost()
            raise
        return response

    def _dialect(self, request: web.Request) -> Dialect:
        """Which protocol a request speaks that no route tells: errors and lists of models have a form, too."""
        if "anthropic-version" in request.headers or "/messages" in request.path:
            return self._anthropic
        return self._responses if "/responses" in request.path else self._chat

    @web.middleware
    async def _in_protocol(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """aiohttp's own refusals (no such path, no such method) in the protocol's form."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            told = Trouble(error.status, f"{error.reason}: {request.method}", _code(error.status))
            response = _told(self._dialect(request), told)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response

    def _count(self, fields: tuple[str, ...]) -> None:
        # Names come from outside: their number, their length and the time that they take are bounded.
        for field in islice(fields, _COUNTED_FIELDS):
            name = field[:_FIELD_CHARACTERS]
            seen = name in self.ignored or len(self.ignored) < _COUNTED_FIELDS
            self.ignored[name if seen else "(other)"] += 1
        if len(fields) > _COUNTED_FIELDS:
            self.ignored["(other)"] += len(fields) - _COUNTED_FIELDS


async def _hello(visit: _Visit) -> web.StreamResponse:
    return _json(200, {})


async def _no_socket(visit: _Visit) -> web.StreamResponse:
    """A client that asks for a WebSocket falls back to POST at once when it is told 426, and only then."""
    if "Upgrade" not in visit.request.headers:
        refused = _told(visit.dialect, Trouble(405, "use POST", _code(405)))
        refused.headers["Allow"] = "POST"
        return refused
    response = _told(visit.dialect, Trouble(426, "no WebSocket is spoken here: use POST", "use_post"))
    response.headers["Upgrade"] = "HTTP/1.1"
    return response


def _without_request_line(record: logging.LogRecord) -> bool:
    """A request that does not parse is logged, without the error that quotes its line."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
    return True


_LOG.addFilter(_without_request_line)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    # Bytes that are no UTF-8 come as half surrogates, which no record could hold.
    return {name.lower(): value.encode(errors="backslashreplace").decode() for name, value in headers.items()}


def _json(status: int, body: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _told(dialect: Dialect, told: Trouble) -> web.Response:
    status = dialect.overloaded if told.status == 503 else told.status
    body = dialect.error(told.status, told.message, told.code, told.param)
    # LiteLLM knows an overflow by the very text `"code": "context_length_exceeded"`, with the space.
    response = web.Response(status=status, text=json.dumps(body), content_type="application/json")
    if told.again:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _code(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
