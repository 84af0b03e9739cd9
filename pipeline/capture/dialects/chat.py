"""OpenAI's Chat Completions dialect: request body -> Call, Answer -> response body. Pure; `chat_stream` writes the events.

Promises, beside those of every dialect: `developer` is `system`; the system messages that a dialogue begins with are one
text, those that come later stay where they are; a tool call's arguments are taken as the text that they are, valid JSON
or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.capture.call import Answer, BadRequest, Call, Reply, ToolChoice
from pipeline.capture.dialects.body import checked, digest_of, load, one_preamble, shown
from pipeline.capture.dialects.chat_stream import ChatStream, Wire, completion_id, finish_reason, usage
from pipeline.capture.dialects.images import ImageIntake
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import NAME_CHARACTERS, Content, Image, Message, Tool, ToolCall, content_of

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
# How an answer is sent is not what it says: a client that tries again may ask for the other form.
_DELIVERY = ("stream", "stream_options")


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
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    cache_control: Any = None


class _Definition(_Open):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Open):
    type: Literal["function"]
    function: _Definition
    cache_control: Any = None


class _StreamOptions(_Open):
    include_usage: bool | None = None


class _Request(_Open):
    model: str = Field(max_length=256)
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


class Chat:
    """See `pipeline.capture.dialects.base.Dialect`."""

    overloaded = 503

    def parse(self, body: bytes, reply: Reply) -> Call:
        given, repaired = load(body)
        digest = digest_of(given, _DELIVERY)
        request = checked(_Request, given)
        _refuse_unsupported(request)
        tools = tuple(_tool(tool) for tool in request.tools or ())
        limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
        return Call(
            digest=digest,
            dialogue=Dialogue(_messages(request.messages), tools),
            model=request.model,
            stream=request.stream or False,
            max_tokens=min(limits, default=None),
            stop=_stops(request.stop),
            seed=request.seed,
            tool_choice=_tool_choice(request.tool_choice, tools),
            parallel=request.parallel_tool_calls is not False,
            ignored=tuple(sorted({*repaired, *_ignored(request)})),
            wire=Wire(request.stream_options is not None and request.stream_options.include_usage is True),
        )

    def response(self, call: Call, answer: Answer, reply: Reply) -> dict[str, Any]:
        # OpenAI sends null beside calls, and clients that test for text test for null.
        content = answer.content or None if answer.tool_calls else answer.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": made.id,
                    "type": "function",
                    "function": {"name": made.name, "arguments": made.arguments},
                }
                for made in answer.tool_calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish_reason(answer.finish),
            "logprobs": None,
        }
        return {
            "id": completion_id(call, reply),
            "object": "chat.completion",
            "created": reply.created,
            "model": call.model,
            "choices": [choice],
            "usage": usage(answer),
        }

    def stream(self, call: Call, reply: Reply, prompt_tokens: int) -> ChatStream:
        return ChatStream(call, reply, self.error)

    def error(self, status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def overflow(self, prompt_tokens: int, limit: int) -> str:
        """OpenAI's words for it: some clients know it by them, not by its code."""
        return (
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages."
        )


def _refuse_unsupported(request: _Request) -> None:
    if request.n not in (None, 1):
        raise BadRequest(
            f"n is {request.n}: one choice a call is sampled; send the call again in another session", "n"
        )
    if request.functions or request.function_call:
        field = "functions" if request.functions else "function_call"
        raise BadRequest(f"{field} is set: the policy would not see it; use tools and tool_choice", field)
    if request.response_format not in (None, {"type": "text"}):
        raise BadRequest(
            "response_format is not text: output is not constrained; leave it out", "response_format"
        )
    if request.audio or any(kind != "text" for kind in request.modalities or ()):
        raise BadRequest(
            "modalities or audio asks for sound: the policy answers in text; leave it out", "modalities"
        )
    if request.web_search_options is not None:
        raise BadRequest(
            "web_search_options is set: nothing is searched here; leave it out", "web_search_options"
        )


