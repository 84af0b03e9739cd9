"""The Responses dialect's requests as dialogues."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as SdkResponse

from pipeline.capture.call import Answer, BadRequest, Call, Reply, ToolChoice
from pipeline.capture.dialects.responses import Responses
from pipeline.capture.dialogue import steps
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
    sent,
    shuffled,
)

DIALECT = Responses()
ASK: dict[str, Any] = {"model": "m", "input": "q"}
BASH = {
    "type": "function",
    "name": "bash",
    "description": "runs",
    "parameters": {"type": "object"},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{**BASH, "name": "spawn"}, PATCH],
}
USER = {"role": "user", "content": "q"}


def parse(reply: Reply = REPLY, **fields: Any) -> Call:
    return DIALECT.parse(body({**ASK, **fields}), reply)


def messages(*items: Any, **fields: Any) -> tuple[Message, ...]:
    return parse(input=list(items), **fields).dialogue.messages


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        **fields,
    }


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": "{}", **fields}


def returned(name: str, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": output}


def written(turns: list[User | Assistant], system: str, draw: Any) -> dict[str, Any]:
    """The dialogue as a request, in one of the ways in which a client may write it."""

    def content(text: str, kind: str = "input_text") -> Any:
        if draw(st.booleans()):
            return text
        return [{"type": kind, "text": part, "annotations": []} for part in cut(text, draw)]

    items: list[dict[str, Any]] = []
    for n, turn in enumerate(turns):
        if isinstance(turn, User):
            items += [
                {"type": "function_call_output", "call_id": name, "output": content(text)}
                for name, text, _ in turn.results
            ]
            if turn.text is not None:
                item = {"role": "user", "content": content(turn.text)}
                items.append({"type": "message", **item} if draw(st.booleans()) else item)
            continue
        ours = {"id": f"{{}}_{n:032x}"} if draw(st.booleans()) else {}

        def name(kind: str, ours: dict[str, str] = ours) -> dict[str, str]:
            return {key: value.format(kind) for key, value in ours.items()}

        if draw(st.booleans()):
            items.append(
                {"type": "reasoning", "summary": [], "encrypted_content": "gAAAforeign", **name("rs")}
            )
        items.append({**said("", **name("msg")), "content": content(turn.text, "output_text")})
        items += [
            {
                "type": "function_call",
                "call_id": call,
                "name": tool,
                "arguments": json.dumps(given),
                **name("fc"),
            }
            for call, tool, given in turn.calls
        ]
    asked: dict[str, Any] = {"model": "m", "input": items}
    if system:
        how = draw(st.sampled_from(["instructions", "developer", "system"]))
        if how == "instructions":
            asked["instructions"] = system
        else:
            items.insert(0, {"role": how, "content": content(system)})
    return shuffled(asked, draw)


@given(scripts(), st.text(max_size=5).filter(lambda s: s.isprintable()), st.data())
def test_what_a_client_may_rewrite_makes_no_difference(
    turns: list[User | Assistant], system: str, data: st.DataObject
) -> None:
    first, second = (DIALECT.parse(body(written(turns, system, data.draw)), REPLY).dialogue for _ in range(2))
    assert first == second
    texts = [turn.text for turn in turns if isinstance(turn, Assistant)]
    assert [m.text for m in first.messages if m.role == "assistant"] == texts
    calls = [len(turn.calls) for turn in turns if isinstance(turn, Assistant)]
    assert [len(m.tool_calls) for m in first.messages if m.role == "assistant"] == calls
    assert [s.prompt_key for s in steps(first)] == [s.prompt_key for s in steps(second)]


def test_a_request_of_every_kind_of_item() -> None:
    picture = {"type": "input_image", "detail": "auto", "image_url": f"data:image/jpeg;base64,{PNG}"}
    call = parse(
        instructions="Be brief.",
        tools=[BASH, PATCH, AGENTS, {"type": "web_search"}, {"type": "local_shell"}],
        stream=True,
        max_output_tokens=7,
        input=[
            {"role": "developer", "content": "More."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "look "}, picture],
            },
            {"type": "reasoning", "summary": [], "encrypted_content": sealed("hm")},
            said("I run"),
            called("c1"),
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'a "b"\n'},
            called("c3", name="spawn", namespace="agents"),
            returned("c1", [{"type": "input_text", "text": "ok"}, picture]),
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            returned("c3"),
            {"role": "system", "content": "a reminder"},
        ],
    )
    image = call.dialogue.messages[1].images[0]
    assert image.media_type == "image/png"
    assert call.dialogue.messages == (
        Message("system", "Be brief.\nMore."),
        Message("user", ("look ", image)),
        Message(
            "assistant",
            "I run",
            (
                ToolCall("c1", "bash", "{}"),
                ToolCall("c2", "apply_patch", '{"input":"a \\"b\\"\\n"}'),
                ToolCall("c3", "agents.spawn", "{}"),
            ),
            reasoning="hm",
        ),
        Message("tool", ("ok", image), tool_call_id="c1", name="bash"),
        Message("tool", "done", tool_call_id="c2", name="apply_patch"),
        Message("tool", "ok", tool_call_id="c3", name="agents.spawn"),
        Message("system", "a reminder"),
    )
    assert [tool.name for tool in call.dialogue.tools] == [
        "bash",
        "apply_patch",
        "agents.spawn",
        "agents.apply_patch",
    ]
    free = call.dialogue.tools[1].parameters
    assert free["required"] == ["input"]
    assert free["properties"]["input"]["description"] == "Text of this lark grammar:\nstart: X"
    assert call.ignored == ("tools.local_shell", "tools.web_search")
    assert (call.stream, call.max_tokens, call.parallel) == (True, 7, True)


def sealed(reasoning: str, reply: Reply = REPLY) -> str:
    answer = Answer(1, "", (), "stop", 0, 1, 1, reasoning)
    return DIALECT.response(parse(reply), answer, reply)["output"][0]["encrypted_content"]


def test_reasoning_that_is_not_ours_is_left_out_and_counted() -> None:
    other = Reply("s2", 0, b"o" * 32)
    mine = sealed("hm")
    signature, _, text = mine.partition(".")
    foreign = [
        sealed("hm", other),
        f"{signature}.aG8=",
        f"{signature}x.{text}",
        f"{signature}.\u00e4",
        "gAAAA",
        None,
    ]
    items = [{"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": one} for one in foreign]
    call = parse(input=[*items, said("t"), USER])
    assert call.dialogue.messages == (Message("assistant", "t"), Message("user", "q"))
    assert call.ignored == ("input.reasoning",)


ONE, TWO = "1" * 32, "2" * 32


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # Without ids: the order that an answer has tells.
        ([said("a"), called("c")], [("a", ["c"])]),
        ([called("c"), called("d")], [("", ["c", "d"])]),
        ([said("a"), said("b")], [("a", []), ("b", [])]),
        ([called("c"), said("a")], [("", ["c"]), ("a", [])]),
        ([said("a"), {"type": "reasoning", "summary": []}, said("b")], [("a", []), ("b", [])]),
        # With ours: they do.
        ([said("a", id=f"msg_{ONE}"), said("b", id=f"msg_{ONE}")], [("ab", [])]),
        ([said("a", id=f"msg_{ONE}"), called("c", id=f"fc_{TWO}_0")], [("a", []), ("", ["c"])]),
        # A cut turn's finished items are kept, and the next turn follows without a user in between.
        ([said("a", id=f"msg_{ONE}"), said("b", id=f"msg_{TWO}"), called("c", id=f"fc_{TWO}_0")], [("a", []), ("b", ["c"])]),
        # Ids that are not ours say nothing.
        ([said("a", id="msg_01a22cb6-6615-7860"), called("c", id="fc_x")], [("a", ["c"])]),
        ([said("a", id=f"msg_{ONE}"), called("c")], [("a", ["c"])]),
        # Results between a turn's calls.
        (
            [called("c", id=f"fc_{ONE}_0"), returned("c"), called("d", id=f"fc_{ONE}_1"), returned("d")],
            [("", ["c", "d"]), "c", "d"],
        ),
        ([called("c"), returned("c"), called("d"), returned("d")], [("", ["c"]), "c", ("", ["d"]), "d"]),
        ([called("c", id=f"fc_{ONE}_0"), USER, called("d", id=f"fc_{ONE}_1")], [("", ["c"]), None, ("", ["d"])]),
    ],
)  # fmt: skip
def test_items_of_one_turn_are_one_message(items: list[Any], expected: list[Any]) -> None:
    found = [
        (m.text, [c.id for c in m.tool_calls]) if m.role == "assistant" else m.tool_call_id
        for m in messages(*items)
    ]
    assert found == expected


def test_what_has_no_effect_is_accepted_and_counted() -> None:
    call = parse(
        store=True,
        include=["reasoning.encrypted_content"],
        metadata={},
        client_metadata={"a": "b"},
        prompt_cache_key="k",
        reasoning={"effort": "high"},
        text={"verbosity": "low", "format": {"type": "text"}},
        truncation="auto",
        temperature=0.5,
        invented_tomorrow=1,
        parallel_tool_calls=False,
    )
    assert call.ignored == (
        "client_metadata",
        "invented_tomorrow",
        "metadata",
        "prompt_cache_key",
        "reasoning",
        "store",
        "temperature",
        "text.verbosity",
        "truncation",
    )
    assert not call.parallel


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "bash"}, ToolChoice("required", "bash")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", "apply_patch")),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            ToolChoice("required", "agents.spawn"),
        ),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    call = parse(tools=[BASH, PATCH, AGENTS], tool_choice=choice)
    assert call.tool_choice == expected
    made = DIALECT.response(call, Answer(1, "a", (), "stop", 0, 1, 1), REPLY)
    assert (
        SdkResponse.model_validate(sent(made)).model_dump()["tool_choice"] == choice or "namespace" in choice
    )


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": LONG},
        {"tool_choice": {"type": LONG}},
        {"tool_choice": {"type": "function", "name": LONG}},
        {"input": [{"type": LONG}]},
        {"input": [{"type": "item_reference", "id": LONG}]},
        {"input": [{"role": "user", "content": [{"type": LONG}]}]},
    ],
)
def test_a_refusal_does_not_repeat_what_it_refuses_at_length(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"model": None}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": {"type": "function", "name": "edit"}}, "tool_choice.name"),
        ({"tools": [BASH], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tools": [BASH], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
        ({"tools": [BASH, BASH]}, "tools.1.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name"),
        ({"input": [{"id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "local_shell_call"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "n"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output"),
        ({"input": [{"role": "tool", "content": "c"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input.0.content.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]},
            "input.0.content.0.image_url",
        ),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}]}]},
            "input.0.content",
        ),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert refused.value.param in (where, f"{where}.str", f"{where}.name")
    assert where.rpartition(".")[0] in str(refused.value)


@settings(max_examples=30)
@given(scripts(), st.data())
def test_the_digest_is_of_the_question_alone(turns: list[User | Assistant], data: st.DataObject) -> None:
    asked = {**written(turns, "s", data.draw), "client_metadata": {"a": "1", "b": "2"}}
    streaming = {"stream": True, "stream_options": {"include_obfuscation": False}}
    first = DIALECT.parse(body({**asked, **streaming}), REPLY)
    again = DIALECT.parse(json.dumps(shuffled(asked, data.draw), indent=1).encode(), REPLY)
    assert first.digest == again.digest
    assert (first.stream, again.stream) == (True, False)
    assert DIALECT.parse(body({**asked, "max_output_tokens": 6}), REPLY).digest != first.digest


@given(scripts(), st.data())
def test_a_damaged_request_is_read_or_refused(turns: list[User | Assistant], data: st.DataObject) -> None:
    asked = {**written(turns, "s", data.draw), "tools": [BASH, PATCH, AGENTS], "tool_choice": "auto"}
    asked["input"] += [
        {
            "type": "custom_tool_call",
            "call_id": "c2",
            "name": "apply_patch",
            "input": "x",
            "namespace": "agents",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}]},
    ]
    wrong = body({"v": damaged(asked, data.draw)})[len(b'{"v": ') : -1]
    try:
        DIALECT.parse(wrong, REPLY)
    except BadRequest as refused:
        assert str(refused)  # noqa: PT017  # every other error fails
