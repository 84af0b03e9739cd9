"""Requests of Anthropic's Messages dialect as dialogues. Pure.

Promises, beside those of every dialect: tool results become tool messages before the rest of their user message; a tool
whose loading is deferred is not in the preamble but where the request loads it (`tool_reference`, `tool_addition`), so
that loading one does not rewrite what stands before it; thinking that the session did not sign is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field

from pipeline.capture.call import BadRequest, Call, Reply, ToolChoice
from pipeline.capture.dialects.body import checked, digest_of, load, one_preamble, shown
from pipeline.capture.dialects.images import ImageIntake
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import NAME_CHARACTERS, Image, Message, Tool, ToolCall, content_of

MAX_STOP_SEQUENCES = 64
MAX_STOP_CHARACTERS = 1024

_BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a system text that says who pays, with a hash that changes within a session: never the policy's business."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Message(_Open):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]] | None = None


class _Tool(_Open):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class _Choice(_Open):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=NAME_CHARACTERS)
    disable_parallel_tool_use: bool | None = None


class _Asked(_Open):
    model: str = Field(max_length=256)
    messages: list[_Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None


class _Request(_Asked):
    # 0 asks Anthropic to warm its cache without an answer: here a call is a turn.
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOP_SEQUENCES)
    stream: bool | None = None


class _ToolUse(_Open):
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    input: dict[str, Any]


class _ToolResult(_Open):
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class _ContentSource(_Open):
    content: str | list[dict[str, Any]]


def read_call(body: bytes, reply: Reply) -> Call:
    """A `POST /v1/messages`. Raises BadRequest."""
    given, ignored = load(body)
    # Before anything of it is written again: it refuses what nests too deep for that.
    digest = digest_of(given, ("stream",))
    request = checked(_Request, given)
    if request.messages[-1].role == "assistant":
        raise BadRequest(
            f"messages.{len(request.messages) - 1}: the last message is the assistant's: an answer is a turn of its own"
            " and is not begun for the policy; end with a user message",
            "messages",
        )
    reader = _Reader(request, reply)
    reader.ignored.update(ignored)
    dialogue = reader.dialogue()
    choice, parallel = _choice(request, dialogue, reader.deferred)
    return Call(
        digest=digest,
        dialogue=dialogue,
        model=request.model,
        stream=bool(request.stream),
        max_tokens=request.max_tokens,
        stop=_stop(request.stop_sequences or ()),
        tool_choice=choice,
        parallel=parallel,
        ignored=tuple(sorted({*reader.ignored, *(request.model_extra or ())})),
    )


def read_count(body: bytes, reply: Reply | None) -> Dialogue:
    """A `POST /v1/messages/count_tokens`. Raises BadRequest."""
    given, _ = load(body)
    digest_of(given, ())  # Refuses what nests too deep.
    return _Reader(checked(_Asked, given), reply).dialogue()


def _stop(texts: Sequence[str]) -> tuple[str, ...]:
    for i, text in enumerate(texts):
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise BadRequest(
                f"stop_sequences.{i} has {len(text)} characters: 1 to {MAX_STOP_CHARACTERS} are supported",
                f"stop_sequences.{i}",
            )
    return tuple(texts)


def _choice(request: _Asked, dialogue: Dialogue, deferred: Mapping[str, Tool]) -> tuple[ToolChoice, bool]:
    given = request.tool_choice
    if given is None:
        return ToolChoice(), True
    parallel = not given.disable_parallel_tool_use
    if given.type in ("auto", "none"):
        return ToolChoice("auto" if given.type == "auto" else "none"), parallel
    offered = {tool.name for tool in dialogue.tools} | set(deferred)
    if given.type == "any":
        if not offered:
            raise BadRequest(
                "tool_choice asks for a tool call and tools offers the policy none", "tool_choice"
            )
        return ToolChoice("required"), parallel
    if given.name not in offered:
        raise BadRequest(
            f"tool_choice.name: tools offers the policy no {shown(given.name)}", "tool_choice.name"
        )
    return ToolChoice("required", given.name), parallel


class _Reader:
    """Reads the messages of one request; `ignored` counts what it left out."""

    def __init__(self, request: _Asked, reply: Reply | None) -> None:
        self._request, self._reply = request, reply
        self._images = ImageIntake()
        self._names: dict[str, str] = {}
        self.ignored: Counter[str] = Counter()
        self.deferred: dict[str, Tool] = {}

    def dialogue(self) -> Dialogue:
        tools: list[Tool] = []
        for i, given in enumerate(self._request.tools or ()):
            tool = self._tool(given, f"tools.{i}")
            if tool is None:
                continue
            if given.defer_loading:
                self.deferred[tool.name] = tool
            else:
                tools.append(tool)
        messages: list[Message] = []
        if self._request.system is not None:
            messages += self._system(self._request.system, "system")
        for i, message in enumerate(self._request.messages):
            self.ignored.update(f"messages.{name}" for name in message.model_extra or ())
            where = f"messages.{i}.content"
            if message.role == "system":
                # One without content only sets what has no effect here.
                messages += self._system(message.content or "", where)
            elif message.content is None:
                raise BadRequest(f"{where} is missing", where)
            elif message.role == "user":
                messages += self._user(_blocks(message.content), where)
            else:
                messages.append(self._assistant(_blocks(message.content), where))
        return Dialogue(one_preamble(messages), tuple(tools))

    def _tool(self, tool: _Tool, where: str) -> Tool | None:
        """None for one that Anthropic's server runs, or whose schema only Anthropic's models know."""
        if tool.type not in (None, "custom"):
            self.ignored[f"tools.{tool.type}"] += 1
            return None
        if tool.input_schema is None:
            raise BadRequest(f"{where}.input_schema is missing", f"{where}.input_schema")
        return Tool(tool.name, tool.description or "", tool.input_schema)

    def _system(self, content: str | list[dict[str, Any]], where: str) -> list[Message]:
        """One message, none when nothing is left of its text."""
        texts: list[str] = []
        for i, block in enumerate(_blocks(content)):
            at, kind = f"{where}.{i}", block.get("type")
            if kind == "text":
                text = _field(block, "text", at)
                if text.startswith(_BILLING_HEADER):
                    self.ignored[_BILLING_HEADER] += 1
                    text = text.partition("\n")[2]
                texts.append(text)
            elif kind == "tool_addition":
                texts.append(self._addition(block, at))
            elif kind == "tool_removal":
                name = _field(_member(block, "tool", at), "name", f"{at}.tool")
                texts.append(f"The tool {name} is no longer available.\n")
            else:
                raise _unsupported(kind, at)
        text = "".join(texts)
        return [Message("system", text)] if text else []

    def _addition(self, block: Mapping[str, Any], where: str) -> str:
        tool = _member(block, "tool", where)
        if tool.get("type") == "tool_reference":
            definition = self._definition(_field(tool, "name", f"{where}.tool"))
        elif tool.get("type") == "tool_definition":
            at = f"{where}.tool.definition"
            read = self._tool(checked(_Tool, tool.get("definition"), at), at)
            definition = "" if read is None else _spelled(read)
        else:
            raise _unsupported(tool.get("type"), f"{where}.tool")
        return f"This tool is available from here on: {definition}\n" if definition else ""

    def _definition(self, name: str) -> str:
        tool = self.deferred.get(name)
        return name if tool is None else _spelled(tool)

    def _user(self, blocks: list[dict[str, Any]], where: str) -> list[Message]:
        results: list[Message] = []
        parts: list[str | Image] = []
        rest = not blocks
        for i, block in enumerate(blocks):
            at = f"{where}.{i}"
            if block.get("type") == "tool_result":
                results.append(self._result(checked(_ToolResult, block, at), at))
            else:
                parts += self._parts(block, at)
                rest = True
        return [*results, Message("user", content_of(parts))] if rest else results

    def _result(self, result: _ToolResult, where: str) -> Message:
        parts: list[str | Image] = []
        for i, block in enumerate(_blocks(result.content or "")):
            parts += self._parts(block, f"{where}.content.{i}")
        return Message(
            "tool",
            content_of(parts),
            tool_call_id=result.tool_use_id,
            name=self._names.get(result.tool_use_id),
            is_error=bool(result.is_error),
        )

    def _assistant(self, blocks: list[dict[str, Any]], where: str) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for i, block in enumerate(blocks):
            at, kind = f"{where}.{i}", block.get("type")
            if kind == "text":
                texts.append(_field(block, "text", at))
            elif kind == "thinking":
                thought, signature = _field(block, "thinking", at), block.get("signature")
                if self._reply and isinstance(signature, str) and self._reply.signed(thought, signature):
                    thoughts.append(thought)
                else:
                    self.ignored["messages.thinking"] += 1
            elif kind == "redacted_thinking":
                self.ignored["messages.redacted_thinking"] += 1
            elif kind == "tool_use":
                used = checked(_ToolUse, block, at)
                self._names[used.id] = used.name
                calls.append(ToolCall(used.id, used.name, orjson.dumps(used.input).decode()))
            else:
                raise _unsupported(kind, at)
        return Message("assistant", "".join(texts), tuple(calls), reasoning="".join(thoughts))

    def _parts(self, block: Mapping[str, Any], where: str) -> list[str | Image]:
        kind = block.get("type")
        if kind == "text":
            return [_field(block, "text", where)]
        if kind == "image":
            return [self._image(_member(block, "source", where), f"{where}.source")]
        if kind == "document":
            return self._document(block, where)
        if kind == "tool_reference":
            return [self._definition(_field(block, "tool_name", where)) + "\n"]
        raise _unsupported(kind, where)

    def _image(self, source: Mapping[str, Any], where: str) -> Image:
        if source.get("type") == "base64":
            return self._images.base64(_field(source, "data", where), f"{where}.data")
        if source.get("type") == "url":
            return self._images.url(_field(source, "url", where), f"{where}.url")
        raise BadRequest(
            f"{where}: an image of source {shown(source.get('type'))} is not supported; send its bytes as base64",
            where,
        )

    def _document(self, block: Mapping[str, Any], where: str) -> list[str | Image]:
        source, at = _member(block, "source", where), f"{where}.source"
        heading = [f"{block[name]}\n" for name in ("title", "context") if isinstance(block.get(name), str)]
        if source.get("type") == "text":
            return [*heading, _field(source, "data", at)]
        if source.get("type") == "content":
            parts: list[str | Image] = [*heading]
            for i, inner in enumerate(_blocks(checked(_ContentSource, source, at).content)):
                if inner.get("type") == "document":
                    raise _unsupported("document", f"{at}.content.{i}")
                parts += self._parts(inner, f"{at}.content.{i}")
            return parts
        raise BadRequest(
            f"{where}: a document of source {shown(source.get('type'))} is not supported; send its text",
            where,
        )


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name}: it is missing or no text", f"{where}.{name}")
    return value


def _member(block: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = block.get(name)
    if not isinstance(value, dict):
        raise BadRequest(f"{where}.{name}: it is missing or no object", f"{where}.{name}")
    return cast("dict[str, Any]", value)


def _unsupported(kind: object, where: str) -> BadRequest:
    return BadRequest(
        f"{where}: content of type {shown(kind)} is not supported here, the policy could not see it; send text",
        where,
    )


def _spelled(tool: Tool) -> str:
    """The definition as one line, the same whatever the order of the schema's keys."""
    schema = orjson.dumps(dict(tool.parameters), option=orjson.OPT_SORT_KEYS)
    spec = {"name": tool.name, "description": tool.description, "parameters": orjson.Fragment(schema)}
    return orjson.dumps(spec).decode()
