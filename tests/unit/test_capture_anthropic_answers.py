"""The Messages dialect's answers, as the `anthropic` package reads them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeline.capture.call import Answer, Call, Piece, Text, Thought
from pipeline.capture.dialogue import answer_key, answer_key_of
from pipeline.capture.messages import ToolCall
from tests.dialect_parts import (
    REPLY,
    answers,
    events,
    sent,
)
from tests.unit.test_capture_anthropic import ASK, DIALECT, parse

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def streamed(call: Call, answer: Answer, pieces: list[Piece]) -> list[dict[str, Any]]:
    stream = DIALECT.stream(call, REPLY, answer.prompt_tokens)
    return events(stream.start() + b"".join(map(stream.piece, pieces)) + stream.end(answer))


def put_together(given: list[dict[str, Any]]) -> SdkMessage:
    """As the SDK does it."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in given:
        read = EVENT.validate_python(event)
        snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot


@given(answers())
def test_a_streams_events_are_the_whole_response(made: tuple[Answer, list[Piece]]) -> None:
    answer, pieces = made
    whole = SdkMessage.model_validate(sent(DIALECT.response(parse(), answer, REPLY)))
    read = put_together(streamed(parse(), answer, pieces))
    assert SdkMessage.model_validate(read.to_dict()).model_dump() == whole.model_dump()
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == answer.prompt_tokens
    assert (whole.stop_sequence is not None) == (whole.stop_reason == "stop_sequence")


@given(answers(in_order=False))
def test_events_stand_in_the_protocols_order(made: tuple[Answer, list[Piece]]) -> None:
    answer, pieces = made
    given_events = streamed(parse(), answer, pieces)
    said = " ".join(
        event.get("delta", {}).get("type")
        or event.get("content_block", {}).get("type")
        or event["type"].removeprefix("content_block_")
        for event in given_events
    )
    text = "text( text_delta)+ stop "
    thinking = "thinking( thinking_delta)+ signature_delta stop "
    tool_use = "tool_use input_json_delta stop "
    assert re.fullmatch(f"message_start ({thinking})?({text}|{tool_use})*message_delta message_stop", said)
    assert given_events[0]["message"]["usage"]["input_tokens"] == answer.prompt_tokens
    started = -1
    for event in given_events[1:-2]:
        if event["type"] == "content_block_start":
            started += 1
            assert event["content_block"].get("input", {}) == {}
        assert event["index"] == started


@given(answers(in_order=False), st.booleans())
def test_an_answer_that_comes_back_is_recognized(made: tuple[Answer, list[Piece]], stream: bool) -> None:
    answer, pieces = made
    if stream:
        content = json.loads(put_together(streamed(parse(), answer, pieces)).to_json())["content"]
    else:
        content = sent(DIALECT.response(parse(), answer, REPLY))["content"]
    ask = [*ASK["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    back = parse(messages=ask).dialogue.messages[1]
    assert answer_key(back) == answer_key_of(answer.content, answer.tool_calls)
    assert (back.text, back.reasoning) == (answer.content, answer.reasoning)
    assert [json.loads(c.arguments) for c in back.tool_calls] == [
        json.loads(json.dumps(json.loads(c.arguments))) for c in answer.tool_calls
    ] or any(abs(n) >= 2**63 for n in integers([json.loads(c.arguments) for c in answer.tool_calls]))


def integers(value: Any) -> list[int]:
    if isinstance(value, list):
        return [n for item in value for n in integers(item)]
    if isinstance(value, dict):
        return integers(list(value.values()))
    return [value] if isinstance(value, int) else []


def test_arguments_that_a_client_could_not_send_back_are_repaired() -> None:
    call = ToolCall("c1", "bash", r'{"a": "cut \ud83d", "n": 1e999, "big": 123456789012345678901234567890}')
    answer = Answer(1, "", (call,), "tool_calls", 0, 5, 5)
    (block,) = sent(DIALECT.response(parse(), answer, REPLY))["content"]
    assert block["input"] == {"a": "cut \ufffd", "n": None, "big": 1.2345678901234568e29}
    exact = ToolCall("c1", "bash", '{"big":123456789012345678901234567890}')
    (block,) = sent(DIALECT.response(parse(), Answer(1, "", (exact,), "tool_calls", 0, 5, 5), REPLY))[
        "content"
    ]
    assert block["input"] == {"big": 123456789012345678901234567890}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    made = DIALECT.error(status, "m", "c", "p")
    assert made["error"] == {"type": kind, "message": "m"}
    if kind != "request_too_large":  # documented, and missing in the SDK's union
        ErrorResponse.model_validate(made)
    stream = DIALECT.stream(parse(), REPLY, 3)
    (event,) = events(stream.fail(status, "m", "c"))
    assert (event["type"], event["error"]["type"]) == ("error", kind)


def test_overflow_is_told_in_the_words_that_clients_know() -> None:
    assert DIALECT.overflow(12, 10) == "prompt is too long: 12 tokens > 10 maximum"
    assert DIALECT.overloaded == 529


def test_a_ping_fits_anywhere() -> None:
    stream = DIALECT.stream(parse(), REPLY, 3)
    made = (
        stream.start() + stream.ping() + stream.piece(Thought("a")) + stream.ping() + stream.piece(Text("b"))
    )
    read = events(made + stream.ping() + stream.end(Answer(1, "b", (), "stop", 0, 3, 2, "a")))
    assert [e["type"] for e in read].count("ping") == 3
    kept = put_together([e for e in read if e["type"] != "ping"])
    assert [block.type for block in kept.content] == ["thinking", "text"]
