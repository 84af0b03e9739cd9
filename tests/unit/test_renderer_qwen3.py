"""Qwen3's real tokenizer and template: its template's turns and the package `renderers`' are the same, proven, and read back."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.capture.call import Text, Thought, ToolChoice
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Message, ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import Fed, TemplateError
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.renderers.family import FamilySource
from pipeline.capture.renderers.forms import ReasoningForm
from pipeline.capture.renderers.probe import probe
from pipeline.capture.renderers.suffix import SuffixRenderer
from pipeline.capture.renderers.template import TemplateSource
from tests.qwen3_tokenizer import Unavailable, qwen3_tokenizer

Load = Callable[[str], Any]

needs_package = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("renderers", "httpx")),
    reason="needs the optional packages renderers and httpx: pip install -e .[renderers]",
)
BOTH = [pytest.param("template"), pytest.param("renderers", marks=needs_package)]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    try:
        source = qwen3_tokenizer()
    except Unavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("policies") / "Qwen3-0.6B"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    loaded: dict[str, Any] = {"folder": folder}

    def load(choice: str) -> Any:
        if choice not in loaded:
            loaded[choice] = load_renderer(folder, choice)
        return loaded[choice]

    return load


LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"what": {"type": "string"}}})
CALL = ToolCall("c1", "look", '{"what": "a\\nb"}')
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.lists(
    st.sampled_from(
        ["<|im_end|>", "</think>", "<think>", "<tool_response>", "\n", "  ", "12", "\uf8ff2\uf8ff"]
    ),
    max_size=5,
).map("".join)


@st.composite
def dialogues(draw: st.DrawFn) -> Dialogue:
    messages: list[Message] = [Message("system", draw(texts))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(texts)))
    for i in range(draw(st.integers(0, 3))):
        calls = tuple(
            ToolCall(f"c{i}{k}", "look", json.dumps({"what": draw(texts)}, ensure_ascii=False))
            for k in range(draw(st.integers(0, 2)))
        )
        # The package keeps a first newline of such a turn apart from the header; no answer of ours has one.
        messages.append(Message("assistant", draw(texts).strip(), calls))
        messages += [Message("tool", draw(texts), tool_call_id=call.id, name="look") for call in calls] or [
            Message("user", draw(texts))
        ]
    return Dialogue(tuple(messages), (LOOK,) if draw(st.booleans()) else ())


@needs_package
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(dialogues())
def test_the_template_and_the_package_give_the_same_turns_whatever_the_text(load: Load, dialogue: Dialogue):
    assert load("template").steps(dialogue, 0) == load("renderers").steps(dialogue, 0)


@pytest.mark.parametrize("choice", BOTH)
def test_the_family_is_proven_and_has_its_parsers(load: Load, choice: str):
    renderer = load(choice)
    kind = {"template": TemplateSource, "renderers": FamilySource}[choice]
    assert isinstance(renderer.source, kind)
    assert renderer.family == {"template": "Qwen3-0.6B", "renderers": "qwen3"}[choice]
    assert renderer.stop_token_ids[0] == renderer.tokenizer.special("<|im_end|>")
    assert renderer.reasoning is not None
    assert not renderer.images


@pytest.mark.parametrize("choice", BOTH)
def test_a_dialogue_of_turns(load: Load, choice: str):
    renderer = load(choice)
    messages = (
        Message("system", "S"),
        Message("user", "hi <|im_end|>"),
        Message("assistant", "x", (ToolCall("c1", "look", '{"what":  "a\\nb"}'),), reasoning="why"),
        Message("tool", "r", tool_call_id="c1", name="look", is_error=True),
        Message("tool", "s", tool_call_id="c2", name="look"),
        Message("assistant", "so", reasoning="taken out by the template"),
        Message("system", "mind"),
    )
    steps = renderer.steps(Dialogue(messages), 0)
    assert [renderer.tokenizer.decode(step, keep_special=True) for step in steps] == [
        "<|im_start|>system\nS<|im_end|>\n",
        "<|im_start|>user\nhi <|im_end|><|im_end|>\n",
        '<|im_start|>assistant\n<think>\nwhy\n</think>\n\nx\n<tool_call>\n{"name": "look", "arguments": {"what":  "a\\nb"}}\n'
        "</tool_call><|im_end|>\n",
        "<|im_start|>user\n<tool_response>\nError:\nr\n</tool_response>\n<tool_response>\ns\n</tool_response><|im_end|>\n",
        "<|im_start|>assistant\nso<|im_end|>\n",
        "<|im_start|>system\nmind<|im_end|>\n",
    ]
    assert steps[1].count(renderer.stop_token_ids[0]) == 1


@pytest.mark.parametrize("choice", BOTH)
def test_a_sampled_turn_is_read_and_forced_choices_go_on(load: Load, choice: str):
    renderer = load(choice)
    encode, mark = renderer.tokenizer.encode, renderer.mark
    body = encode('\n{"name": "look", "arguments": {"what": "a\\nb"}}\n')
    parser = renderer.parser()
    shown = [
        piece
        for token in [
            *(
                *mark("<think>"),
                *encode("\nhm\n"),
                *mark("</think>"),
                *encode("\n\nLet me see \U0001f600.\n"),
            ),
            *(*mark("<tool_call>"), *body, *mark("</tool_call>"), renderer.stop_token_ids[0]),
        ]
        for piece in parser.feed([token]).pieces
    ]
    call = ToolCall("", CALL.name, CALL.arguments)
    assert parser.finish() == ((), ParsedTurn("Let me see \U0001f600.", (call,), 0, "hm"))
    assert len(shown) > 4
    opening = renderer.lead(ToolChoice("required", "look"))[1]
    forced = renderer.parser(opening)
    forced.feed([*encode(' {"what": "a\\nb"}}\n'), *mark("</tool_call>")])
    assert forced.finish()[1] == ParsedTurn("", (call,), 0)


@needs_package
def test_the_packages_own_parser_reads_the_same(load: Load):
    renderer = load("renderers")
    source = cast(FamilySource, renderer.source)
    turn = source.turn((Message("assistant", "Let me see.", (CALL, CALL), reasoning="hm"),), True)
    sampled = turn[len(renderer.lead(ToolChoice())[0]) : -1]
    parser = renderer.parser()
    parser.feed(sampled)
    ours, theirs = parser.finish()[1], source.package.parse_response(sampled)
    assert (theirs.content.strip(), theirs.reasoning_content.strip()) == (ours.content, ours.reasoning)
    assert [(c.name, c.arguments) for c in theirs.tool_calls] == [
        (c.name, json.loads(c.arguments)) for c in ours.tool_calls
    ]


@needs_package
def test_what_the_package_reads_shows_no_special_token(load: Load):
    source = cast(FamilySource, load("renderers").source)
    renderer = SuffixRenderer(source, None, ReasoningForm(), reader=source.reader())
    encode, mark = renderer.tokenizer.encode, renderer.mark
    start = mark("<|im_start|>")

    def read(*ids: list[int]) -> ParsedTurn:
        parser = renderer.parser()
        parser.feed([token for part in ids for token in part])
        return parser.finish()[1]

    assert read(encode("a"), start, encode("b <|im_end|>")).content == "ab <|im_end|>"
    thought = read(mark("<think>"), encode("a"), start, encode("b"), mark("</think>"), encode("c"))
    assert (thought.reasoning, thought.content) == ("ab", "c")
    broken = read(mark("<tool_call>"), encode("not json"), mark("</tool_call>"))
    assert (broken.content, broken.malformed) == ("not json", 1)


@needs_package
def test_a_turn_that_the_package_fails_over_is_shown_as_text(load: Load, monkeypatch: pytest.MonkeyPatch):
    source = cast(FamilySource, load("renderers").source)
    renderer = SuffixRenderer(source, None, ReasoningForm(), reader=source.reader())

    def fails(*given: Any, **more: Any) -> Any:
        raise IndexError("list index out of range")

    monkeypatch.setattr(source.package, "parse_response", fails)
    parser = renderer.parser()
    parser.feed([*renderer.mark("<tool_call>"), *renderer.tokenizer.encode("a b")])
    assert parser.finish()[1] == ParsedTurn("a b", (), 1)


@needs_package
def test_special_tokens_without_end_are_not_read_anew_each_time(load: Load, monkeypatch: pytest.MonkeyPatch):
    source = cast(FamilySource, load("renderers").source)
    renderer = SuffixRenderer(source, None, ReasoningForm(), reader=source.reader())
    read: list[int] = []
    parse = source.package.parse_response

    def counted(ids: list[int], **more: Any) -> Any:
        read.append(len(ids))
        return parse(ids, **more)

    monkeypatch.setattr(source.package, "parse_response", counted)
    endless = renderer.mark("<|im_start|>") * 5000
    parser = renderer.parser(parallel=False)
    assert parser.feed(endless).keep is None
    assert sum(read) < 20 * len(endless)


@needs_package
def test_a_family_without_a_form_of_ours_is_read_by_the_package(load: Load):
    source = cast(FamilySource, load("renderers").source)
    renderer = SuffixRenderer(source, None, ReasoningForm(), reader=source.reader())
    probe(renderer)
    encode, mark = renderer.tokenizer.encode, renderer.mark
    call = [
        *mark("<tool_call>"),
        *encode('{"name": "look", "arguments": {"what": "a\\nb"}}'),
        *mark("</tool_call>"),
    ]
    ids = [*mark("<think>"), *encode("hm"), *mark("</think>"), *encode("one STOP two"), *call, *call]
    found = ToolCall("", CALL.name, CALL.arguments)
    parser = renderer.parser()
    assert parser.feed(ids) == Fed(())
    pieces, turn = parser.finish()
    assert pieces == (Thought("hm"), Text("one STOP two"), found, found)
    assert turn == ParsedTurn("one STOP two", (found, found), 0, "hm")

    first = renderer.parser(parallel=False)
    assert first.feed(ids).keep == len(ids) - len(call)
    assert first.finish()[1].tool_calls == (found,)
    stopped = renderer.parser(stop=["STOP"])
    keep = stopped.feed(ids).keep
    assert renderer.tokenizer.decode(ids[:keep], keep_special=False).endswith("one STOP")
    assert (stopped.finish()[1].content, stopped.stopped_by) == ("one", "STOP")

    broken = renderer.parser()
    broken.feed([*mark("<tool_call>"), *encode("not json"), *mark("</tool_call>")])
    assert broken.finish()[1].malformed == 1
    with pytest.raises(ValueError, match="none can be forced"):
        renderer.lead(ToolChoice("required"))


@needs_package
def test_a_policy_with_a_template_of_its_own_is_not_its_namesake(load: Load, tmp_path: Path):
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    for path in qwen3_tokenizer().iterdir():
        (folder / path.name).symlink_to(path)
    source = json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]
    (folder / "chat_template.jinja").write_text(source.replace("# Tools", "# My tools"))
    with pytest.raises(TemplateError, match="differently from the chat template"):
        load_renderer(folder, "renderers:qwen3")
    assert isinstance(cast(SuffixRenderer, load_renderer(folder)).source, TemplateSource)


@needs_package
def test_a_bridge_to_other_turns_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch):
    folder = load("folder")
    family = importlib.import_module("renderers.qwen3").Qwen3Renderer
    bridge = family.bridge_to_next_turn

    def other(self, *given, **named):
        bridged = bridge(self, *given, **named)
        if bridged is not None:
            bridged.token_ids.append(198)
        return bridged

    monkeypatch.setattr(family, "bridge_to_next_turn", other)
    with pytest.raises(TemplateError, match="qwen3: the turns differ from those that the package"):
        load_renderer(folder, "renderers:qwen3")


@needs_package
def test_the_package_bridges_to_the_same_turns(load: Load):
    renderer = load("renderers")
    source = cast(FamilySource, renderer.source)
    asked = Dialogue((Message("user", "Look."),), (LOOK,))
    prompt = [*(t for step in renderer.steps(asked, 0) for t in step), *renderer.lead(ToolChoice())[0]]
    sampled = [*renderer.mark("<think>"), *renderer.tokenizer.encode("\nhm\n"), *renderer.mark("</think>")]
    sampled += [*renderer.tokenizer.encode("\n\n"), *renderer.mark("<tool_call>")]
    sampled += [
        *renderer.tokenizer.encode('\n{"name": "look", "arguments": {}}\n'),
        *renderer.mark("</tool_call>"),
    ]
    results = [Message("tool", text, tool_call_id="c1", name="look") for text in ("one", "two\n")]
    wired = [{"role": "tool", "content": m.text, "tool_call_id": "c1", "name": "look"} for m in results]
    for ids in (sampled, [*sampled, renderer.stop_token_ids[0]]):
        bridged = source.package.bridge_to_next_turn(prompt, ids, wired)
        assert bridged is not None
        answered = source.turn(results, True)
        ours = [*prompt, *ids, *renderer.tail(ids), *answered, *renderer.lead(ToolChoice())[0]]
        assert ours == bridged.token_ids


@needs_package
@pytest.mark.parametrize("family", ["llama-3", "prime-qwen3", "nothing"])
def test_a_family_that_does_not_fit_is_refused_by_name(load: Load, family: str):
    with pytest.raises(TemplateError, match=f"{family}: (?s:.*)Remedy"):
        load(f"renderers:{family}")


@needs_package
def test_of_families_with_one_name_the_one_that_the_template_proves_is_taken(load: Load):
    assert load("auto").family == "qwen3"
