"""The one form of a dialogue that every dialect is normalized to before it is rendered.

Promises: values are frozen and hashable but for ``Tool.parameters``; content is a plain string unless it holds an image
(``content_of``), so that a string and its list of text blocks are equal; a tool call's ``arguments`` is the JSON text as
it was sampled or received, never a re-serialization, so that rendering a parsed turn gives back the sampled text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
NAME_CHARACTERS = 256
"""Longest name of a tool: what is sampled and returned is taken back, so both sides hold to it."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image by reference. ``digest`` is the SHA-256 of the bytes as received, in hexadecimal; two are equal when their
    digests are. ``data`` holds the bytes on the way in."""

    digest: str
    media_type: str = field(compare=False)
    data: bytes = field(compare=False, repr=False)


Content = str | tuple[str | Image, ...]
"""Text, or text and images in order: then no two texts are neighbours, none is empty, and there is an image."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: ``arguments`` is JSON text of an object; ``id`` is "" until the caller has named the call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue. ``tool_call_id``, ``name`` and ``is_error`` belong to role ``tool``; ``tool_calls`` and
    ``reasoning`` to ``assistant``."""

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    is_error: bool = False

    @property
    def text(self) -> str:
        """The content without its images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The content's images, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool offered to the policy; ``parameters`` is the JSON schema of its arguments object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a sampled turn says: ``content`` is what is shown, without surrounding white space, ``reasoning`` what was
    thought. ``malformed`` counts tool calls that did not parse; their text stays in ``content``."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed: int
    reasoning: str = ""


def content_of(parts: Iterable[str | Image]) -> Content:
    """The parts as content: neighbouring texts are one, empty ones are none."""
    found: list[str | Image] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    if any(isinstance(part, Image) for part in found):
        return tuple(found)
    return "".join(part for part in found if isinstance(part, str))
