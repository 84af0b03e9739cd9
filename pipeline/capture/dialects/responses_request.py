"""Requests of OpenAI's Responses dialect as dialogues. Pure.

Promises, beside those of every dialect: the assistant's items (reasoning, message, calls) that were one turn are one
message; reasoning that the session did not seal is left out and counted; whatever asks for state that a server would keep
is a `BadRequest`: the dialogue is all in the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.capture.call import BadRequest, Call, Reply
from pipeline.capture.dialects.body import checked, digest_of, load, one_preamble, shown
from pipeline.capture.dialects.images import ImageIntake
from pipeline.capture.dialects.responses_items import turn_of, unseal
from pipeline.capture.dialects.responses_tools import (
    Toolbox,
    free_text_arguments,
    read_choice,
    read_tools,
    shown_name,
)
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import NAME_CHARACTERS, Content, Image, Message, ToolCall, content_of


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Request(_Open):
    model: str = Field(max_length=256)
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None


class _Message(_Open):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    id: str | None = None


class _Call(_Open):
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    namespace: str | None = Field(None, max_length=NAME_CHARACTERS)
    id: str | None = None


class _FunctionCall(_Call):
    arguments: str


class _CustomCall(_Call):
    input: str


class _Output(_Open):
    call_id: str = Field(min_length=1, max_length=256)
    output: str | list[dict[str, Any]]


class _Reasoning(_Open):
    id: str | None = None
    encrypted_content: str | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """What the answer repeats of its request."""

    box: Toolbox
    tool_choice: str | dict[str, Any]
    max_output_tokens: int | None


@dataclass(slots=True)
class _Turn:
    """An assistant turn, while its items come. `stage` is that of its last item."""

    name: str | None
    stage: int
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self) -> Message:
        return Message("assistant", "".join(self.texts), tuple(self.calls), reasoning="".join(self.thoughts))


_REASONING, _MESSAGE, _CALL = range(3)


def read_call(body: bytes, reply: Reply) -> Call:
    """A `POST /v1/responses`. Raises BadRequest."""
    given, ignored = load(body)
    request = checked(_Request, given)
    _refuse_unsupported(request)
    box = read_tools(request.tools or ())
    reader = _Reader(reply)
    reader.ignored.update((*ignored, *box.ignored, *(request.model_extra or ())))
    reader.ignored.update(f"text.{name}" for name in request.text or {} if name != "format")
    messages = reader.messages(request)
    choice = read_choice(request.tool_choice, box)
    return Call(
        digest=digest_of(given, ("stream", "stream_options")),
        dialogue=Dialogue(messages, box.tools),
        model=request.model,
        stream=bool(request.stream),
        max_tokens=request.max_output_tokens,
        tool_choice=choice,
        parallel=request.parallel_tool_calls is not False,
        ignored=tuple(sorted(reader.ignored)),
        wire=Wire(box, _echo(request.tool_choice), request.max_output_tokens),
    )


def _echo(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    return "auto" if choice is None else choice


def _refuse_unsupported(request: _Request) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise BadRequest(f"{name} is set: no state is kept here; send the whole dialogue in input", name)
    if request.background:
        raise BadRequest(
            "background is true: an answer is sent where it was asked for; leave it out", "background"
        )
    form = (request.text or {}).get("format")
    if form is not None and form != {"type": "text"}:
        raise BadRequest("text.format is not text: output is not constrained; leave it out", "text.format")
    if "message.output_text.logprobs" in (request.include or ()):
        raise BadRequest(
            "include asks for logprobs: they are recorded with the session, not returned; leave it out",
            "include",
        )


class _Reader:
    """Reads the items of one request; `ignored` counts what it left out."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._images = ImageIntake()
        self._names: dict[str, str] = {}
        self._turns: list[Message | _Turn] = []
        self._last: _Turn | None = None
        self.ignored: Counter[str] = Counter()

    def messages(self, request: _Request) -> tuple[Message, ...]:
        """Raises BadRequest."""
        if request.instructions:
            self._turns.append(Message("system", request.instructions))
        if isinstance(request.input, str):
            self._turns.append(Message("user", request.input))
        else:
            if not request.input:
                raise BadRequest("input has no items: there is nothing to answer", "input")
            for i, item in enumerate(request.input):
                self._item(item, f"input.{i}")
        return one_preamble([turn.message() if isinstance(turn, _Turn) else turn for turn in self._turns])

    def _item(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "message":
            self._message(checked(_Message, item, where), f"{where}.content")
        elif kind == "reasoning":
            self._reasoning(checked(_Reasoning, item, where))
        elif kind == "function_call":
            call = checked(_FunctionCall, item, where)
            self._call(call, call.arguments)
        elif kind == "custom_tool_call":
            custom = checked(_CustomCall, item, where)
            self._call(custom, free_text_arguments(custom.input))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(checked(_Output, item, where), f"{where}.output")
        elif kind == "item_reference":
            raise BadRequest(
                f"{where}: it refers to item {shown(item.get('id'))} and no item is kept here; set store to false, so that the"
                " client sends the item itself",
                where,
            )
        else:
            raise BadRequest(
                f"{where}: an item of type {shown(kind)} is not supported, the policy could not see it",
                f"{where}.type",
            )

    def _message(self, message: _Message, where: str) -> None:
        if message.role == "assistant":
            self._turn(_MESSAGE, message.id).texts.append(self._text(message.content, where))
            return
        self._last = None
        if message.role == "user":
            self._turns.append(Message("user", self._content(message.content, where)))
        elif text := self._text(message.content, where):
            self._turns.append(Message("system", text))

    def _reasoning(self, item: _Reasoning) -> None:
        turn = self._turn(_REASONING, item.id)
        known = unseal(self._reply, item.encrypted_content)
        if known is None:
            self.ignored["input.reasoning"] += 1
        else:
            turn.thoughts.append(known)

    def _call(self, call: _Call, arguments: str) -> None:
        name = shown_name(call.name, call.namespace)
        self._names[call.call_id] = name
        self._turn(_CALL, call.id).calls.append(ToolCall(call.call_id, name, arguments))

    def _output(self, output: _Output, where: str) -> None:
        content = self._content(output.output, where)
        name = self._names.get(output.call_id)
        self._turns.append(Message("tool", content, tool_call_id=output.call_id, name=name))

    def _turn(self, stage: int, item_id: str | None) -> _Turn:
        """The turn that an item belongs to: by its id, where the client kept ours (it may come after results of the turn's
        other calls); else the last one, if nothing came between and the items are in the order that an answer has."""
        name, last = turn_of(item_id), self._last
        if last is not None:
            if name is not None and last.name is not None:
                same = name == last.name
            else:
                follows = self._turns[-1] is last
                same = follows and (stage > last.stage or stage == last.stage != _MESSAGE)
            if same:
                last.name, last.stage = last.name or name, max(last.stage, stage)
                return last
        self._last = turn = _Turn(name, stage)
        self._turns.append(turn)
        return turn

    def _text(self, content: str | list[dict[str, Any]], where: str) -> str:
        found = self._content(content, where)
        if not isinstance(found, str):
            raise BadRequest(f"{where}: only a user's message or a tool's output may hold an image", where)
        return found

    def _content(self, content: str | list[dict[str, Any]], where: str) -> Content:
        if isinstance(content, str):
            return content
        return content_of(self._part(part, f"{where}.{i}") for i, part in enumerate(content))

    def _part(self, part: Mapping[str, Any], where: str) -> str | Image:
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "refusal"):
            name = "refusal" if kind == "refusal" else "text"
            text = part.get(name)
            if not isinstance(text, str):
                raise BadRequest(f"{where}.{name}: it is missing or no text", f"{where}.{name}")
            return text
        if kind == "input_image":
            url = part.get("image_url")
            if not isinstance(url, str):
                raise BadRequest(
                    f"{where}: an image by file_id is not supported; send its bytes as a data: URL in image_url",
                    where,
                )
            return self._images.url(url, f"{where}.image_url")
        raise BadRequest(
            f"{where}: content of type {shown(kind)} is not supported here, the policy could not see it; send text",
            where,
        )
