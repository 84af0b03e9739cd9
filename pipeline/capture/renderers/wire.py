"""Messages and tools in the form that chat templates take, with nothing in them that could become a special token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.capture.messages import Image, Message, Tool
from pipeline.capture.renderers.guard import Guard
from pipeline.capture.renderers.jinja import Arguments
from pipeline.capture.renderers.told import told

PROBE = Tool("probe", "Probes.", {"type": "object", "properties": {"text": {"type": "string"}}})
"""Stands for a dialogue's tools where only their presence may matter."""

Wire = dict[str, Any]


def user(content: str) -> Wire:
    return {"role": "user", "content": content}


def calling(text: str, results: Sequence[Wire]) -> Wire:
    """A turn of the policy that asks for these results. `text` stands in its calls' arguments."""
    calls = [
        _call(result["tool_call_id"], result["name"] or PROBE.name, _with_text(text)) for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answering(turn: Wire, text: str) -> list[Wire]:
    """What follows a turn of the policy: its calls' results, or the user."""
    return [
        {
            "role": "tool",
            "content": text,
            "name": call["function"]["name"],
            "tool_call_id": call["id"],
        }
        for call in turn["tool_calls"]
    ] or [user(text)]


def offer(tool: Tool, guard: Guard | None = None) -> Wire:
    described = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    offered = {"type": "function", "function": described}
    return offered if guard is None else guard.escape_json(offered)


def wire(message: Message, guard: Guard) -> Wire:
    escape = guard.escape
    made: Wire = {"role": message.role, "content": _content(message, guard)}
    if message.role == "assistant":
        made["tool_calls"] = [
            _call(escape(call.id), escape(call.name), _arguments(call.arguments, guard))
            for call in message.tool_calls
        ]
        if message.reasoning:
            made["reasoning_content"] = escape(message.reasoning)
    elif message.role == "tool":
        made["name"] = escape(message.name or "")
        made["tool_call_id"] = escape(message.tool_call_id or "")
    return made


def _call(identity: str, name: str, arguments: Arguments | str) -> Wire:
    return {"type": "function", "id": identity, "function": {"name": name, "arguments": arguments}}


def _with_text(text: str) -> Arguments:
    arguments = Arguments(text=text)
    arguments.text = json.dumps(arguments, ensure_ascii=False)
    return arguments


def _content(message: Message, guard: Guard) -> str | list[dict[str, str]]:
    parts = told(message)
    if any(isinstance(part, Image) for part in parts):
        return [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": guard.escape(part)}
            for part in parts
        ]
    return guard.escape("".join(part for part in parts if isinstance(part, str)))


def _arguments(text: str, guard: Guard) -> Arguments | str:
    """As an object, which some templates go through; as it stands where it is none."""
    try:
        decoded = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return guard.escape(text)
    if not isinstance(decoded, dict):
        return guard.escape(text)
    arguments = Arguments(guard.escape_json(decoded))
    arguments.text = guard.escape(text)
    return arguments
