"""The renderer's promises: append-only, hostile text stays text, tool calls round-trip, malformed ones are counted."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.renderer import ChatMLRenderer, TemplateError
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.policies import TINY, policy_dir


def byte_level(specials: list[str]) -> PolicyTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user\nassistant\nsystem\ntool\n"], trainer)
    return PolicyTokenizer(backend)


# One policy knows tool-call tokens, the other spells them as text, as SmolLM2 does.
RENDERERS = {
    "tokens": ChatMLRenderer(PolicyTokenizer.load(policy_dir(TINY))),
    "text": ChatMLRenderer(byte_level(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])),
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
        assert renderer.generation_prompt() + sampled + renderer.close_turn(sampled) == renderer.render(
            Message("assistant", text)
        )
        cut = sampled[:-1]
        assert renderer.generation_prompt() + cut + renderer.close_turn(cut) == renderer.render(
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
    assert renderer.preamble((CALCULATOR,), "Be brief.") == renderer.render(
        Message("system", "Be brief."), (CALCULATOR,)
    )


def test_preamble_without_tools_is_the_system_turn_or_nothing(renderer: ChatMLRenderer):
    assert renderer.preamble((), None) == []
    assert renderer.preamble((), "s") == renderer.render(Message("system", "s"))


def test_tools_outside_the_system_turn_are_refused(renderer: ChatMLRenderer):
    with pytest.raises(ValueError, match="role 'user'"):
        renderer.render(Message("user", "x"), (CALCULATOR,))


def test_a_lone_surrogate_is_refused_by_position():
    with pytest.raises(ValueError, match="at character 2"):
        RENDERERS["tokens"].tokenizer.encode("ab\ud800")


def test_a_tokenizer_without_chatml_tokens_is_refused_by_name():
    with pytest.raises(TemplateError, match=re.escape("no special token <|im_end|>")):
        ChatMLRenderer(byte_level(["<|im_start|>"]))


def test_a_tokenizer_that_loses_text_is_refused():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    with pytest.raises(TemplateError, match="does not"):
        ChatMLRenderer(PolicyTokenizer(backend))
