"""What trouble is to a client: its status, its code, and with it whether a client tries again.

Promises: overflow, a budget that is used up and what nobody can sample are 400, which no client retries; the engine's
trouble is 503 (or the protocol's own status for it) and too many requests at once 429, both with Retry-After; a session
that is over is 410; anything unforeseen is 500, logged, and told without its text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pipeline.capture.call import BadRequest
from pipeline.capture.dialects.base import Dialect
from pipeline.capture.session import ContextOverflow, SessionClosed, TurnLimit
from pipeline.engines.base import EngineRefused, EngineUnavailable

_LOG = logging.getLogger("packtrain.capture.http")
RETRY_AFTER_S = 1


class Refused(Exception):
    """A request that HTTP itself has the word for."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Trouble:
    """`status` is 503 for what the dialect may call otherwise; `again`: whether the client is to try again, soon."""

    status: int
    message: str
    code: str
    param: str | None = None
    again: bool = False


def trouble(error: Exception, dialect: Dialect, session: str) -> Trouble:
    """What a client of the session is told of an error, in the dialect's words."""
    match error:
        case BadRequest():
            return Trouble(400, str(error), error.code, error.param)
        case TurnLimit():
            return Trouble(400, str(error), error.code)
        case ContextOverflow():
            told = dialect.overflow(error.prompt_tokens, error.limit)
            return Trouble(400, told, "context_length_exceeded", "messages")
        case EngineRefused():
            return Trouble(400, str(error), "engine_refused")
        case SessionClosed():
            return Trouble(410, str(error), "session_closed")
        case Refused():
            return Trouble(error.status, str(error), error.code, again=error.status == 429)
        case EngineUnavailable():
            # Its text names the engine's address, which an agent in a sandbox has no use for. Clients that look for words
            # in a stream's error find theirs.
            _LOG.warning("session %s: the engine is unavailable: %s", session, error)
            return Trouble(
                503, "service unavailable, overloaded: try again", "engine_unavailable", again=True
            )
        case _:
            _LOG.error("session %s: a request failed", session, exc_info=error)
            return Trouble(500, "internal error", "internal_error")
