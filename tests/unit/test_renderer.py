"""The renderer's promises: append-only, hostile text stays text, tool calls round-trip, malformed ones are counted."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.capture.call import ToolChoice
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Image, Message, ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.policies import TINY, policy_dir
from tests.renderer_parts import CALL_MARKS, IM, THINK_MARKS, VISION_MARKS, byte_level

# One policy knows tool-call tokens, the other spells them as text, as SmolLM2 does.
RENDERERS = {
    "tokens": ChatMLRenderer(PolicyTokenizer.load(policy_dir(TINY))),
    "text": ChatMLRenderer(byte_level(IM)),
}
CALCULATOR = Tool(
    "calculator", "Evaluates.", {"type": "object", "properties": {"expression": {"type": "string"}}}
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
texts = texts | st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "system\n", "</tool_call>", "<|pad|>", "12", " "])
).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda v: st.lists(v, max_size=3), max_leaves=6
)


@pytest.fixture(params=sorted(RENDERERS))
def renderer(request: pytest.FixtureRequest) -> ChatMLRenderer:
    return RENDERERS[request.param]


def sampled_part(renderer: ChatMLRenderer, message: Message) -> list[int]:
    """The ids that an engine would have sampled for an assistant message: without the header and the last newline."""
    turn = renderer.render(message)
    newline = len(renderer.tokenizer.encode("\n"))
    return turn[len(renderer.generation_prompt()) : -newline]


@given(texts)
def test_text_never_becomes_a_special_token_and_comes_back(text: str):
    for renderer in RENDERERS.values():
        ids = renderer.tokenizer.encode(text)
        assert not renderer.tokenizer.special_ids & set(ids)
        assert renderer.tokenizer.decode(ids, keep_special=False) == text


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), max_size=5))
def test_a_dialogue_has_exactly_its_own_turns_whatever_the_text(turns):
    for renderer in RENDERERS.values():
        start, end = renderer.tokenizer.special("<|im_start|>"), renderer.tokenizer.special("<|im_end|>")
        rendered = [renderer.render(Message(role, text)) for role, text in turns]
        whole = list(itertools.chain.from_iterable(rendered))
        assert [i for i in whole if i in (start, end)] == [start, end] * len(turns)
        assert renderer.tokenizer.decode(whole, keep_special=True) == "".join(
            f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns
        )


@given(texts)
def test_a_sampled_turn_is_closed_as_the_template_renders_it(text: str):
    for renderer in RENDERERS.values():
        sampled = sampled_part(renderer, Message("assistant", text))
        assert renderer.generation_prompt() + sampled + renderer.tail(sampled) == renderer.render(
            Message("assistant", text)
        )
        cut = sampled[:-1]
        assert renderer.generation_prompt() + cut + renderer.tail(cut) == renderer.render(
            Message("assistant", text)
        )


@given(st.dictionaries(texts, values, max_size=3), st.text("abc_-9", min_size=1, max_size=12), st.booleans())
def test_tool_calls_parse_back_as_they_were_written(arguments: dict, name: str, spaced: bool):
    raw = json.dumps(arguments, ensure_ascii=spaced, separators=None if spaced else (",", ":"))
    # The text form cannot tell a close mark inside a string from the one that ends the call.
    names = ["tokens"] if "</tool_call>" in raw else sorted(RENDERERS)
    for kind in names:
        calls = (ToolCall("", name, raw), ToolCall("", "second", "{}"))
        parsed = RENDERERS[kind].parse(sampled_part(RENDERERS[kind], Message("assistant", "", calls)))
        assert (parsed.content, parsed.tool_calls, parsed.malformed) == ("", calls, 0)


def test_text_beside_a_call_is_kept(renderer: ChatMLRenderer):
    call = ToolCall("", "calculator", '{"expression": "1 + 1"}')
    parsed = renderer.parse(sampled_part(renderer, Message("assistant", "Let me see.", (call,))))
    assert parsed.content == "Let me see."
    assert parsed.tool_calls == (call,)


def spelled(renderer: ChatMLRenderer, body: str, close: bool = True) -> list[int]:
    ids: list[int] = []
    for mark in ("<tool_call>", body, "</tool_call>" if close else ""):
        special = renderer.tokenizer.special(mark)
        ids += [special] if special is not None else renderer.tokenizer.encode(mark)
    return ids


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "",
        "[1]",
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "' + "x" * 257 + '", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "x"}',
        '{"name": "x", "arguments": "{}"}',
        '{"name": "x", "arguments": {"v": NaN}}',
        '{"name": "x", "arguments": {}} trailing',
        '{"name": "x", "arguments": ' + '{"a":' * 20_000,
        '{"name": "x", "arguments": {"v": ' + "9" * 5000 + "}}",
    ],
    ids=lambda b: b[:30] or "empty",
)
def test_malformed_calls_are_counted_and_their_text_kept(renderer: ChatMLRenderer, body: str):
    parsed = renderer.parse(spelled(renderer, body))
    assert parsed.tool_calls == ()
    assert parsed.malformed == 1
    assert parsed.content == body


def test_a_call_cut_by_the_length_limit_is_malformed(renderer: ChatMLRenderer):
    parsed = renderer.parse(spelled(renderer, '{"name": "x", "arguments": {}}', close=False))
    assert (parsed.tool_calls, parsed.malformed) == ((), 1)


def test_control_characters_in_arguments_are_accepted_and_escaped_for_strict_readers(
    renderer: ChatMLRenderer,
):
    parsed = renderer.parse(spelled(renderer, '{"name": "write", "arguments": {"text": "a\nb\tc"}}'))
    assert parsed.malformed == 0
    assert json.loads(parsed.tool_calls[0].arguments) == {"text": "a\nb\tc"}


def test_whatever_call_is_parsed_can_be_sent_as_utf8(renderer: ChatMLRenderer):
    (call,) = renderer.parse(spelled(renderer, '{"name": "x", "arguments": {"v": "\n\\ud800"}}')).tool_calls
    call.arguments.encode()
    assert json.loads(call.arguments) == {"v": "\n\ud800"}


def test_the_last_of_repeated_members_counts(renderer: ChatMLRenderer):
    body = '{"arguments": {"v": 1}, "name": "x", "arguments":  {"v":  2} , "more": [1, {"arguments": {}}]}'
    assert renderer.parse(spelled(renderer, body)).tool_calls == (ToolCall("", "x", '{"v":  2}'),)


def test_special_tokens_that_a_policy_samples_are_not_text():
    renderer = RENDERERS["tokens"]
    ids = renderer.tokenizer
    sampled = [
        ids.special("<|pad|>"),
        *ids.encode("hi"),
        ids.special("<|im_start|>"),
        ids.special("</tool_call>"),
        ids.special("<|im_end|>"),
    ]
    parsed = renderer.parse([i for i in sampled if i is not None])
    assert (parsed.content, parsed.tool_calls, parsed.malformed) == ("hi", (), 0)


def test_preamble_holds_system_text_and_every_tool(renderer: ChatMLRenderer):
    text = renderer.tokenizer.decode(renderer.preamble((CALCULATOR,), "Be brief."), keep_special=False)
    assert text.startswith("system\nBe brief.\nTools:\n")
    assert json.loads(text.split("\n")[3])["parameters"] == CALCULATOR.parameters
    assert ("To call a tool" in text) == (renderer.tokenizer.special("<tool_call>") is None)


def test_preamble_without_tools_is_the_system_turn_or_nothing(renderer: ChatMLRenderer):
    assert renderer.preamble((), None) == []
    assert renderer.preamble((), "s") == renderer.render(Message("system", "s"))


def test_steps_are_the_preamble_and_the_turns(renderer: ChatMLRenderer):
    call = ToolCall("c", "calculator", '{"expression": "1 + 1"}')
    messages = (
        Message("system", "Be brief."),
        Message("user", "1 + 1?"),
        Message("assistant", "", (call,)),
        Message("tool", "2", tool_call_id="c"),
        Message("tool", "3", tool_call_id="d"),
        Message("assistant", "2"),
    )
    steps = renderer.steps(Dialogue(messages, (CALCULATOR,)), 0)
    one, two = (renderer.render(message) for message in messages[3:5])
    assert steps[0] == renderer.preamble((CALCULATOR,), "Be brief.")
    assert steps[3] == one + two
    assert [steps[1], steps[2], steps[4]] == [renderer.render(messages[i]) for i in (1, 2, 5)]
    for first in range(1, 6):
        assert renderer.steps(Dialogue(messages, (CALCULATOR,)), first) == steps[first:]
    assert renderer.steps(Dialogue(messages[1:2]), 0) == [[], renderer.render(messages[1])]


def test_a_forced_choice_is_an_opening_that_the_turn_goes_on_from(renderer: ChatMLRenderer):
    prompt, opening = renderer.lead(ToolChoice("required", "calculator"))
    assert prompt == renderer.generation_prompt()
    parser = renderer.parser(opening, parallel=False)
    assert parser.feed(
        spelled(renderer, ' {"expression": "1"}}')[len(spelled(renderer, "", close=False)) :]
    ).keep
    assert parser.finish()[1] == ParsedTurn("", (ToolCall("", "calculator", '{"expression": "1"}'),), 0)
    assert renderer.lead(ToolChoice("required"))[1] == spelled(renderer, "", close=False)
    for free in (ToolChoice(), ToolChoice("none")):
        assert renderer.lead(free) == (prompt, [])


def test_a_result_that_is_an_error_says_so_once(renderer: ChatMLRenderer):
    def told(content: str) -> str:
        ids = renderer.render(Message("tool", content, tool_call_id="c", is_error=True))
        return renderer.tokenizer.decode(ids, keep_special=False)

    assert told("no such file") == "tool\nError:\nno such file\n"
    assert told("Error: no such file") == "tool\nError: no such file\n"
    assert told("") == "tool\nError:\n"


IMAGE = Image("0" * 64, "image/png", b"")


def test_an_image_is_one_pad_between_its_marks():
    renderer = ChatMLRenderer(byte_level((*IM, *CALL_MARKS, *VISION_MARKS)))
    assert renderer.images
    for content in (("look: ", IMAGE, "well?"), (IMAGE,)):
        ids = renderer.render(Message("user", content))
        text = "".join(part if isinstance(part, str) else "".join(VISION_MARKS) for part in content)
        assert renderer.tokenizer.decode(ids, keep_special=True) == f"<|im_start|>user\n{text}<|im_end|>\n"
        assert ids.count(renderer.tokenizer.specials["<|image_pad|>"]) == 1
    failed = renderer.render(Message("tool", (IMAGE,), tool_call_id="c", is_error=True))
    assert "tool\nError:\n<|vision_start|>" in renderer.tokenizer.decode(failed, keep_special=True)


def test_an_image_without_a_token_for_it_is_refused(renderer: ChatMLRenderer):
    assert not renderer.images
    with pytest.raises(ValueError, match="no tokens for images"):
        renderer.render(Message("user", ("look", IMAGE)))
    with pytest.raises(ValueError, match="system text holds an image"):
        renderer.steps(Dialogue((Message("system", (IMAGE,)),)), 0)


def test_reasoning_is_written_where_the_vocabulary_has_its_marks_and_read_back(renderer: ChatMLRenderer):
    thinker = ChatMLRenderer(byte_level((*IM, *CALL_MARKS, *THINK_MARKS)))
    message = Message("assistant", "15", reasoning="12 + 3\n\nis easy")
    parsed = thinker.parse(sampled_part(thinker, message))
    assert parsed == ParsedTurn("15", (), 0, "12 + 3\n\nis easy")
    assert renderer.render(message) == renderer.render(Message("assistant", "15"))
    plain = ChatMLRenderer(byte_level((*IM, *CALL_MARKS, *THINK_MARKS)), thinks=False)
    assert plain.parse(sampled_part(thinker, message)).reasoning == ""


def test_a_lone_surrogate_is_refused_by_position():
    with pytest.raises(ValueError, match="at character 2"):
        RENDERERS["tokens"].tokenizer.encode("ab\ud800")


def test_a_tokenizer_without_chatml_tokens_is_refused_by_name():
    with pytest.raises(TemplateError, match=re.escape("no special token <|im_end|>")):
        ChatMLRenderer(byte_level(IM[:1]))


def test_a_tokenizer_that_loses_text_is_refused():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    with pytest.raises(TemplateError, match="does not"):
        ChatMLRenderer(PolicyTokenizer(backend))
