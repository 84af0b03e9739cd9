"""Tools of OpenAI's Responses dialect as the policy sees them, and its calls as that dialect writes them. Pure.

Promises: a tool of a namespace is shown as `namespace.name`; a custom tool, whose input is free text, is shown as a
function of one text, `input`; a call of what is shown is written as a call of what was offered. Tools that OpenAI's
server runs are not shown, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field

from pipeline.capture.call import BadRequest, ToolChoice
from pipeline.capture.dialects.body import checked, read_json, shown
from pipeline.capture.messages import NAME_CHARACTERS, Tool, ToolCall


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Format(_Open):
    type: str
    syntax: str | None = None
    definition: str | None = None


class _Tool(_Open):
    type: Literal["function", "custom"]
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: _Format | None = None


class _Namespace(_Open):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    tools: list[dict[str, Any]]


class _Choice(_Open):
    type: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the client offered it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """Its name to the policy."""
        return shown_name(self.name, self.namespace)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request: what the policy sees, and by the name that it sees what was offered."""

    tools: tuple[Tool, ...] = ()
    offered: Mapping[str, Offered] = field(default_factory=dict[str, Offered])
    ignored: tuple[str, ...] = ()

    def of(self, name: str) -> Offered:
        """What a call of the policy's means; a name that was not offered is a function of that name."""
        return self.offered.get(name) or Offered("function", name)


def shown_name(name: str, namespace: object) -> str:
    """The policy's name for a tool of the namespace, if it is in one."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def read_tools(given: Sequence[dict[str, Any]]) -> Toolbox:
    """Raises BadRequest."""
    tools: list[Tool] = []
    offered: dict[str, Offered] = {}
    ignored: Counter[str] = Counter()

    def take(tool: dict[str, Any], where: str, namespace: str | None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inside = checked(_Namespace, tool, where)
            for i, inner in enumerate(inside.tools):
                take(inner, f"{where}.tools.{i}", inside.name)
        elif kind in ("function", "custom"):
            read = checked(_Tool, tool, where)
            known = Offered(read.type, read.name, namespace)
            if known.shown in offered:
                raise BadRequest(
                    f"{where}: a tool named {shown(known.shown)} is offered twice", f"{where}.name"
                )
            parameters = read.parameters or {} if read.type == "function" else _free_text(read.format)
            offered[known.shown] = known
            tools.append(Tool(known.shown, read.description or "", parameters))
        else:
            ignored[f"tools.{kind}"] += 1

    for i, tool in enumerate(given):
        take(tool, f"tools.{i}", None)
    return Toolbox(tuple(tools), offered, tuple(ignored))


def _free_text(form: _Format | None) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if form is not None and form.definition is not None:
        text["description"] = f"Text of this {form.syntax or form.type} grammar:\n{form.definition}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def free_text_arguments(text: str) -> str:
    """The arguments of a custom tool's call, as the policy's form has them."""
    return orjson.dumps({"input": text}).decode()


def free_text_of(call: ToolCall) -> str:
    """The input of a custom tool's call; of arguments without a text `input` all of their text, so that the tool says what
    is wrong with it."""
    arguments, _ = read_json(call.arguments)
    text = cast("dict[str, Any]", arguments).get("input") if isinstance(arguments, dict) else None
    return text if isinstance(text, str) else call.arguments


def read_choice(given: str | dict[str, Any] | None, box: Toolbox) -> ToolChoice:
    """Raises BadRequest."""
    if given is None or given == "auto":
        return ToolChoice()
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        if not box.tools:
            raise BadRequest(
                "tool_choice asks for a tool call and tools offers the policy none", "tool_choice"
            )
        return ToolChoice("required")
    if isinstance(given, str):
        raise BadRequest(
            f"tool_choice is {shown(given)}: it is auto, none, required or names a tool", "tool_choice"
        )
    choice = checked(_Choice, given, "tool_choice")
    if choice.type not in ("function", "custom"):
        raise BadRequest(
            f"tool_choice.type is {shown(choice.type)}: the policy's tools are functions and custom tools; name one, or"
            " use auto, none or required",
            "tool_choice.type",
        )
    name = shown_name(choice.name or "", given.get("namespace"))
    if name not in box.offered:
        raise BadRequest(f"tool_choice.name: tools offers the policy no {shown(name)}", "tool_choice.name")
    return ToolChoice("required", name)
