"""How tool calls and reasoning are written in a turn: the forms that a parser reads and a renderer writes.

A form's marks are special tokens where the vocabulary has them, else text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pipeline.capture.messages import NAME_CHARACTERS, Tool, ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_DEPTH = 200
"""Levels of a call's arguments. A client sends them back as objects in its own, and bodies have under 250 levels."""


class ToolForm(Protocol):
    """A call is `open`, a body, `close`. Stateless."""

    @property
    def open(self) -> str: ...

    @property
    def close(self) -> str: ...

    @property
    def example(self) -> str:
        """A body, for a policy that was not trained on the form."""
        ...

    def write(self, call: ToolCall) -> str:
        """The body. Raises ValueError for a call that the form cannot spell."""
        ...

    def read(self, body: str, tools: Sequence[Tool]) -> ToolCall | None:
        """The call, its id "" ; None for a body that is malformed. `tools`: those offered, () when not known."""
        ...

    def force(self, name: str) -> str:
        """How the body of a call of the tool `name` begins. Raises ValueError for a name that it cannot spell."""
        ...


def too_deep(arguments: object) -> bool:
    """Whether a call's arguments nest over MAX_DEPTH levels."""
    level = [arguments]
    for _ in range(MAX_DEPTH):
        containers = cast(
            "list[dict[str, Any] | list[Any]]", [i for i in level if isinstance(i, dict | list)]
        )
        if not containers:
            return False
        level = [inner for item in containers for inner in _members(item)]
    return True


def _members(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning stands between two marks, at the beginning of a turn."""

    open: str = THINK_OPEN
    close: str = THINK_CLOSE


class Hermes:
    """``{"name": ..., "arguments": {...}}`` as JSON: Hermes, Qwen 2.5 and 3, and the tiny policy."""

    open, close = CALL_OPEN, CALL_CLOSE
    example = '{"name": ..., "arguments": {...}}'

    def write(self, call: ToolCall) -> str:
        return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'

    def force(self, name: str) -> str:
        # Without the space that follows: vocabularies have it in one token with the brace.
        return f'{{"name": {json.dumps(name)}, "arguments":'

    def read(self, body: str, tools: Sequence[Tool]) -> ToolCall | None:
        """Arguments stay as written whenever they are strict JSON. Control characters inside strings are accepted; what is
        not a JSON object with a ``name`` (1 to 256 characters) and an object ``arguments``, or nests too deep, is not."""
        try:
            decoded: object = _DECODER.decode(body)
            if not isinstance(decoded, dict):
                return None
            members = cast("dict[str, object]", decoded)
            name, arguments = members.get("name"), members.get("arguments")
            if not (
                isinstance(name, str) and isinstance(arguments, dict) and 0 < len(name) <= NAME_CHARACTERS
            ) or too_deep(cast("object", arguments)):
                return None
            # JSON can spell a lone surrogate, which no HTTP body holds: raises UnicodeEncodeError, a ValueError.
            name.encode()
            raw = _member_text(body, "arguments")
            try:
                json.loads(raw)
            except ValueError:
                # Agents parse strictly: control characters that we forgave are escaped before they see them.
                raw = json.dumps(arguments, allow_nan=False)
            return ToolCall("", name, raw)
        except (ValueError, RecursionError):
            return None


_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _member_text(text: str, name: str) -> str:
    """The source text of the last member ``name`` of a valid JSON object (the last wins, as in the parsed dict)."""

    def skip(at: int) -> int:
        match = _SPACE.match(text, at)
        return match.end() if match else at

    found = ""
    at = skip(skip(0) + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = skip(skip(at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        if key == name:
            found = text[start:end]
        at = skip(end)
        at = skip(at + 1) if text[at] == "," else at
    return found
