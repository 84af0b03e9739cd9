"""A request as messages, and how its turns are recognized.

Two keys tell a turn; both are digests, so that a session's memory does not hold its texts. Equal prompt keys mean the
same turn: what a client may write in two ways (key order, white space of JSON) makes no difference. The answer key is
what a sampled turn was returned as: its call ids when it has calls (agents rename tools and reorder arguments, ids
survive), else its text without surrounding white space (clients trim it). Reasoning is in neither: clients drop it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pipeline.capture.messages import Content, Message, Tool, ToolCall

Key = bytes


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What a model call is asked to continue."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a dialogue, to be matched or rendered: the preamble (tools and system text; no messages), one message,
    or consecutive tool messages, which some templates put into one turn."""

    messages: tuple[Message, ...]
    prompt_key: Key
    answer_key: Key | None

    @property
    def role(self) -> str:
        return self.messages[0].role if self.messages else "system"


def steps(dialogue: Dialogue) -> list[Step]:
    """The preamble, then the turns; a leading system message belongs to the preamble."""
    system, rest = split_system(dialogue)
    tools = [(tool.name, tool.description, dict(tool.parameters)) for tool in dialogue.tools]
    found = [Step((), _digest("preamble", tools, system), None)]
    for turn in turns(rest):
        found.append(Step(turn, _digest(*map(_meaning, turn)), answer_key(turn[0])))
    return found


def split_system(dialogue: Dialogue) -> tuple[str | None, tuple[Message, ...]]:
    """The leading system message's text (None without one) and the messages after it."""
    messages = dialogue.messages
    if messages and messages[0].role == "system":
        return messages[0].text, messages[1:]
    return None, messages


def turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Each message alone, but consecutive tool messages together."""
    found: list[tuple[Message, ...]] = []
    for message in messages:
        if message.role == "tool" and found and found[-1][0].role == "tool":
            found[-1] = (*found[-1], message)
        else:
            found.append((message,))
    return found


def answer_key(message: Message) -> Key | None:
    """None for a turn that no policy samples."""
    return answer_key_of(message.text, message.tool_calls) if message.role == "assistant" else None


def answer_key_of(content: str, calls: Sequence[ToolCall]) -> Key:
    """The key of a turn that was returned as this text and these calls."""
    return _digest("calls", *(call.id for call in calls)) if calls else _digest("text", content.strip())


def _meaning(message: Message) -> tuple[Any, ...]:
    calls = [(call.name, _arguments(call.arguments)) for call in message.tool_calls]
    return message.role, _content(message.content), calls, message.is_error


def _content(content: Content) -> Any:
    return content if isinstance(content, str) else [p if isinstance(p, str) else [p.digest] for p in content]


def _arguments(text: str) -> Any:
    try:
        return [orjson.loads(text)]
    except orjson.JSONDecodeError:
        return text


def _digest(*parts: Any) -> Key:
    try:
        whole = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Lone surrogates and integers over 64 bits, which JSON can spell and orjson does not write.
        whole = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(whole, digest_size=16).digest()
