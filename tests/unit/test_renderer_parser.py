"""The parser of sampled turns: whatever is sampled, in whatever portions, it reads one and the same turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture.call import Piece, Reply, Text, Thought
from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.messages import ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.forms import Hermes, ReasoningForm
from pipeline.capture.renderers.parsing import Grammar, StreamParser
from pipeline.capture.renderers.qwen_coder import QwenCoder
from pipeline.capture.renderers.whole_turn import read_call
from pipeline.capture.tokenizer import PolicyTokenizer
from tests.renderer_parts import CALL_MARKS, IM, THINK_MARKS, byte_fallback, byte_level

TOKENIZERS = {
    "tokens": byte_level((*IM, *CALL_MARKS, *THINK_MARKS)),
    "text": byte_level(IM),
    "fallback": byte_fallback((*IM, *CALL_MARKS, *THINK_MARKS)),
    "fallback text": byte_fallback(IM),
}
GRAMMARS = {name: Grammar(t, Hermes(), ReasoningForm()) for name, t in TOKENIZERS.items()}
THINKING = {name: Grammar(t, Hermes(), ReasoningForm(), thinking=True) for name, t in TOKENIZERS.items()}
CALL = '{"name": "look", "arguments": {"what": "a  b"}}'
LOOK = ToolCall("", "look", '{"what": "a  b"}')


def ids_of(tokenizer: PolicyTokenizer, *parts: str) -> list[int]:
    """Marks and other specials as tokens where the vocabulary has them, else as text."""
    ids: list[int] = []
    for part in parts:
        special = tokenizer.special(part)
        ids += tokenizer.encode(part) if special is None else [special]
    return ids


@dataclass
class Read:
    pieces: list[Piece]
    turn: ParsedTurn
    keep: int | None
    stopped_by: str | None
    reasoning_tokens: int


def read(parser: StreamParser, portions: Sequence[Sequence[int]]) -> Read:
    pieces: list[Piece] = []
    keep, before = None, 0
    for portion in portions:
        fed = parser.feed(portion)
        pieces += fed.pieces
        if fed.keep is not None and keep is None:
            keep = before + fed.keep
        before += len(portion)
    last, turn = parser.finish()
    pieces += last
    assert parser.finish() == ((), turn)
    return Read(joined(pieces), turn, keep, parser.stopped_by, parser.reasoning_tokens)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        assert isinstance(piece, ToolCall) or piece.text, "an empty piece"
        last = found[-1] if found else None
        if isinstance(piece, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + piece.text)
        else:
            found.append(piece)
    return found


def whole(grammar: Grammar, *parts: str, **options) -> Read:
    return read(grammar.parser(**options), [ids_of(grammar.tokenizer, *parts)])


fragments = st.sampled_from(
    [
        *CALL_MARKS, *THINK_MARKS, *IM, "<tool", "_call>", "</thi", "nk>", CALL, "{}", "STOP", "ST", "OP", " \n", "\n\n", " ",
        "a", "caf\u00e9", "\U0001f600", "\u3000", "it is 15", "not json",
    ]
)  # fmt: skip


@st.composite
def sampled(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """(vocabulary, tokens, where to cut them): marks as tokens and as text, calls, white space, halves of characters."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    ids: list[int] = []
    for part in draw(st.lists(fragments | st.integers(0, tokenizer.vocab_size + 5), max_size=14)):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += ids_of(tokenizer, part) if draw(st.booleans()) else tokenizer.encode(part)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return name, ids, cuts


