"""The Chat Completions dialect: what is understood, what is refused by name, and answers that OpenAI's own types accept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capture.chat import BadRequest, build_response, error_body, models_response, parse_request
from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.session import Answer


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_messages_and_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = parse_request(
        body(
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            ],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            max_tokens=9,
            max_completion_tokens=7,
            temperature=0.3,
            user="u",
        )
    )
    assert request.dialogue.messages == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message("assistant", "", (ToolCall("c1", "f", '{"a": 1}'),)),
        Message("tool", "ok", (), "c1"),
    )
    assert request.dialogue.tools == (Tool("f", "", {"type": "object"}),)
    assert request.max_tokens == 7
    assert request.ignored == ("temperature", "user")


def test_digest_is_of_the_json_not_of_its_text() -> None:
    one = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "x": {"a": 1, "b": 2}}'
    other = b'{"x":{"b":2,"a":1},"messages":[{"content":"hi","role":"user"}],"model":"m"}'
    assert parse_request(one).digest == parse_request(other).digest
    assert parse_request(one).digest != parse_request(one.replace(b"hi", b"ho")).digest


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"stop": ["x"]}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_request(body(**fields))
    assert refused.value.param == param


DEEP = body(x=None).replace(b"null", b"[" * 500 + b"]" * 500)
"""JSON that can be read, and not be written again for its digest."""


@pytest.mark.parametrize("raw", [b"", b"[]", b"nope", b"[" * 5000, b'{"model": "m"}', b"\xff\xfe", DEEP])
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_request(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["messages", "tools", "n", "stop", "tool_choice", "max_tokens", "response_format", "model", "stream"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_is_a_request_or_a_bad_request(fields: dict[str, Any]) -> None:
    try:
        request = parse_request(body(**fields))
    except BadRequest:
        return
    assert request.dialogue.messages


def test_responses_are_openais() -> None:
    from openai.types import Model
    from openai.types.chat import ChatCompletion

    asked = parse_request(body())
    calls = (ToolCall("c1", "f", '{"a": 1}'),)
    for answer, reason in (
        (Answer(3, "hello", (), False, 0, 5, 2), "stop"),
        (Answer(3, "", calls, False, 0, 5, 2), "tool_calls"),
        (Answer(3, "hel", (), True, 0, 5, 2), "length"),
    ):
        completion = ChatCompletion.model_validate(
            build_response(answer, asked, "s", 1_700_000_000), strict=True
        )
        assert completion.choices[0].finish_reason == reason
        assert completion.choices[0].message.content == (answer.content or None)
        assert completion.usage is not None
        assert completion.usage.total_tokens == 7
    assert [Model.model_validate(model).id for model in models_response()["data"]] == ["policy"]
    assert error_body("m", "t", "c")["error"] == {"message": "m", "type": "t", "param": None, "code": "c"}
