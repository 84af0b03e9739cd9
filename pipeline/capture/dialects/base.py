"""What a protocol is to the server: request body -> `Call`, answer -> response body or stream of events.

A dialect promises:
- what would change the meaning of a call and is not supported is a `BadRequest` that names the field; any other unknown
  field is accepted and reported in `Call.ignored`, since clients send what their provider of the day knows;
- bodies that differ only in what a client may rewrite at will (key order, cache markers, string or block content, where
  the system text stands) make equal dialogues;
- a response, and every event of a stream, validates against the types of the protocol's own SDK.
"""

from __future__ import annotations

from typing import Any, Protocol

from pipeline.capture.call import Answer, Call, Piece, Reply


class Stream(Protocol):
    """Writes one answer's events, in the protocol's order, as the bytes of server-sent events."""

    def start(self) -> bytes:
        """What is known before the first token."""
        ...

    def piece(self, piece: Piece) -> bytes: ...

    def ping(self) -> bytes:
        """Sent while nothing else is: keeps clients and proxies from giving up."""
        ...

    def end(self, answer: Answer) -> bytes:
        """The rest, once every piece of the answer was written."""
        ...

    def fail(self, status: int, message: str, code: str) -> bytes:
        """Trouble after the status line was sent: what makes this protocol's clients try again (or, for a status under
        500, give up)."""
        ...


class Dialect(Protocol):
    def parse(self, body: bytes, reply: Reply) -> Call:
        """Raises `BadRequest`. `reply` recognizes the session's own signed reasoning."""
        ...

    def response(self, call: Call, answer: Answer, reply: Reply) -> dict[str, Any]:
        """The body of a 200."""
        ...

    def stream(self, call: Call, reply: Reply, prompt_tokens: int) -> Stream: ...

    def error(self, status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
        """The body of an error; `code` is ours (`context_length_exceeded`, `max_turns`, ...), which the protocol's own
        error types go with. The engine's trouble comes as 503: `overloaded` says what the protocol calls it."""
        ...

    def overflow(self, prompt_tokens: int, limit: int) -> str:
        """The message of the 400 for a dialogue that no longer fits: clients know it by the provider's own words."""
        ...

    @property
    def overloaded(self) -> int:
        """The status for trouble that clients are to try again: 503 or 529."""
        ...
