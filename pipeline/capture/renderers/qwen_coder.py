"""Tool calls as XML, as Qwen3-Coder and its descendants write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pipeline.capture.messages import NAME_CHARACTERS, Tool, ToolCall
from pipeline.capture.renderers.forms import CALL_CLOSE, CALL_OPEN, too_deep

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenCoder:
    """``<function=NAME>``, one ``<parameter=KEY>`` an argument, each on lines of its own.

    The form writes the text "12" and the number 12 alike. The tool's schema tells which it is; without one, what reads as
    JSON is JSON.
    """

    open, close = CALL_OPEN, CALL_CLOSE
    example = "\n<function=...>\n<parameter=...>\n...\n</parameter>\n</function>\n"

    def write(self, call: ToolCall) -> str:
        arguments: object = json.loads(call.arguments)
        if not isinstance(arguments, dict):
            message = f"arguments of {call.name!r} are not an object, which the form cannot spell"
            raise ValueError(message)  # noqa: TRY004 - a value from outside, no mistake of the caller's
        lines = [f"\n<function={call.name}>"]
        for key, value in cast("dict[str, object]", arguments).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        return "\n".join([*lines, "</function>\n"])

    def force(self, name: str) -> str:
        if ">" in name or "\n" in name:
            raise ValueError(f"a tool named {name!r} cannot be forced: the form cannot spell its name")
        return f"<function={name}>"

    def read(self, body: str, tools: Sequence[Tool]) -> ToolCall | None:
        function = _FUNCTION.fullmatch(body)
        if function is None or len(function[1]) > NAME_CHARACTERS:
            return None
        name, rest = function[1], function[2]
        properties: Mapping[str, Any] = next(
            (_members(tool.parameters.get("properties")) for tool in tools if tool.name == name),
            _members(None),
        )
        arguments: dict[str, object] = {}
        at = 0
        while found := _PARAMETER.match(rest, at):
            arguments[found[1]] = _value(found[2], _members(properties.get(found[1])))
            at = found.end()
        return (
            None
            if rest[at:].strip() or too_deep(arguments)
            else ToolCall("", name, json.dumps(arguments, ensure_ascii=False))
        )


def _members(value: Any) -> Mapping[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _value(text: str, schema: Mapping[str, Any]) -> object:
    if schema.get("type") == "string":
        return text
    try:
        value = json.loads(text)
        # Python reads NaN and 1e999; agents' parsers refuse what it would write of them.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value
