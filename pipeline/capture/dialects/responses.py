"""OpenAI's Responses dialect: request body -> Call, Answer -> Response or its events. Pure.

Requests are read in `responses_request`; here are the answers. Promises: responses and events validate against the types
of the `openai` package; an item's `output_item.done` holds what the whole response holds; sequence numbers count from 0.
"""

from __future__ import annotations

from typing import Any, Literal

from pipeline.capture.call import Answer, Call, Piece, Reply, Text, Thought
from pipeline.capture.dialects.body import event
from pipeline.capture.dialects.responses_items import (
    call_item,
    message_item,
    message_status,
    output_items,
    output_text,
    reasoning_item,
    seal,
    turn_name,
)
from pipeline.capture.dialects.responses_request import Wire, read_call

_UNAVAILABLE = 503


class Responses:
    """The dialect; see `pipeline.capture.dialects.base.Dialect`."""

    def parse(self, body: bytes, reply: Reply) -> Call:
        """Raises BadRequest."""
        return read_call(body, reply)

    def response(self, call: Call, answer: Answer, reply: Reply) -> dict[str, Any]:
        items = output_items(call, answer, reply, _wire(call).box)
        return _finished(call, answer, reply, items)

    def stream(self, call: Call, reply: Reply, prompt_tokens: int) -> ResponseEvents:
        return ResponseEvents(call, reply)

    def error(self, status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def overflow(self, prompt_tokens: int, limit: int) -> str:
        """The message of a 400 by which clients know that the dialogue no longer fits, beside its code."""
        return (
            f"Your input exceeds the context window of this model: {prompt_tokens} tokens, and it holds {limit}. Please"
            " adjust your input and try again."
        )

    @property
    def overloaded(self) -> int:
        return _UNAVAILABLE


class ResponseEvents:
    """Writes one answer's events; see `pipeline.capture.dialects.base.Stream`.

    Calls are held back until the answer is whole: text may follow them, and clients that do not keep ids put a turn's items
    together by their order.
    """

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call, self._reply = call, reply
        self._turn, self._box = turn_name(call), _wire(call).box
        self._sequence = 0
        self._items = 0
        self._open: Literal["reasoning", "message"] | None = None
        self._texts: list[str] = []

    def start(self) -> bytes:
        under_way = self._under_way()
        return self._event("response.created", response=under_way) + self._event(
            "response.in_progress", response=under_way
        )

    def piece(self, piece: Piece) -> bytes:
        if not isinstance(piece, Text | Thought) or not piece.text:
            return b""
        begun = b""
        if isinstance(piece, Thought):
            if self._open is None:
                begun = self._begin_reasoning()
            self._texts.append(piece.text)
            return begun + self._event(
                "response.reasoning_summary_text.delta", **self._at("rs"), summary_index=0, delta=piece.text
            )
        if self._open != "message":
            begun = self._end_reasoning() + self._begin_message()
        self._texts.append(piece.text)
        return begun + self._event(
            "response.output_text.delta", **self._at("msg"), content_index=0, delta=piece.text, logprobs=[]
        )

    def ping(self) -> bytes:
        # A comment would not do: clients that give up on silence wait for events.
        return self._event("response.in_progress", response=self._under_way())

    def end(self, answer: Answer) -> bytes:
        made = [self._end_reasoning()]
        if self._open is None and not answer.tool_calls:
            made.append(self._begin_message())
        if self._open == "message":
            made.append(self._end_message(answer))
        for i, call in enumerate(answer.tool_calls):
            made.append(
                self._event(
                    "response.output_item.added",
                    output_index=self._items,
                    item=call_item(self._turn, i, call, self._box, whole=False),
                )
            )
            item = call_item(self._turn, i, call, self._box)
            kind, name = (
                ("response.custom_tool_call_input", "input")
                if item["type"] == "custom_tool_call"
                else ("response.function_call_arguments", "arguments")
            )
            at = {"item_id": item["id"], "output_index": self._items}
            made.append(self._event(f"{kind}.delta", **at, delta=item[name]))
            made.append(self._event(f"{kind}.done", **at, **{name: item[name]}))
            made.append(self._end_item(item))
        items = output_items(self._call, answer, self._reply, self._box)
        response = _finished(self._call, answer, self._reply, items)
        made.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(made)

    def fail(self, status: int, message: str, code: str) -> bytes:
        # Clients try again unless the code is one that they know as final.
        known = {429: "rate_limit_exceeded"}.get(status, "invalid_prompt" if status < 500 else "server_error")
        response = {
            **_response(self._call, self._reply),
            "status": "failed",
            "error": {"code": known, "message": message},
        }
        return self._event("response.failed", response=response)

    def _begin_reasoning(self) -> bytes:
        self._open = "reasoning"
        item = reasoning_item(self._turn, "", None)
        return self._event("response.output_item.added", output_index=self._items, item=item) + self._event(
            "response.reasoning_summary_part.added",
            **self._at("rs"),
            summary_index=0,
            part={"type": "summary_text", "text": ""},
        )

    def _end_reasoning(self) -> bytes:
        if self._open != "reasoning":
            return b""
        text, at = self._close(), {**self._at("rs"), "summary_index": 0}
        return (
            self._event("response.reasoning_summary_text.done", **at, text=text)
            + self._event(
                "response.reasoning_summary_part.done", **at, part={"type": "summary_text", "text": text}
            )
            + self._end_item(reasoning_item(self._turn, text, seal(self._reply, text)))
        )

    def _begin_message(self) -> bytes:
        self._open = "message"
        item = message_item(self._turn, "", "in_progress")
        return self._event("response.output_item.added", output_index=self._items, item=item) + self._event(
            "response.content_part.added", **self._at("msg"), content_index=0, part=output_text("")
        )

    def _end_message(self, answer: Answer) -> bytes:
        text, at = self._close(), {**self._at("msg"), "content_index": 0}
        return (
            self._event("response.output_text.done", **at, text=text, logprobs=[])
            + self._event("response.content_part.done", **at, part=output_text(text))
            + self._end_item(message_item(self._turn, text, message_status(answer)))
        )

    def _close(self) -> str:
        text = "".join(self._texts)
        self._open, self._texts = None, []
        return text

    def _end_item(self, item: dict[str, Any]) -> bytes:
        done = self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        return done

    def _at(self, prefix: str) -> dict[str, Any]:
        return {"item_id": f"{prefix}_{self._turn}", "output_index": self._items}

    def _under_way(self) -> dict[str, Any]:
        return {**_response(self._call, self._reply), "status": "in_progress"}

    def _event(self, kind: str, **data: Any) -> bytes:
        made = event(kind, {"sequence_number": self._sequence, **data})
        self._sequence += 1
        return made


def _wire(call: Call) -> Wire:
    if not isinstance(call.wire, Wire):
        raise TypeError(f"the call was made by another dialect: its wire is {call.wire!r}")
    return call.wire


def _response(call: Call, reply: Reply) -> dict[str, Any]:
    """A response without its outcome. What was asked is not repeated but for what is small: instructions and tools are
    tens of kilobytes, three times a stream."""
    wire = _wire(call)
    return {
        "id": f"resp_{turn_name(call)}",
        "object": "response",
        "created_at": reply.created,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": wire.max_output_tokens,
        "metadata": {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": call.parallel,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": wire.tool_choice,
        "tools": [],
        "truncation": "disabled",
        "usage": None,
    }


def _finished(call: Call, answer: Answer, reply: Reply, items: list[dict[str, Any]]) -> dict[str, Any]:
    outcome: dict[str, Any] = {"status": "completed"}
    if answer.length:
        outcome = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return {**_response(call, reply), **outcome, "output": items, "usage": usage}