@settings(max_examples=600)
@given(
    sampled(),
    st.lists(st.sampled_from(["STOP", "\n\n", "TOP", " it", "\u00e9"]), max_size=2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_portions_of_any_tokens_give_the_same_pieces_which_are_the_turn(
    case, stop, parallel, thinking, forced
):
    name, ids, cuts = case
    grammar = (THINKING if thinking else GRAMMARS)[name]
    options = {
        "stop": stop,
        "parallel": parallel,
        "opening": ids_of(grammar.tokenizer, "<tool_call>") if forced else [],
    }
    at_once = read(grammar.parser(**options), [ids])
    one_by_one = read(grammar.parser(**options), [[token] for token in ids])
    bounds = [0, *cuts, len(ids)]
    in_portions = read(grammar.parser(**options), [ids[a:b] for a, b in itertools.pairwise(bounds)])
    assert at_once == one_by_one == in_portions

    turn = at_once.turn
    assert (
        "".join(p.text for p in at_once.pieces if isinstance(p, Text)) == turn.content == turn.content.strip()
    )
    assert "".join(p.text for p in at_once.pieces if isinstance(p, Thought)) == turn.reasoning.strip()
    assert turn.reasoning == turn.reasoning.strip()
    assert tuple(p for p in at_once.pieces if isinstance(p, ToolCall)) == turn.tool_calls
    kinds = [isinstance(piece, Thought) for piece in at_once.pieces]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    assert 0 <= at_once.reasoning_tokens <= len(ids)
    ended = at_once.stopped_by is not None or (not parallel and bool(turn.tool_calls))
    assert (at_once.keep is not None) == ended
    if at_once.keep is not None:
        # What ended the turn is among the tokens that are kept, and none of it before the last of them.
        kept = read(grammar.parser(**options), [ids[: at_once.keep]])
        assert kept == at_once
        assert read(grammar.parser(**options), [ids[: at_once.keep - 1]]).keep is None
    if not parallel:
        assert len(turn.tool_calls) <= 1


@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")),
)
def test_plain_text_is_shown_as_it_is(name: str, text: str):
    got = read(GRAMMARS[name].parser(), [[token] for token in TOKENIZERS[name].encode(text)])
    assert got.turn == ParsedTurn(text.strip(), (), 0)


@given(st.lists(st.integers(0, 329), max_size=40))
def test_a_byte_level_turn_reads_as_its_tokenizer_decodes_it(ids: list[int]):
    tokenizer = TOKENIZERS["text"]
    got = read(Grammar(tokenizer, None).parser(), [[token] for token in ids])
    assert got.turn.content == tokenizer.decode(ids, keep_special=False).strip()


@given(st.lists(st.sampled_from([*IM, *CALL_MARKS, *THINK_MARKS, "it is", " 15", "\n"]), max_size=12))
def test_no_special_token_is_shown(parts: list[str]):
    for name in ("tokens", "fallback"):
        turn = whole(GRAMMARS[name], *parts).turn
        assert "<" not in turn.content + turn.reasoning


def test_text_that_spells_special_tokens_is_shown():
    tokenizer = TOKENIZERS["tokens"]
    text = "<tool_call> and <|im_end|> and </think>"
    assert read(GRAMMARS["tokens"].parser(), [tokenizer.encode(text)]).turn == ParsedTurn(text, (), 0)


def test_half_a_character_waits_for_its_other_half():
    tokenizer = TOKENIZERS["tokens"]
    ids = tokenizer.encode("a\U0001f600b")
    parser = GRAMMARS["tokens"].parser()
    shown = [parser.feed([token]).pieces for token in ids]
    assert [p for p in shown if p] == [(Text("a"),), (Text("\U0001f600"),), (Text("b"),)]
    assert len(ids) > 4, "the vocabulary has a token a byte"
    cut = GRAMMARS["tokens"].parser()
    cut.feed(ids[:3])
    assert cut.finish()[1].content == "a\ufffd"


def test_text_comes_as_soon_as_it_is_decided():
    grammar = GRAMMARS["text"]
    parser = grammar.parser(stop=["END"])
    feed = lambda text: parser.feed(grammar.tokenizer.encode(text)).pieces  # noqa: E731 - read side by side
    assert feed("\n Let me") == (Text("Let me"),)
    assert feed(" E") == ()
    assert feed("at. ") == (Text(" Eat."),)
    assert feed("<tool_") == ()
    assert feed("box>") == (Text(" <tool_box>"),)
    assert feed("<tool_call>" + CALL) == ()
    assert feed("</tool_call>") == (LOOK,)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_reasoning_then_text_then_calls(name: str):
    got = whole(
        GRAMMARS[name], "<think>", "\nwhy?\n\n", "</think>", "\n\nSo. ", "<tool_call>", CALL, "</tool_call>", "\n",
        "<tool_call>", CALL, "</tool_call>",
    )  # fmt: skip
    assert got.pieces == [Thought("why?"), Text("So."), LOOK, LOOK]
    assert got.turn == ParsedTurn("So.", (LOOK, LOOK), 0, "why?")
    assert got.reasoning_tokens == len(ids_of(TOKENIZERS[name], "<think>", "\nwhy?\n\n", "</think>"))


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_lead_that_opens_the_reasoning(name: str):
    assert whole(THINKING[name], "why", "</think>", "So.").turn == ParsedTurn("So.", (), 0, "why")
    cut = whole(THINKING[name], "why and")
    assert cut.turn == ParsedTurn("", (), 0, "why and")
    assert cut.reasoning_tokens == len(ids_of(TOKENIZERS[name], "why and"))


@pytest.mark.parametrize("name", ["tokens", "fallback"])
def test_a_reasoning_mark_in_mid_turn_is_dropped_and_hides_nothing(name: str):
    assert whole(GRAMMARS[name], "So ", "<think>", "it is", "</think>", ".").turn == ParsedTurn(
        "So it is.", (), 0
    )


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_stop_text_is_cut_and_keeps_the_token_that_completes_it(name: str):
    grammar = GRAMMARS[name]
    head = ids_of(
        grammar.tokenizer,
        "<think>",
        "STOP",
        "</think>",
        "<tool_call>",
        CALL.replace("a  b", "STOP"),
        "</tool_call>",
    )
    ids = [*head, *grammar.tokenizer.encode("one STOP two")]
    got = read(grammar.parser(stop=["STOP"]), [ids])
    assert (got.turn.content, got.stopped_by, len(got.turn.tool_calls)) == ("one", "STOP", 1)
    assert grammar.tokenizer.decode(ids[: got.keep], keep_special=False).endswith("one STOP")
    assert grammar.parser(stop=["STOP"]).feed(ids).keep == got.keep


def test_white_space_after_reasoning_is_no_stop_text():
    got = whole(GRAMMARS["tokens"], "<think>", "why", "</think>", "\n\none\n\ntwo", stop=["\n\n"])
    assert (got.turn.content, got.turn.reasoning, got.stopped_by) == ("one", "why", "\n\n")


def test_of_two_stop_texts_the_one_that_ends_first_counts():
    assert whole(GRAMMARS["text"], "abcd", stop=["bcd", "c"]).stopped_by == "c"
    assert whole(GRAMMARS["text"], "abcd", stop=["c", "abc"]).stopped_by == "abc"


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_without_parallel_calls_the_turn_ends_with_its_first(name: str):
    grammar = GRAMMARS[name]
    bad = ids_of(grammar.tokenizer, "<tool_call>", "not json", "</tool_call>")
    one = ids_of(grammar.tokenizer, "<tool_call>", CALL, "</tool_call>")
    got = read(grammar.parser(parallel=False), [bad + one + one])
    assert got.turn == ParsedTurn("not json", (LOOK,), 1)
    assert got.keep == len(bad + one)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_forced_opening_belongs_to_the_turn_and_is_not_counted(name: str):
    grammar = GRAMMARS[name]
    opening = [*ids_of(grammar.tokenizer, "<tool_call>"), *grammar.tokenizer.encode(Hermes().force("look"))]
    rest = ids_of(grammar.tokenizer, ' {"what": "a  b"}}', "</tool_call>")
    got = read(grammar.parser(opening=opening, parallel=False), [rest])
    assert (got.turn, got.keep) == (ParsedTurn("", (LOOK,), 0), len(rest))


def test_xml_calls_take_their_types_from_the_tool():
    grammar = Grammar(TOKENIZERS["tokens"], QwenCoder())
    body = "\n<function=look>\n<parameter=what>\n12\n</parameter>\n<parameter=deep>\n[1, 2]\n</parameter>\n</function>\n"
    schema = {"type": "object", "properties": {"what": {"type": "string"}, "deep": {"type": "array"}}}
    known = whole(grammar, "<tool_call>", body, "</tool_call>", tools=(Tool("look", "", schema),)).turn
    assert known.tool_calls == (ToolCall("", "look", '{"what": "12", "deep": [1, 2]}'),)
    assert (
        whole(grammar, "<tool_call>", body, "</tool_call>").turn.tool_calls[0].arguments
        == '{"what": 12, "deep": [1, 2]}'
    )
    assert whole(grammar, "<tool_call>", body.replace("</function>", ""), "</tool_call>").turn.malformed == 1


@given(
    st.dictionaries(
        st.text("abc_", min_size=1), st.text("ab <>/\n") | st.integers() | st.lists(st.booleans())
    )
)
def test_xml_calls_are_read_as_they_were_written(arguments: dict):
    kinds = {str: "string", int: "integer", list: "array"}
    properties = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
    call = ToolCall("", "look", json.dumps(arguments))
    read_back = QwenCoder().read(QwenCoder().write(call), (Tool("look", "", {"properties": properties}),))
    assert read_back is not None
    assert json.loads(read_back.arguments) == arguments


def strictly(arguments: str) -> dict:
    """As agents' parsers read it."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    return json.loads(arguments, parse_constant=refuse)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '[1, {"a": -1e999}]'])
def test_a_number_that_json_has_not_never_reaches_an_agent(value: str):
    body = f"\n<function=look>\n<parameter=what>\n{value}\n</parameter>\n</function>\n"
    call = QwenCoder().read(body, ())
    assert call is not None
    assert strictly(call.arguments) == {"what": value}
    # Written anew for its line break.
    assert Hermes().read(f'{{"name": "look", "arguments": {{"a": "1\n2", "what": {value}}}}}', ()) is None
    kept = Hermes().read('{"name": "look", "arguments": {"what": 1e999}}', ())
    assert kept is not None
    assert strictly(kept.arguments)
    for spelled in (f'{{"what": {value}}}', {"what": json.loads(value)}):
        assert read_call(SimpleNamespace(status="ok", name="look", arguments=spelled)) is None


@pytest.mark.parametrize(("depth", "taken"), [(190, True), (230, False)])
def test_arguments_that_no_client_could_send_back_are_no_call(depth: int, taken: bool):
    arguments = '{"what": ' + "[" * depth + "]" * depth + "}"
    body = f"\n<function=look>\n<parameter=what>\n{arguments}\n</parameter>\n</function>\n"
    attempt = SimpleNamespace(status="ok", name="look", arguments=arguments)
    for call in (
        Hermes().read(f'{{"name": "look", "arguments": {arguments}}}', ()),
        QwenCoder().read(body, ()),
        read_call(attempt),
    ):
        assert (call is not None) == taken
        if call is not None:
            used = {"type": "tool_use", "id": "c", "name": "look", "input": json.loads(call.arguments)}
            turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": "go on"}]
            sent = json.dumps({"model": "m", "max_tokens": 1, "messages": turns}).encode()
            assert Anthropic().parse(sent, Reply("s", 0, b"k")).dialogue.messages[0].tool_calls