def _ignored(request: _Request) -> Iterator[str]:
    # logprobs, top_logprobs and return_token_ids are among these on purpose. Harnesses that can collect rollouts ask for
    # them; the protocol's types have them optional, and those clients go on without. What they would hold is recorded
    # with the session, which sees tokens that a client does not.
    yield from request.model_extra or ()
    if request.stream_options is not None:
        yield from (f"stream_options.{name}" for name in request.stream_options.model_extra or ())
    for message in request.messages:
        yield from (f"messages[].{name}" for name in message.model_extra or ())
        if message.name is not None and message.role != "tool":
            yield "messages[].name"
    for tool in request.tools or ():
        yield from (f"tools[].{name}" for name in tool.model_extra or ())
        yield from (f"tools[].function.{name}" for name in tool.function.model_extra or ())


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop has {len(stops)} texts, the limit is {MAX_STOPS}: send fewer", "stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise BadRequest(
                f"stop has a text of {len(stop)} characters: 1 to {MAX_STOP_CHARACTERS} are taken", "stop"
            )
    return stops


def _tool_choice(given: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> ToolChoice:
    if given is None or given == "auto":
        return ToolChoice()
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        name = None
    elif isinstance(given, dict) and given.get("type") == "function":
        function = given.get("function")
        name = function.get("name") if isinstance(function, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(name, str):
            raise BadRequest("tool_choice names no function: give function.name", "tool_choice")
        if all(tool.name != name for tool in tools):
            raise BadRequest(
                f"tool_choice names {shown(name)}, which is not among the tools: offer it or choose another",
                "tool_choice",
            )
    else:
        raise BadRequest(
            f"tool_choice is {shown(given)}: use 'auto', 'none', 'required' or one function",
            "tool_choice",
        )
    if not tools:
        raise BadRequest("tool_choice is 'required' and there are no tools: offer some", "tool_choice")
    return ToolChoice("required", name)


def _messages(given: list[_Message]) -> tuple[Message, ...]:
    intake = ImageIntake()
    return one_preamble([_message(message, f"messages.{i}", intake) for i, message in enumerate(given)])


def _message(message: _Message, where: str, intake: ImageIntake) -> Message:
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and role != "assistant":
        raise BadRequest(f"{where}: role {message.role!r} has tool_calls", f"{where}.tool_calls")
    if role == "tool" and message.tool_call_id is None:
        raise BadRequest(f"{where}: a tool message needs tool_call_id", f"{where}.tool_call_id")
    if message.content is None and role != "assistant":
        raise BadRequest(f"{where}: content is missing", f"{where}.content")
    for field in ("refusal", "audio", "function_call"):
        if getattr(message, field):
            raise BadRequest(
                f"{where}.{field}: the policy would not see it; send text and tool_calls", f"{where}.{field}"
            )
    content = _content(message.content, f"{where}.content", intake)
    if role != "assistant":
        if not isinstance(content, str) and role == "system":
            raise BadRequest(
                f"{where}.content: a system message holds an image; send it as user", f"{where}.content"
            )
        return Message(
            role,
            content,
            tool_call_id=message.tool_call_id if role == "tool" else None,
            name=message.name if role == "tool" else None,
        )
    if not isinstance(content, str):
        raise BadRequest(
            f"{where}.content: an assistant message holds an image; send it as user", f"{where}.content"
        )
    calls = (
        ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    )
    return Message("assistant", content, tuple(calls), reasoning=_reasoning(message, where))


def _reasoning(message: _Message, where: str) -> str:
    """Clients send back what they were given under either name, some under both."""
    for name, given in (
        ("reasoning_content", message.reasoning_content),
        ("reasoning", message.reasoning),
    ):
        if given is None or given == "":
            continue
        if not isinstance(given, str):
            raise BadRequest(f"{where}.{name}: reasoning is text", f"{where}.{name}")
        return given
    return ""


def _content(content: str | list[dict[str, Any]] | None, where: str, intake: ImageIntake) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    return content_of(_part(part, f"{where}.{i}", intake) for i, part in enumerate(content))


def _part(part: dict[str, Any], where: str, intake: ImageIntake) -> str | Image:
    kind, text, image = part.get("type"), part.get("text"), part.get("image_url")
    if kind == "text" and isinstance(text, str):
        return text
    if kind == "image_url":
        url = image.get("url") if isinstance(image, dict) else image  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if isinstance(url, str):
            return intake.url(url, where)
        raise BadRequest(f"{where}: image_url has no url; send a data: URL", where)
    raise BadRequest(
        f"{where}: content of type {shown(kind)} is not supported; send text or image_url", where
    )


def _tool(tool: _Tool) -> Tool:
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})
