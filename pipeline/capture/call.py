"""A model call and its answer, whatever protocol they travel in. Pure values.

A dialect makes a `Call` of a request's body; the session answers with `Piece`s while tokens come and an `Answer` when the
turn is whole; the dialect writes both in its protocol's form. The texts of an answer's `Text` and `Thought` pieces, put
together, are its content and its reasoning, and its `ToolCall` pieces its tool calls, in order.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import ToolCall

Finish = Literal["stop", "length", "tool_calls", "stop_sequence"]


class BadRequest(ValueError):
    """A request that is answered with 400; `code` and `param` go into the protocol's error body."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`required`: the turn is a tool call, of the tool `name` when one is given; `none`: it is none."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request. `digest` is equal for bodies that ask for the same answer: equal as JSON but for how the answer is
    to be sent (stream or whole). `stop` are texts that end a turn; `max_tokens` is None where none was given.

    `ignored` are fields that had no effect, by name: unknown ones, and sampling parameters, which the session's behaviour
    sets. `wire` is for the dialect that made the call.
    """

    digest: str
    dialogue: Dialogue
    model: str
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel: bool = True
    ignored: tuple[str, ...] = ()
    wire: Any = None


@dataclass(frozen=True, slots=True)
class Text:
    """More of what is shown."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what is thought. All of an answer's reasoning comes before its text and calls."""

    text: str


Piece = Text | Thought | ToolCall
"""A tool call comes whole, with its id: until its last token is sampled nobody knows that it is one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled turn as it is returned; counts are in tokens. `cached_tokens`: how many of the prompt's were known from
    earlier turns. `stop_sequence` is the text that ended it, which is not part of `content`."""

    number: int
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    malformed: int
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""
    stop_sequence: str | None = None
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def length(self) -> bool:
        """Whether it was cut at a limit."""
        return self.finish == "length"


@dataclass(frozen=True, slots=True)
class Reply:
    """Of which session and when (Unix seconds) an answer is. `key` signs reasoning."""

    session: str
    created: int
    key: bytes

    def sign(self, reasoning: str) -> str:
        """Marks reasoning as the session's own: HMAC-SHA256, hexadecimal."""
        return hmac.new(self.key, b"reasoning\0" + reasoning.encode(), hashlib.sha256).hexdigest()

    def signed(self, reasoning: str, signature: str) -> bool:
        """Whether `sign` gave this signature to this reasoning."""
        return hmac.compare_digest(self.sign(reasoning).encode(), signature.encode(errors="replace"))
