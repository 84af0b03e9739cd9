"""OpenAI's Chat Completions dialect: request body -> Dialogue, Answer -> response body. Pure.

Promises: what would change the meaning of a call and is not supported is a `BadRequest` that names the field (the
answer would not be what the agent asked for); any other unknown field is accepted and reported, since clients send what
their provider of the day knows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import NAME_CHARACTERS, Message, Tool, ToolCall
from pipeline.capture.session import Answer

MODEL = "policy"
"""The model's name in /models; requests may name any."""


class BadRequest(ValueError):
    """A request that is answered with 400; `code` and `param` go into OpenAI's error body."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Function(_Open):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    arguments: str = ""


class _Call(_Open):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=NAME_CHARACTERS)


class _Definition(_Open):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Open):
    type: Literal["function"]
    function: _Definition


class _Request(_Open):
    model: str = Field(max_length=256)
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    functions: Any = None
    n: int | None = None
    stream: bool | None = None
    stop: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request. `digest` is equal for bodies that are equal as JSON; `ignored` are top-level fields that had no
    effect: unknown ones, and sampling parameters, which the session's behaviour sets."""

    digest: str
    model: str
    dialogue: Dialogue
    max_tokens: int | None
    ignored: tuple[str, ...]


def parse_request(body: bytes) -> ChatRequest:
    """Raises `BadRequest`."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the body is not a JSON object")
    try:
        digest = hashlib.sha256(orjson.dumps(given, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the body nests too deep: {error}; keep it under 250 levels") from None
    try:
        request = _Request.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}", where) from None
    _refuse_unsupported(request)
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    return ChatRequest(
        digest=digest,
        model=request.model,
        dialogue=Dialogue(
            tuple(_message(message, i) for i, message in enumerate(request.messages)),
            tuple(_tool(tool) for tool in request.tools or ()),
        ),
        max_tokens=min(limits, default=None),
        ignored=tuple(sorted(request.model_extra or ())),
    )


def _refuse_unsupported(request: _Request) -> None:
    if request.n not in (None, 1):
        raise BadRequest(
            f"n is {request.n}: one choice a call is sampled; send the call again in another session", "n"
        )
    if request.stream:
        raise BadRequest("stream is true: this endpoint answers whole; set stream to false", "stream")
    if request.stop:
        raise BadRequest(
            "stop is set: the policy's own end-of-turn token ends a turn; leave stop out", "stop"
        )
    if request.tool_choice not in (None, "auto") and not (
        request.tool_choice == "none" and not request.tools
    ):
        raise BadRequest(
            f"tool_choice is {request.tool_choice!r}: the policy chooses; use 'auto'", "tool_choice"
        )
    if request.functions:
        raise BadRequest("functions is set: the policy would not see them; use tools", "functions")
    if request.response_format not in (None, {"type": "text"}):
        raise BadRequest(
            "response_format is not text: output is not constrained; leave it out", "response_format"
        )
    if request.logprobs:
        raise BadRequest(
            "logprobs is true: they are recorded with the session, not returned; leave it out", "logprobs"
        )


def _message(message: _Message, index: int) -> Message:
    where = f"messages.{index}"
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and role != "assistant":
        raise BadRequest(f"{where}: role {message.role!r} has tool_calls", f"{where}.tool_calls")
    if role == "tool" and message.tool_call_id is None:
        raise BadRequest(f"{where}: a tool message needs tool_call_id", f"{where}.tool_call_id")
    if message.content is None and role != "assistant":
        raise BadRequest(f"{where}: content is missing", f"{where}.content")
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    )
    return Message(role, _text(message.content, where), calls, message.tool_call_id, message.name)


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for i, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text" or not isinstance(text, str):
            raise BadRequest(
                f"{where}.content.{i}: content of type {kind!r} is not supported; send text",
                f"{where}.content.{i}",
            )
        texts.append(text)
    return "".join(texts)


def _tool(tool: _Tool) -> Tool:
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})


def build_response(answer: Answer, request: ChatRequest, session: str, created: int) -> dict[str, Any]:
    """The body of a 200; `created` is Unix time in seconds."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.tool_calls:
        # OpenAI sends null, and clients that test for text test for null.
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    reason = "length" if answer.length else "tool_calls" if answer.tool_calls else "stop"
    return {
        "id": f"chatcmpl-{session}-{answer.number}",
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def models_response() -> dict[str, Any]:
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "packtrain"}],
    }


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error body; `kind` is its `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
