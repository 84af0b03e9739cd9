"""The chunks of a streamed chat completion, as OpenAI orders them: role, deltas, finish reason, usage when asked, [DONE]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from pipeline.capture.call import Answer, Call, Finish, Piece, Reply, Text, Thought


@dataclass(frozen=True, slots=True)
class Wire:
    """What a call says of its delivery. `include_usage`: the chunk with the token counts is wanted."""

    include_usage: bool = False


class ChatStream:
    """See `pipeline.capture.dialects.base.Stream`. `error` makes the body of an error."""

    def __init__(self, call: Call, reply: Reply, error: Callable[[int, str, str], dict[str, Any]]) -> None:
        wire = call.wire
        self._include_usage = isinstance(wire, Wire) and wire.include_usage
        self._error = error
        self._calls = 0
        self._frame: dict[str, Any] = {
            "id": completion_id(call, reply),
            "object": "chat.completion.chunk",
            "created": reply.created,
            "model": call.model,
        }

    def start(self) -> bytes:
        return self._delta({"role": "assistant", "content": "", "refusal": None})

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._delta({"content": piece.text})
        if isinstance(piece, Thought):
            return self._delta({"reasoning_content": piece.text})
        index, self._calls = self._calls, self._calls + 1
        head = {
            "index": index,
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }
        rest = {"index": index, "function": {"arguments": piece.arguments}}
        return self._delta({"tool_calls": [head]}) + self._delta({"tool_calls": [rest]})

    def ping(self) -> bytes:
        # A comment: the protocol has no event for it.
        return b": ping\n\n"

    def end(self, answer: Answer) -> bytes:
        events = self._delta({}, finish_reason(answer.finish))
        if self._include_usage:
            events += _event({**self._frame, "choices": [], "usage": usage(answer)})
        return events + b"data: [DONE]\n\n"

    def fail(self, status: int, message: str, code: str) -> bytes:
        return _event(self._error(status, message, code))

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._frame, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return _event(chunk)


def completion_id(call: Call, reply: Reply) -> str:
    """The same for every form in which the answer is sent, and for a call that is sent again."""
    return f"chatcmpl-{reply.session}-{call.digest[:24]}"


def finish_reason(finish: Finish) -> str:
    return "stop" if finish == "stop_sequence" else finish


def usage(answer: Answer) -> dict[str, Any]:
    """OpenAI's token counts of an answer."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
