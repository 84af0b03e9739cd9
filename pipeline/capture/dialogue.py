"""A request as messages, and how its turns are recognized.

Two keys tell a turn. The prompt key is what the turn renders from, to the letter, so equal keys mean equal tokens. The
answer key is what a sampled turn was returned as: its call ids when it has calls (agents rename tools and reorder
arguments, ids survive), else its text without surrounding white space (clients trim it).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.renderer import ChatMLRenderer

Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What a model call is asked to continue."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a dialogue, to be matched or rendered. The first step is the preamble: tools and system text."""

    message: Message | None
    prompt_key: Key
    answer_key: Key | None


def steps(dialogue: Dialogue) -> list[Step]:
    """The preamble, then one step a message; a leading system message belongs to the preamble."""
    system, rest = split_system(dialogue)
    tools = tuple((tool.name, tool.description, json.dumps(dict(tool.parameters))) for tool in dialogue.tools)
    first = Step(None, ("preamble", tools, system), None)
    return [first, *[Step(message, prompt_key(message), answer_key(message)) for message in rest]]


def split_system(dialogue: Dialogue) -> tuple[str | None, tuple[Message, ...]]:
    messages = dialogue.messages
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return None, messages


def prompt_key(message: Message) -> Key:
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    return (message.role, message.content, calls)


def answer_key(message: Message) -> Key | None:
    """None for a turn that no policy samples."""
    return answer_key_of(message.content, message.tool_calls) if message.role == "assistant" else None


def answer_key_of(content: str, calls: Sequence[ToolCall]) -> Key:
    return ("calls", *(call.id for call in calls)) if calls else ("text", content.strip())


def render_steps(renderer: ChatMLRenderer, dialogue: Dialogue, first: int) -> list[list[int]]:
    """Token ids of the steps from `first` on, one list a step."""
    system, rest = split_system(dialogue)
    rendered = [renderer.preamble(dialogue.tools, system)] if first == 0 else []
    return rendered + [renderer.render(message) for message in rest[max(first - 1, 0) :]]
