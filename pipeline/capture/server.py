"""The HTTP face of capture: OpenAI's endpoints under /s/{session}/{secret}/v1, one application for all of a host's tenants.

Promises:
- without the session's secret nothing is told: an unknown session and a wrong secret give the same 404;
- trouble is classified for the client's retries: overflow and the turn limit are 400 (never retried), the engine's
  trouble is 503 with Retry-After, a session that is over is 410;
- a client that goes away does not end its generation;
- no URL, and so no secret, is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.capture import chat
from pipeline.capture.renderer import ChatMLRenderer
from pipeline.capture.secret import is_session_secret
from pipeline.capture.session import ContextOverflow, Engine, Session, SessionClosed, TurnLimit
from pipeline.engines.client import EngineRefused, EngineUnavailable
from schemas.config import Behaviour

_LOG = logging.getLogger("packtrain.capture.http")
MAX_BODY_BYTES = 32 << 20
RETRY_AFTER_S = 1
_REMEMBERED = 10_000
_COUNTED_FIELDS = 256


class Capture:
    """The sessions of one host. `ignored` counts request fields that had no effect, by name."""

    def __init__(self, run_key: bytes, renderer: ChatMLRenderer, engine: Engine, max_context: int) -> None:
        self._run_key = run_key
        self._renderer = renderer
        self._engine = engine
        self._max_context = max_context
        self._sessions: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.ignored: Counter[str] = Counter()

    def open(self, session_id: str, behaviour: Behaviour) -> Session:
        """A new session; raises ValueError when one of that id exists or existed."""
        if session_id in self._sessions or session_id in self._closed:
            raise ValueError(f"session {session_id!r} exists already")
        session = Session(session_id, behaviour, self._max_context, self._renderer, self._engine)
        self._sessions[session_id] = session
        return session

    async def close(self, session: Session) -> None:
        """Ends the session: its URL answers 410 from now on."""
        if self._sessions.pop(session.id, None) is not None:
            self._closed[session.id] = None
            while len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)
        await session.close()

    def application(self) -> web.Application:
        """The aiohttp application; `runner` runs it."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/s/{session}/{secret}/v1/chat/completions", self._chat)
        app.router.add_get("/s/{session}/{secret}/v1/models", self._models)
        app.router.add_get("/healthz", self._health)
        return app

    def runner(self, shutdown_timeout: float) -> web.AppRunner:
        """Runs the application without logging a URL; a session learns when its client goes away."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            logger=_LOG,
            handler_cancellation=True,
            shutdown_timeout=shutdown_timeout,
        )

    def _find(self, request: web.Request) -> Session | web.Response:
        session_id, secret = request.match_info["session"], request.match_info["secret"]
        known = is_session_secret(self._run_key, session_id, secret)
        session = self._sessions.get(session_id)
        if known and session is not None:
            return session
        if known and session_id in self._closed:
            return _error(410, "this session is over", "session_closed")
        return _error(404, "no such session", "not_found")

    async def _health(self, request: web.Request) -> web.Response:
        return _json(200, {"sessions": len(self._sessions)})

    async def _models(self, request: web.Request) -> web.Response:
        found = self._find(request)
        return found if isinstance(found, web.Response) else _json(200, chat.models_response())

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._find(request)
        if isinstance(session, web.Response):
            return session
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is over {MAX_BODY_BYTES} bytes", "request_too_large")
        try:
            asked = await asyncio.to_thread(chat.parse_request, body)
            self._count(asked.ignored)
            answer = await session.complete(asked.digest, asked.dialogue, asked.max_tokens)
        except chat.BadRequest as error:
            return _error(400, str(error), error.code, param=error.param)
        except TurnLimit as error:
            return _error(400, str(error), "max_turns")
        except ContextOverflow as error:
            return _error(400, str(error), "context_length_exceeded", param="messages")
        except EngineRefused as error:
            return _error(400, str(error), "engine_refused")
        except SessionClosed as error:
            return _error(410, str(error), "session_closed")
        except EngineUnavailable as error:
            response = _error(503, str(error), "engine_unavailable", kind="server_error")
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        return _json(200, chat.build_response(answer, asked, session.id, int(time.time())))

    def _count(self, fields: tuple[str, ...]) -> None:
        for field in fields:
            # Names come from outside: their number is bounded.
            seen = field in self.ignored or len(self.ignored) < _COUNTED_FIELDS
            self.ignored[field[:64] if seen else "(other)"] += 1


def _without_request_line(record: logging.LogRecord) -> bool:
    """A request that does not parse is logged, without the error that quotes its line."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
    return True


_LOG.addFilter(_without_request_line)


def _json(status: int, body: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _error(
    status: int, message: str, code: str, *, kind: str = "invalid_request_error", param: str | None = None
) -> web.Response:
    return _json(status, chat.error_body(message, kind, code, param))
