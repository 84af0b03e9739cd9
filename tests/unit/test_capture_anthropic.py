"""The Messages dialect's requests as dialogues."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import MessageTokensCount
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture.call import BadRequest, Call, Reply, ToolChoice
from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialogue import Dialogue, steps
from pipeline.capture.messages import Message, ToolCall
from tests.dialect_parts import (
    PNG,
    REPLY,
    Assistant,
    User,
    body,
    cut,
    damaged,
    scripts,
    shuffled,
)

DIALECT = Anthropic()
ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
BASH = {"name": "bash", "description": "runs", "input_schema": {"type": "object"}}


def parse(reply: Reply = REPLY, **fields: Any) -> Call:
    return DIALECT.parse(body({**ASK, **fields}), reply)


def messages(*given: tuple[str, Any], **fields: Any) -> tuple[Message, ...]:
    asked = [{"role": role, "content": content} for role, content in given]
    return parse(messages=asked, **fields).dialogue.messages


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def written(turns: list[User | Assistant], system: str, draw: Any) -> dict[str, Any]:
    """The dialogue as a request, in one of the ways in which a client may write it."""

    def content(said: str) -> Any:
        if draw(st.booleans()):
            return said
        return [marked(text(part)) for part in cut(said, draw)]

    def marked(block: dict[str, Any]) -> dict[str, Any]:
        return {**block, "cache_control": {"type": "ephemeral"}} if draw(st.booleans()) else block

    def blocks(said: str | None) -> list[dict[str, Any]]:
        found = [] if said is None else content(said)
        return [text(found)] if isinstance(found, str) else found

    made: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn, Assistant):
            thought = [
                {"type": "thinking", "thinking": turn.reasoning, "signature": REPLY.sign(turn.reasoning)}
            ]
            foreign = [
                {"type": "thinking", "thinking": "hm", "signature": "Zm9v"},
                {"type": "redacted_thinking", "data": "x"},
            ]
            used = [
                marked({"type": "tool_use", "id": name, "name": tool, "input": given})
                for name, tool, given in turn.calls
            ]
            inside = [*(foreign if draw(st.booleans()) else []), *thought, *blocks(turn.text), *used]
            made.append({"role": "assistant", "content": inside})
            continue
        results = [
            marked(
                {
                    "type": "tool_result",
                    "tool_use_id": name,
                    "content": content(said),
                    **({"is_error": True} if failed else {"is_error": False} if draw(st.booleans()) else {}),
                }
            )
            for name, said, failed in turn.results
        ]
        if not results:
            assert turn.text is not None
            made.append({"role": "user", "content": content(turn.text)})
        elif turn.text is not None and draw(st.booleans()):
            # Results alone, then the text as a message of its own.
            made.append({"role": "user", "content": results})
            made.append({"role": "user", "content": content(turn.text)})
        else:
            made.append({"role": "user", "content": [*results, *blocks(turn.text)]})
    asked: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": made}
    if system:
        billing = [text("x-anthropic-billing-header: cch=1;")] if draw(st.booleans()) else []
        if draw(st.booleans()):
            asked["system"] = [*billing, *blocks(system)] if billing else content(system)
        else:
            made.insert(0, {"role": "system", "content": [*billing, *blocks(system)]})
    return shuffled(asked, draw)


@given(scripts(), st.text(max_size=5).filter(lambda s: s.isprintable()), st.data())
def test_what_a_client_may_rewrite_makes_no_difference(
    turns: list[User | Assistant], system: str, data: st.DataObject
) -> None:
    first, second = (DIALECT.parse(body(written(turns, system, data.draw)), REPLY).dialogue for _ in range(2))
    assert [s.prompt_key for s in steps(first)] == [s.prompt_key for s in steps(second)]
    assert [s.answer_key for s in steps(first)] == [s.answer_key for s in steps(second)]
    assert [m.reasoning for m in first.messages] == [m.reasoning for m in second.messages]
    texts = [turn.text for turn in turns if isinstance(turn, Assistant)]
    assert [m.text for m in first.messages if m.role == "assistant"] == texts


def test_a_request_of_every_kind_of_block() -> None:
    call = parse(
        system=[text("x-anthropic-billing-header: cch=1;"), text("Be brief."), text("\nNow.")],
        tools=[BASH],
        stop_sequences=["END"],
        stream=True,
        messages=[
            {"role": "user", "content": [text("look "), {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": PNG}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": REPLY.sign("hm")},
                    text("I run"),
                    {"type": "tool_use", "id": "c1", "name": "bash", "input": {"b": 1, "a": [1.5, None]}},
                    {"type": "tool_use", "id": "c2", "name": "bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                    text("go on"),
                    {"type": "tool_result", "tool_use_id": "c1", "content": [text("ok"), {"type": "image", "source": {"type": "base64", "data": PNG}}]},
                    {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
                ],
            },
            {"role": "system", "content": "a reminder"},
        ],
    )  # fmt: skip
    image = call.dialogue.messages[1].images[0]
    assert image.media_type == "image/png"
    assert call.dialogue.messages == (
        Message("system", "Be brief.\nNow."),
        Message("user", ("look ", image)),
        Message(
            "assistant",
            "I run",
            (ToolCall("c1", "bash", '{"b":1,"a":[1.5,null]}'), ToolCall("c2", "bash", "{}")),
            reasoning="hm",
        ),
        Message("tool", "no", tool_call_id="c2", name="bash", is_error=True),
        Message("tool", ("ok", image), tool_call_id="c1", name="bash"),
        Message("user", "go onT\nD"),
        Message("system", "a reminder"),
    )
    assert (call.stop, call.stream, call.max_tokens, call.model) == (("END",), True, 9, "m")
    assert call.ignored == ("x-anthropic-billing-header",)


def test_a_result_without_content_and_users_in_a_row() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "bash", "input": {}}
    assert messages(
        ("user", "a"),
        ("user", [text("b")]),
        ("assistant", [use]),
        ("user", [{"type": "tool_result", "tool_use_id": "c1"}]),
        ("user", []),
    ) == (
        Message("user", "a"),
        Message("user", "b"),
        Message("assistant", "", (ToolCall("c1", "bash", "{}"),)),
        Message("tool", "", tool_call_id="c1", name="bash"),
        Message("user", ""),
    )


def test_thinking_that_is_not_ours_is_left_out_and_counted() -> None:
    other = Reply("s2", 0, b"o" * 32)
    thinking = [
        {"type": "thinking", "thinking": "hm", "signature": other.sign("hm")},
        {"type": "thinking", "thinking": "hm", "signature": REPLY.sign("changed")},
        {"type": "thinking", "thinking": "hm"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    call = parse(
        messages=[{"role": "assistant", "content": [*thinking, text("t")]}, {"role": "user", "content": "u"}]
    )
    assert call.dialogue.messages[0] == Message("assistant", "t")
    assert call.ignored == ("messages.redacted_thinking", "messages.thinking")


def test_a_deferred_tool_is_shown_where_it_is_loaded() -> None:
    late = {**BASH, "name": "late", "defer_loading": True}
    loaded = [
        {
            "type": "tool_result",
            "tool_use_id": "c1",
            "content": [{"type": "tool_reference", "tool_name": "late"}],
        }
    ]
    use = {"type": "tool_use", "id": "c1", "name": "bash", "input": {}}
    ask = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}]
    before = parse(tools=[BASH, late], messages=ask[:1]).dialogue
    after = parse(tools=[late, BASH], messages=[*ask, {"role": "user", "content": loaded}]).dialogue
    assert [tool.name for tool in before.tools] == ["bash"]
    assert steps(before)[0] == steps(after)[0]
    spelled = '{"name":"late","description":"runs","parameters":{"type":"object"}}'
    assert after.messages[-1].text == f"{spelled}\n"
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": {**BASH, "name": "inline"}},
        },
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "bash"}},
    ]
    told = messages(("user", "q"), ("system", changes), tools=[BASH, late])[-1]
    assert told.role == "system"
    assert [line.rpartition(": ")[0] or line for line in told.text.splitlines()][
        -1
    ] == "The tool bash is no longer available."
    assert told.text.count("This tool is available from here on: {") == 2


def test_what_has_no_effect_is_accepted_and_counted() -> None:
    call = parse(
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        temperature=0.3,
        top_k=4,
        betas=["x"],
        invented_tomorrow=[1],
        tools=[BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        messages=[
            {"role": "user", "content": "q", "clear_at": "never"},
            {"role": "system", "output_config": {"effort": "low"}},
        ],
    )
    assert call.dialogue.messages == (Message("user", "q"),)
    assert [tool.name for tool in call.dialogue.tools] == ["bash"]
    assert call.ignored == (
        "betas",
        "context_management",
        "invented_tomorrow",
        "messages.clear_at",
        "messages.output_config",
        "metadata",
        "output_config",
        "temperature",
        "thinking",
        "tools.web_search_20250305",
        "top_k",
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (ToolChoice(), True)),
        ({"type": "auto"}, (ToolChoice(), True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (ToolChoice(), False)),
        ({"type": "any"}, (ToolChoice("required"), True)),
        ({"type": "any", "disable_parallel_tool_use": True}, (ToolChoice("required"), False)),
        ({"type": "tool", "name": "bash"}, (ToolChoice("required", "bash"), True)),
        ({"type": "none"}, (ToolChoice("none"), True)),
    ],
)
def test_tool_choice(choice: dict[str, Any] | None, expected: tuple[ToolChoice, bool]) -> None:
    call = parse(tools=[BASH], tool_choice=choice)
    assert (call.tool_choice, call.parallel) == expected


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"model": None}, "model"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences.0"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "The answer is"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": {"type": "tool", "name": "edit"}}, "tool_choice.name"),
        ({"tools": [BASH], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"system": [{"type": "image"}]}, "system.0"),
        (user({"type": "text"}), "messages.0.content.0.text"),
        (user({"type": "search_result"}), "messages.0.content.0"),
        (user({"type": "mcp_tool_result"}), "messages.0.content.0"),
        (user({}), "messages.0.content.0"),
        (user({"type": "image"}), "messages.0.content.0.source"),
        (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages.0.content.0.source"),
        (user({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}), "messages.0.content.0.source.url"),
        (user({"type": "image", "source": {"type": "base64", "data": "####"}}), "messages.0.content.0.source.data"),
        (user({"type": "document", "source": {"type": "base64", "data": PNG}}), "messages.0.content.0"),
        (user({"type": "tool_result", "content": "x"}), "messages.0.content.0.tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, *ASK["messages"]]},
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": "{}"}]}, *ASK["messages"]]},
            "messages.0.content.0.input",
        ),
    ],
)  # fmt: skip
def test_what_the_policy_could_not_see_is_refused_by_name(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert refused.value.param == where
    assert where in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b'"x"', b"[]", b"\xff", b'{"a": NaN}', b"1"])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="JSON"):
        DIALECT.parse(raw, REPLY)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        user({"type": LONG}),
        user({"type": "image", "source": {"type": LONG}}),
        user({"type": "document", "source": {"type": LONG}}),
        user({"type": {"deep": [LONG]}}),
    ],
)
def test_a_refusal_does_not_repeat_what_it_refuses_at_length(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("depth", [300, 1000])
def test_a_body_that_nests_too_deep_is_refused(depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tools = [{"name": "t", "input_schema": "DEEP"}]
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": "DEEP"}]}
    for fields in ({"tools": tools}, {"messages": [used, *ASK["messages"]]}, {"metadata": "DEEP"}):
        raw = body({**ASK, **fields}).replace(b'"DEEP"', deep.encode())
        for read in (DIALECT.parse, DIALECT.parse_count):
            with pytest.raises(BadRequest, match=r"nests too deep|JSON"):
                read(raw, REPLY)


def test_half_a_surrogate_pair_is_repaired_and_counted() -> None:
    # Clients that cut a tool's output in the middle of a character send this.
    call = DIALECT.parse(
        body(ASK).replace(b'"q"', b'"cut \\ud83d", "b": 1e999, "c": 99999999999999999999999'), REPLY
    )
    assert call.dialogue.messages == (Message("user", "cut \ufffd"),)
    assert "(repaired)" in call.ignored


@settings(max_examples=30)
@given(scripts(), st.data())
def test_the_digest_is_of_the_question_alone(turns: list[User | Assistant], data: st.DataObject) -> None:
    asked = written(turns, "s", data.draw)
    first = DIALECT.parse(body({**asked, "stream": True}), REPLY)
    again = DIALECT.parse(json.dumps(shuffled(asked, data.draw), indent=1).encode(), REPLY)
    assert first.digest == again.digest
    assert (first.stream, again.stream) == (True, False)
    assert DIALECT.parse(body({**asked, "max_tokens": 6}), REPLY).digest != first.digest


@given(scripts(), st.data())
def test_a_damaged_request_is_read_or_refused(turns: list[User | Assistant], data: st.DataObject) -> None:
    asked = {
        **written(turns, "s", data.draw),
        "tools": [BASH],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["x"],
    }
    asked["messages"].append(EVERY_BLOCK)
    wrong = body({"v": damaged(asked, data.draw)})[len(b'{"v": ') : -1]
    for read in (DIALECT.parse, DIALECT.parse_count):
        try:
            read(wrong, REPLY)
        except BadRequest as refused:
            assert str(refused)  # noqa: PT017  # every other error fails


EVERY_BLOCK: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "image", "source": {"type": "base64", "data": PNG}},
        {"type": "document", "source": {"type": "content", "content": [text("a")]}},
        {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [{"type": "tool_reference", "tool_name": "bash"}],
        },
    ],
}


def test_count_tokens() -> None:
    asked = {
        "model": "m",
        "system": "s",
        "tools": [BASH],
        "messages": [*ASK["messages"], {"role": "assistant", "content": "a"}],
    }
    dialogue = DIALECT.parse_count(body(asked), REPLY)
    assert dialogue == Dialogue(
        (Message("system", "s"), Message("user", "q"), Message("assistant", "a")), dialogue.tools
    )
    assert len(dialogue.tools) == 1
    assert MessageTokensCount.model_validate(DIALECT.count_response(7)).input_tokens == 7
