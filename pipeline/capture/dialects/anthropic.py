"""Anthropic's Messages dialect, with `count_tokens`: request body -> Call, Answer -> Message or its events. Pure.

Requests are read in `anthropic_request`; here are the answers. Promises: responses and events validate against the types
of the `anthropic` package; put together, a stream's events are the whole response.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import orjson

from pipeline.capture.call import Answer, Call, Finish, Piece, Reply, Text
from pipeline.capture.dialects.anthropic_request import read_call, read_count
from pipeline.capture.dialects.body import event, read_json
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import ToolCall

_STOP_REASONS: dict[Finish, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_sequence": "stop_sequence",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529


class Anthropic:
    """The dialect; see `pipeline.capture.dialects.base.Dialect`."""

    def parse(self, body: bytes, reply: Reply) -> Call:
        """Raises BadRequest."""
        return read_call(body, reply)

    def parse_count(self, body: bytes, reply: Reply | None = None) -> Dialogue:
        """What a `count_tokens` request asks about. Without `reply` no thinking is recognized as the session's own, and so
        none counts. Raises BadRequest."""
        return read_count(body, reply)

    def count_response(self, prompt_tokens: int) -> dict[str, Any]:
        """The body of a 200 to `count_tokens`."""
        return {"input_tokens": prompt_tokens}

    def response(self, call: Call, answer: Answer, reply: Reply) -> dict[str, Any]:
        """For `orjson.dumps`, which writes the arguments' `orjson.Fragment`s as they are."""
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append(_thinking(answer.reasoning, reply.sign(answer.reasoning)))
        if answer.content:
            content.append(_text(answer.content))
        for made in answer.tool_calls:
            # The arguments' text goes into the body as it is: no number loses digits on its way through a parser.
            content.append(_tool_use(made, orjson.Fragment(_safe_arguments(made.arguments))))
        return {
            **_message(call, _usage(answer)),
            "content": content,
            "stop_reason": _STOP_REASONS[answer.finish],
            "stop_sequence": answer.stop_sequence,
        }

    def stream(self, call: Call, reply: Reply, prompt_tokens: int) -> MessageEvents:
        return MessageEvents(call, reply, prompt_tokens)

    def error(self, status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
        """`code` and `param` have no place of their own: messages begin with the field's name."""
        return {
            "type": "error",
            "error": {"type": error_type(status), "message": message},
            "request_id": None,
        }

    def overflow(self, prompt_tokens: int, limit: int) -> str:
        """The message of a 400 by which clients know that the dialogue no longer fits."""
        return f"prompt is too long: {prompt_tokens} tokens > {limit} maximum"

    @property
    def overloaded(self) -> int:
        return _OVERLOADED


class MessageEvents:
    """Writes one answer's events; see `pipeline.capture.dialects.base.Stream`."""

    def __init__(self, call: Call, reply: Reply, prompt_tokens: int) -> None:
        self._call, self._reply, self._prompt_tokens = call, reply, prompt_tokens
        self._index = 0
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._thought: list[str] = []

    def start(self) -> bytes:
        # How much of the prompt was known is not said yet: `message_delta` corrects the counts.
        usage = {
            "input_tokens": self._prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        return event("message_start", {"message": _message(self._call, usage)})

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, ToolCall):
            arguments = {"type": "input_json_delta", "partial_json": _safe_arguments(piece.arguments)}
            return self._begin("tool_use", _tool_use(piece, {})) + self._delta(arguments) + self._close()
        if not piece.text:
            return b""
        if isinstance(piece, Text):
            begun = b"" if self._open == "text" else self._begin("text", _text(""))
            return begun + self._delta({"type": "text_delta", "text": piece.text})
        begun = b"" if self._open == "thinking" else self._begin("thinking", _thinking("", ""))
        self._thought.append(piece.text)
        return begun + self._delta({"type": "thinking_delta", "thinking": piece.text})

    def ping(self) -> bytes:
        return event("ping", {})

    def end(self, answer: Answer) -> bytes:
        delta = {
            "stop_reason": _STOP_REASONS[answer.finish],
            "stop_sequence": answer.stop_sequence,
            "stop_details": None,
            "container": None,
        }
        return (
            self._close()
            + event("message_delta", {"delta": delta, "usage": _usage(answer)})
            + event("message_stop", {})
        )

    def fail(self, status: int, message: str, code: str) -> bytes:
        return event("error", {"error": {"type": error_type(status), "message": message}, "request_id": None})

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = kind
        return closed + event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = self._reply.sign("".join(self._thought))
            signed = self._delta({"type": "signature_delta", "signature": signature})
            self._thought = []
        stopped = event("content_block_stop", {"index": self._index})
        self._open = None
        self._index += 1
        return signed + stopped


def error_type(status: int) -> str:
    """Anthropic's name for an error of this status."""
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def _message(call: Call, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{call.digest[:24]}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _safe_arguments(text: str) -> str:
    """As it was sampled, unless it holds what the client could not send back: half a surrogate pair, a number beyond a
    double's range."""
    value, whole = read_json(text)
    return text if whole else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
