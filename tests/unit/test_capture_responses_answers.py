"""The Responses dialect's answers, as the `openai` package reads them."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pipeline.capture.call import Answer, Call, Piece, Text, Thought
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialogue import answer_key, answer_key_of
from pipeline.capture.messages import Message, ToolCall
from tests.dialect_parts import (
    REPLY,
    answers,
    events,
    sent,
)
from tests.unit.test_capture_responses import AGENTS, BASH, DIALECT, PATCH, USER, messages, parse

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def streamed(call: Call, answer: Answer, pieces: list[Piece]) -> list[dict[str, Any]]:
    stream = DIALECT.stream(call, REPLY, answer.prompt_tokens)
    return events(stream.start() + b"".join(map(stream.piece, pieces)) + stream.end(answer))


def offering() -> Call:
    return parse(tools=[{**BASH, "name": "edit"}, {**PATCH, "name": "bash"}])


@given(answers(in_order=False))
def test_a_streams_events_are_the_whole_response(made: tuple[Answer, list[Piece]]) -> None:
    answer, pieces = made
    whole = sent(DIALECT.response(offering(), answer, REPLY))
    SdkResponse.model_validate(whole)
    given_events = streamed(offering(), answer, pieces)
    assert [event["sequence_number"] for event in given_events] == list(range(len(given_events)))
    assert given_events[-1]["response"] == whole
    assert given_events[-1]["type"] == f"response.{whole['status']}"
    assert [e["item"] for e in given_events if e["type"] == "response.output_item.done"] == whole["output"]
    # The SDK's own accumulator checks identities and puts the deltas together.
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in given_events:
        state.handle_event(EVENT.validate_python(event))
    put_together: Any = state._ResponseStreamState__current_snapshot  # pyright: ignore[reportAttributeAccessIssue]
    texts = [part.text for item in put_together.output if item.type == "message" for part in item.content]
    assert texts == ([answer.content] if answer.content or not answer.tool_calls else [])
    functions = [item.arguments for item in put_together.output if item.type == "function_call"]
    assert functions == [call.arguments for call in answer.tool_calls if call.name != "bash"]
    if whole["status"] == "completed":
        assert state._completed_response is not None
        assert state._completed_response.output_text == answer.content


@given(answers(in_order=False))
def test_events_stand_in_the_protocols_order(made: tuple[Answer, list[Piece]]) -> None:
    answer, pieces = made
    given_events = streamed(offering(), answer, pieces)
    kinds = " ".join(event["type"].removeprefix("response.") for event in given_events)
    part = "reasoning_summary_part"
    text = "reasoning_summary_text"
    reasoning = rf"output_item.added {part}.added ({text}.delta )+{text}.done {part}.done output_item.done "
    message = r"output_item.added content_part.added (output_text.delta )*output_text.done content_part.done output_item.done "
    call = "output_item.added (X.delta X.done) output_item.done ".replace("X", "function_call_arguments")
    custom = "output_item.added (X.delta X.done) output_item.done ".replace("X", "custom_tool_call_input")
    pattern = f"created in_progress ({reasoning})?({message})?({call}|{custom})*(completed|incomplete)"
    assert re.fullmatch(pattern, kinds), kinds
    added: list[str] = []
    for event in given_events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(added)
            added.append(event["item"]["id"])
        elif "output_index" in event:
            assert event["output_index"] == len(added) - 1
            assert event.get("item_id", added[-1]) == added[-1]


@given(answers(in_order=False), st.booleans(), st.booleans())
def test_an_answer_that_comes_back_is_recognized(
    made: tuple[Answer, list[Piece]], stream: bool, ids: bool
) -> None:
    answer, pieces = made
    if stream:
        given_events = streamed(offering(), answer, pieces)
        items = [e["item"] for e in given_events if e["type"] == "response.output_item.done"]
    else:
        items = sent(DIALECT.response(offering(), answer, REPLY))["output"]
    if not ids:
        items = [{key: value for key, value in item.items() if key != "id"} for item in items]
    back, last = messages(*items, USER)
    assert last == Message("user", "q")
    assert answer_key(back) == answer_key_of(answer.content, answer.tool_calls)
    assert (back.text, back.reasoning) == (answer.content, answer.reasoning)
    for mine, theirs in zip(answer.tool_calls, back.tool_calls, strict=True):
        assert (mine.id, mine.name) == (theirs.id, theirs.name)
        assert mine.arguments == theirs.arguments or mine.name == "bash"


def test_calls_are_written_as_they_were_offered() -> None:
    call = parse(tools=[BASH, PATCH, AGENTS])
    made = (
        ToolCall("c1", "bash", '{"a": 1}'),
        ToolCall("c2", "apply_patch", '{"input": "*** \\ud83d"}'),
        ToolCall("c3", "apply_patch", '{"patch": 1}'),
        ToolCall("c4", "agents.spawn", "{}"),
        ToolCall("c5", "agents.apply_patch", '{"input": "x"}'),
        ToolCall("c6", "unheard_of", "{}"),
    )
    response = sent(DIALECT.response(call, Answer(1, "", made, "tool_calls", 0, 5, 5), REPLY))
    read = SdkResponse.model_validate(response).output
    assert [item.type for item in read] == [
        "function_call",
        "custom_tool_call",
        "custom_tool_call",
        "function_call",
        "custom_tool_call",
        "function_call",
    ]
    kept = [
        {
            key: value
            for key, value in item.items()
            if key in ("call_id", "name", "namespace", "arguments", "input")
        }
        for item in response["output"]
    ]
    assert kept == [
        {"call_id": "c1", "name": "bash", "arguments": '{"a": 1}'},
        {"call_id": "c2", "name": "apply_patch", "input": "*** \ufffd"},
        {"call_id": "c3", "name": "apply_patch", "input": '{"patch": 1}'},
        {"call_id": "c4", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"call_id": "c5", "name": "apply_patch", "namespace": "agents", "input": "x"},
        {"call_id": "c6", "name": "unheard_of", "arguments": "{}"},
    ]


def test_usage_and_why_an_answer_is_incomplete() -> None:
    answer = Answer(1, "cut", (), "length", 0, 10, 4, cached_tokens=8, reasoning_tokens=2)
    read = SdkResponse.model_validate(sent(DIALECT.response(parse(), answer, REPLY)))
    assert read.status == "incomplete"
    assert read.incomplete_details is not None
    assert read.incomplete_details.reason == "max_output_tokens"
    assert read.usage is not None
    assert (read.usage.input_tokens, read.usage.output_tokens, read.usage.total_tokens) == (10, 4, 14)
    assert read.usage.input_tokens_details.cached_tokens == 8
    assert read.usage.output_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "server_error"), (500, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")],
)
def test_trouble_in_a_stream(status: int, code: str) -> None:
    stream = DIALECT.stream(parse(), REPLY, 3)
    read = events(
        stream.start() + stream.piece(Text("a")) + stream.ping() + stream.fail(status, "m", "engine")
    )
    for event in read:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    assert read[-1]["type"] == "response.failed"
    assert read[-1]["response"]["error"] == {"code": code, "message": "m"}


def test_a_ping_is_an_event_that_changes_nothing() -> None:
    stream = DIALECT.stream(parse(), REPLY, 3)
    made = (
        stream.start() + stream.ping() + stream.piece(Thought("a")) + stream.ping() + stream.piece(Text("b"))
    )
    read = events(made + stream.ping() + stream.end(Answer(1, "b", (), "stop", 0, 3, 2, "a")))
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in read:
        state.handle_event(EVENT.validate_python(event))
    assert state._completed_response is not None
    assert state._completed_response.output_text == "b"
    assert [item.type for item in state._completed_response.output] == ["reasoning", "message"]


def test_errors_and_overflow() -> None:
    assert DIALECT.error(400, "m", "c", "p")["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": "p",
        "code": "c",
    }
    for status in (400, 404, 410, 429, 500, 503):
        assert DIALECT.error(status, "m", "c") == Chat().error(status, "m", "c")
    assert "12 tokens" in DIALECT.overflow(12, 10)
    assert DIALECT.overloaded == 503
    with pytest.raises(TypeError, match="another dialect"):
        DIALECT.stream(Call("d", parse().dialogue, "m"), REPLY, 1)
