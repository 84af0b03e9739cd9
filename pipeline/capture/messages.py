"""The one form of a dialogue that every dialect is normalized to before it is rendered.

Promises: values are frozen and hashable but for ``Tool.parameters``; a tool call's ``arguments`` is the JSON text as it
was sampled or received, never a re-serialization, so that rendering a parsed turn gives back the sampled text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
NAME_CHARACTERS = 256
"""Longest name of a tool: what is sampled and returned is taken back, so both sides hold to it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: ``arguments`` is JSON text of an object; ``id`` is "" until the caller has named the call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue. ``tool_call_id`` and ``name`` belong to role ``tool``; ``tool_calls`` to ``assistant``."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool offered to the policy; ``parameters`` is the JSON schema of its arguments object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a sampled turn says. ``malformed`` counts tool calls that did not parse; their text stays in ``content``."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed: int
