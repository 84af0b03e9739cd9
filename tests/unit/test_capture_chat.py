"""The Chat Completions dialect: what is understood, what is refused by name, and answers that OpenAI's own types accept."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pipeline.capture.call import Answer, BadRequest, Call, Finish, Piece, Reply, Text, Thought, ToolChoice
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.messages import Image, Message, Tool, ToolCall

REPLY = Reply("s", 1_700_000_000, b"key")
CHAT = Chat()
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(20))
JPEG = b"\xff\xd8\xff\xe0" + b"j" * 9
GIF = b"GIF89a" + b"g" * 9
WEBP = b"RIFF\x10\0\0\0WEBPVP8 "
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def parse(**fields: Any) -> Call:
    return CHAT.parse(body(**fields), REPLY)


def image(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def test_messages_and_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = parse(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
        tools=[F],
        max_tokens=9,
        max_completion_tokens=7,
        seed=3,
        temperature=0.3,
        user="u",
    )
    assert request.dialogue.messages == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message("assistant", "", (ToolCall("c1", "f", '{"a": 1}'),)),
        Message("tool", "ok", (), "c1"),
    )
    assert request.dialogue.tools == (Tool("f", "", {"type": "object"}),)
    assert (request.max_tokens, request.seed, request.model) == (7, 3, "m")
    assert request.ignored == ("temperature", "user")


def test_leading_system_texts_are_one_and_later_ones_stay() -> None:
    request = parse(
        messages=[
            {"role": "system", "content": "a"},
            {"role": "developer", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": "q"},
            {"role": "system", "content": "reminder"},
        ]
    )
    assert request.dialogue.messages == (
        Message("system", "a\nb"),
        Message("user", "q"),
        Message("system", "reminder"),
    )


def test_string_and_blocks_are_equal_and_cache_markers_are_none() -> None:
    plain = parse(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], tools=[F])
    marked = {"cache_control": {"type": "ephemeral"}}
    blocks = parse(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "s", **marked}]},
            {"role": "user", "content": [{"type": "text", "text": "q", **marked}], **marked},
        ],
        tools=[{**F, **marked}],
    )
    assert plain.dialogue == blocks.dialogue
    assert blocks.ignored == ()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_taken_under_both_its_names(name: str) -> None:
    request = parse(messages=[{"role": "assistant", "content": "x", name: "thought"}])
    assert request.dialogue.messages == (Message("assistant", "x", reasoning="thought"),)


def test_arguments_are_taken_as_they_are() -> None:
    broken = '{"a": "line\none\x01'
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": broken}}
    request = parse(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert request.dialogue.messages[0].tool_calls[0].arguments == broken


def test_images_by_their_bytes_and_digest() -> None:
    for data, media_type in (
        (PNG, "image/png"),
        (JPEG, "image/jpeg"),
        (GIF, "image/gif"),
        (WEBP, "image/webp"),
    ):
        # The declared type is wrong for three of them: clients guess it from a file's name.
        request = parse(
            messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, image(data)]}]
        )
        text, seen = request.dialogue.messages[0].content
        assert text == "see"
        assert isinstance(seen, Image)
        assert (seen.digest, seen.media_type, seen.data) == (
            hashlib.sha256(data).hexdigest(),
            media_type,
            data,
        )


def test_digest_is_of_the_json_not_of_its_text_nor_of_its_delivery() -> None:
    one = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "x": {"a": 1, "b": 2}}'
    other = b'{"x":{"b":2,"a":1},"messages":[{"content":"hi","role":"user"}],"model":"m"}'
    streamed = other[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'
    assert (
        len({CHAT.parse(raw, REPLY).digest for raw in (one, other, streamed, one.replace(b"hi", b"ho"))}) == 2
    )
    assert CHAT.parse(streamed, REPLY).stream
    assert not CHAT.parse(one, REPLY).stream


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", "f")),
    ],
)
def test_tool_choice(given: Any, choice: ToolChoice) -> None:
    assert parse(tools=[F], tool_choice=given).tool_choice == choice


def test_stop_and_parallel_calls() -> None:
    assert parse(stop="x").stop == ("x",)
    assert parse(stop=["a", "b", "c", "d", "e"]).stop == ("a", "b", "c", "d", "e")
    assert parse(stop=None).stop == parse(stop=[]).stop == ()
    assert parse().parallel
    assert not parse(parallel_tool_calls=False).parallel


def test_what_has_no_effect_is_named() -> None:
    request = parse(
        logprobs=True,
        return_token_ids=True,
        messages=[{"role": "user", "content": "q", "name": "ann", "mood": 1}],
        tools=[{"type": "function", "function": {"name": "f", "strict": True}}],
        stream_options={"include_obfuscation": False},
    )
    assert request.ignored == (
        "logprobs",
        "messages[].mood",
        "messages[].name",
        "return_token_ids",
        "stream_options.include_obfuscation",
        "tools[].function.strict",
    )


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [F]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [F]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [F]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages.0.refusal"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0.audio"),
        ({"messages": [{"role": "assistant", "reasoning": {"a": 1}}]}, "messages.0.reasoning"),
        ({"messages": [{"role": "system", "content": [image(PNG)]}]}, "messages.0.content"),
        (user({"type": "image_url", "image_url": {}}), "messages.0.content.0"),
        (user({"type": "image_url", "image_url": {"url": "https://x/y.png"}}), "messages.0.content.0"),
        (user(image(b"%PDF-1.7")), "messages.0.content.0"),
        (user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "messages.0.content.0"),
        (user({"type": "file", "file": {"file_id": "x"}}), "messages.0.content.0"),
        (user({"type": "refusal", "refusal": "no"}), "messages.0.content.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert param in str(refused.value) or param.split(".")[0] in str(refused.value)


DEEP = body(x=None).replace(b"null", b"[" * 500 + b"]" * 500)
"""JSON that can be read, and not be written again for its digest."""


@pytest.mark.parametrize("raw", [b"", b"[]", b"nope", b"[" * 5000, b'{"model": "m"}', b"\xff\xfe", DEEP])
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        CHAT.parse(raw, REPLY)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["messages", "tools", "n", "stop", "tool_choice", "max_tokens", "response_format", "model", "stream"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_is_a_request_or_a_bad_request(fields: dict[str, Any]) -> None:
    try:
        request = parse(**fields)
    except BadRequest:
        return
    assert request.dialogue.messages


CALLS = (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))
ANSWERS: list[tuple[Answer, str]] = [
    (Answer(3, "hello", (), "stop", 0, 5, 2), "stop"),
    (Answer(3, "hello", (), "stop_sequence", 0, 5, 2, stop_sequence="!"), "stop"),
    (Answer(3, "", CALLS, "tool_calls", 0, 5, 2, reasoning="hm", reasoning_tokens=1), "tool_calls"),
    (Answer(3, "see", CALLS[:1], "tool_calls", 0, 5, 2, cached_tokens=4), "tool_calls"),
    (Answer(3, "hel", (), "length", 0, 5, 2), "length"),
]


@pytest.mark.parametrize(("answer", "reason"), ANSWERS)
def test_responses_are_openais(answer: Answer, reason: str) -> None:
    done = ChatCompletion.model_validate(CHAT.response(parse(), answer, REPLY), strict=True)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == reason
    assert message.content == (answer.content if answer.content or not answer.tool_calls else None)
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [  # pyright: ignore[reportAttributeAccessIssue]
        (call.id, call.name, call.arguments) for call in answer.tool_calls
    ]
    assert getattr(message, "reasoning_content", "") == answer.reasoning
    assert done.usage is not None
    assert done.usage.total_tokens == 7
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == answer.cached_tokens
    assert done.usage.completion_tokens_details is not None
    assert done.usage.completion_tokens_details.reasoning_tokens == answer.reasoning_tokens


def events(raw: bytes) -> list[Any]:
    assert raw.endswith(b"\n\n")
    found = raw.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in found)
    return [event.removeprefix("data: ") for event in found]


def chunks(raw: bytes) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate(json.loads(event), strict=True) for event in events(raw)]


def streamed(call: Call, pieces: list[Piece], answer: Answer) -> list[ChatCompletionChunk]:
    stream = CHAT.stream(call, REPLY, 5)
    raw = stream.start() + b"".join(stream.piece(piece) for piece in pieces) + stream.end(answer)
    assert events(raw)[-1] == "[DONE]"
    return chunks(raw.removesuffix(b"data: [DONE]\n\n"))


def test_chunks_in_openais_order() -> None:
    call = parse(stream=True, stream_options={"include_usage": True})
    answer = Answer(3, "see it", CALLS, "tool_calls", 0, 5, 9, reasoning="hm")
    sent = streamed(call, [Thought("h"), Thought("m"), Text("see "), Text("it"), *CALLS], answer)
    assert sent[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in sent[1:-1])
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in sent[1:-2]]
    assert deltas == [
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "see "},
        {"content": "it"},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert [chunk.choices[0].finish_reason for chunk in sent[:-1]] == [None] * (len(sent) - 2) + [
        "tool_calls"
    ]
    assert sent[-1].choices == []
    assert sent[-1].usage is not None
    assert sent[-1].usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
    }
    assert all(chunk.usage is None for chunk in sent[:-1])


def test_usage_is_sent_when_it_is_asked_for_only() -> None:
    sent = streamed(parse(stream=True), [Text("x")], Answer(1, "x", (), "stop", 0, 5, 2))
    assert all(chunk.choices and chunk.usage is None for chunk in sent)
    assert sent[-1].choices[0].finish_reason == "stop"


TEXTS = st.lists(st.text(min_size=1, max_size=5), max_size=4)


@given(TEXTS, TEXTS, st.integers(0, 3), st.sampled_from(["stop", "length", "stop_sequence"]))
def test_a_streams_deltas_are_its_response(
    thoughts: list[str], texts: list[str], calls: int, finish: Finish
) -> None:
    made = tuple(ToolCall(f"c{i}", f"f{i}", '{"x": "\n"}') for i in range(calls))
    answer = Answer(1, "".join(texts), made, finish, 0, 5, 2, reasoning="".join(thoughts))
    call = parse(stream=True)
    sent = streamed(call, [*map(Thought, thoughts), *map(Text, texts), *made], answer)
    whole = CHAT.response(call, answer, REPLY)
    message = whole["choices"][0]["message"]
    deltas = [chunk.choices[0].delta for chunk in sent]
    assert {chunk.id for chunk in sent} == {whole["id"]}
    assert "".join(delta.content or "" for delta in deltas) == (message["content"] or "")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == answer.reasoning
    assert sent[-1].choices[0].finish_reason == whole["choices"][0]["finish_reason"]
    heard: dict[int, dict[str, str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls or ()):
        assert part.function is not None
        known = heard.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
        for key, text in (
            ("id", part.id),
            ("name", part.function.name),
            ("arguments", part.function.arguments),
        ):
            known[key] += text or ""
    assert list(heard.values()) == [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in made]


def test_errors_are_openais() -> None:
    assert CHAT.error(400, "m", "c", "p") == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
    assert CHAT.error(503, "m", "c")["error"]["type"] == "server_error"
    stream = CHAT.stream(parse(stream=True), REPLY, 5)
    (event,) = events(stream.fail(503, "service unavailable", "engine_unavailable"))
    assert json.loads(event) == CHAT.error(503, "service unavailable", "engine_unavailable")
    assert stream.ping() == b": ping\n\n"
