"""Chat templates turn by turn: proven against their own renderings of whole dialogues, refused by name where they rewrite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.capture.call import ToolChoice
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Image, Message, ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.renderers.forms import Hermes, ReasoningForm
from pipeline.capture.renderers.guard import Guard
from pipeline.capture.renderers.suffix import SuffixRenderer
from pipeline.engines.policies import TINY, policy_dir
from tests.renderer_parts import CALL_MARKS, IM, THINK_MARKS, VISION_MARKS, policy

CALLS = """
{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
XML_CALLS = """
{%- for call in message.tool_calls %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}"""
TOOLS = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
TURNS = """
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ CONTENT }}{{ CALLS }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>tool
{{ message.content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}"""
PROMPT = """
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
VOCABULARY = (*IM, *CALL_MARKS, *THINK_MARKS)


def template(
    content: str = "message.content", calls: str = CALLS, prompt: str = PROMPT, bos: str = ""
) -> str:
    turns = TURNS.replace("{{ CONTENT }}", "{{ " + content + " }}").replace("{{ CALLS }}", calls)
    return bos + TOOLS + turns + prompt


def made(folder: Path, source: str, **options: str) -> SuffixRenderer:
    """The vocabulary does not call the marks of calls and reasoning special, as Qwen's does not."""
    directory = policy(folder / "probed", source, IM, (*CALL_MARKS, *THINK_MARKS), eos="<|im_end|>")
    return cast(SuffixRenderer, load_renderer(directory, "template", **options))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> SuffixRenderer:
    return made(tmp_path_factory.mktemp("plain"), template())


LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"what": {"type": "string"}}})
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.lists(
    st.sampled_from([*VOCABULARY, "\uf8ff", "\uf8f0", "\uf8ff4\uf8ff", "\n", "\\u003c|im_end|>", " a "]),
    max_size=6,
).map("".join)


@st.composite
def dialogues(draw: st.DrawFn, hostile: bool) -> Dialogue:
    text = texts if hostile else st.text("ab \n{}\u00e9", max_size=12)
    messages: list[Message] = [Message("system", draw(text))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(text)))
    for i in range(draw(st.integers(0, 3))):
        calls = tuple(
            ToolCall(f"c{i}{k}", "look", json.dumps({"what": draw(text), draw(text): [1, None]}))
            for k in range(draw(st.integers(0, 2)))
        )
        messages.append(Message("assistant", draw(text), calls))
        messages += [
            Message("tool", draw(text), tool_call_id=call.id, name="look", is_error=draw(st.booleans()))
            for call in calls
        ] or [Message("user", draw(text))]
    return Dialogue(tuple(messages), (LOOK,) if draw(st.booleans()) else ())


def rendered(renderer: SuffixRenderer, dialogue: Dialogue) -> list[int]:
    steps = renderer.steps(dialogue, 0)
    return [*(token for step in steps for token in step), *renderer.lead(ToolChoice())[0]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(dialogues(hostile=False))
def test_turns_put_together_are_the_templates_own_rendering(plain: SuffixRenderer, dialogue: Dialogue):
    assert rendered(plain, dialogue) == plain.source.whole(dialogue.messages, dialogue.tools)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(dialogues(hostile=True))
def test_hostile_text_stays_text_and_comes_back(plain: SuffixRenderer, dialogue: Dialogue):
    ids = rendered(plain, dialogue)
    turns = len(dialogue.messages) + (dialogue.messages[0].role != "system" and bool(dialogue.tools))
    calls = sum(len(message.tool_calls) for message in dialogue.messages)
    count = {mark: ids.count(plain.tokenizer.specials[mark]) for mark in VOCABULARY}
    assert (count["<|im_start|>"], count["<|im_end|>"]) == (turns + 1, turns)
    assert (count["<tool_call>"], count["</tool_call>"]) == (calls, calls)
    assert not count["<think>"] + count["</think>"] + count["<|endoftext|>"]
    text = plain.tokenizer.decode(ids, keep_special=True)
    assert all(message.text in text for message in dialogue.messages)


@given(dialogues(hostile=False), st.integers(0, 8))
def test_only_the_steps_that_are_asked_for_are_rendered(
    plain: SuffixRenderer, dialogue: Dialogue, first: int
):
    assert plain.steps(dialogue, first) == plain.steps(dialogue, 0)[first:]


def test_what_a_step_costs_does_not_grow_with_the_dialogue(
    plain: SuffixRenderer, monkeypatch: pytest.MonkeyPatch
):
    encoded: list[int] = []
    encode = plain.tokenizer.encode
    monkeypatch.setattr(plain.tokenizer, "encode", lambda text: encoded.append(len(text)) or encode(text))
    messages = [Message("user", "What is 12 + 3?"), Message("assistant", "It is 15.")] * 64
    costs: list[int] = []
    for turn in range(2, len(messages), 2):
        encoded.clear()
        plain.steps(Dialogue(tuple(messages[: turn + 1])), turn + 1)
        costs.append(sum(encoded))
    assert len(set(costs)) == 1


def test_a_turn_is_sampled_read_and_closed(plain: SuffixRenderer):
    call = ToolCall("", "look", '{"what":  "a"}')
    turn = plain.source.turn((Message("assistant", "So.", (call,)),), True)
    prompt, opening = plain.lead(ToolChoice())
    newline = plain.tokenizer.encode("\n")
    sampled = turn[len(prompt) : -len(newline)]
    assert plain.tail(sampled) == newline
    assert plain.tail(sampled[:-1]) == [sampled[-1], *newline]
    parser = plain.parser(opening)
    parser.feed(sampled)
    assert parser.finish()[1] == ParsedTurn("So.", (call,), 0)
    assert plain.stop_token_ids[0] == sampled[-1]


def test_a_forced_choice_begins_as_the_template_writes_a_call(plain: SuffixRenderer):
    opening = plain.lead(ToolChoice("required", "look"))[1]
    turn = plain.source.turn((Message("assistant", "", (ToolCall("", "look", "{}"),)),), True)
    text = plain.tokenizer.decode(turn, keep_special=True)
    assert plain.tokenizer.decode(opening, keep_special=True) + " {}}" in text


def test_a_template_that_opens_the_reasoning(tmp_path: Path):
    renderer = made(tmp_path, template(prompt=PROMPT.replace("{% endif %}", "<think>\n{% endif %}")))
    parser = renderer.parser()
    parser.feed(
        [*renderer.tokenizer.encode("why"), *renderer.mark("</think>"), *renderer.tokenizer.encode("So.")]
    )
    assert parser.finish()[1] == ParsedTurn("So.", (), 0, "why")
    forced = renderer.parser(renderer.lead(ToolChoice("required"))[1])
    forced.feed(
        [*renderer.tokenizer.encode('{"name": "look", "arguments": {}}'), *renderer.mark("</tool_call>")]
    )
    assert forced.finish()[1] == ParsedTurn("", (ToolCall("", "look", "{}"),), 0)


def test_a_template_that_closes_the_reasoning_before_the_turn(tmp_path: Path):
    renderer = made(
        tmp_path, template(prompt=PROMPT.replace("{% endif %}", "<think>\n\n</think>\n\n{% endif %}"))
    )
    parser = renderer.parser()
    parser.feed(renderer.tokenizer.encode("So."))
    assert parser.finish()[1] == ParsedTurn("So.", (), 0)


def test_what_a_template_trims_is_trimmed(tmp_path: Path):
    renderer = made(tmp_path, template().replace("message.content }}", "message.content | trim }}"))
    ids = renderer.source.turn((Message("user", "  a \n"),), False)
    assert renderer.tokenizer.decode(ids, keep_special=True) == "<|im_start|>user\na<|im_end|>\n"


def test_the_form_of_calls_is_found_by_what_the_template_writes(tmp_path: Path):
    renderer = made(tmp_path, template(calls=XML_CALLS))
    opening = renderer.lead(ToolChoice("required", "look"))[1]
    assert renderer.tokenizer.decode(opening, keep_special=True) == "<tool_call>\n<function=look>"
    with pytest.raises(TemplateError, match="not read back"):
        made(tmp_path, template(calls=XML_CALLS), tool_parser="hermes")


class Loud(Hermes):
    """A form of one's own: never reads a call."""

    def read(self, body, tools):
        return None


def test_parsers_are_plugged_in_by_name_and_held_to_the_template(tmp_path: Path):
    mine = f"{__name__}:Loud"
    with pytest.raises(TemplateError, match=r"probed: a turn that its chat template writes is not read back"):
        made(tmp_path, template(), tool_parser=mine)
    assert made(tmp_path, template(), reasoning_parser="none").reasoning is None
    assert isinstance(made(tmp_path, template(), reasoning_parser="think").reasoning, ReasoningForm)
    with pytest.raises(ValueError, match=r"engine\.tool_parser is 'nothing'"):
        made(tmp_path, template(), tool_parser="nothing")
    with pytest.raises(ValueError, match="cannot be loaded"):
        made(tmp_path, template(), tool_parser=f"{__name__}:Nothing")


@pytest.mark.parametrize(
    ("source", "promise"),
    [
        # It numbers its turns.
        (template().replace("<|im_start|>{{ message.role }}\n", "<|im_start|>{{ message.role }}{{ messages | length }}\n"),
         "rewrites|not append-only"),
        # It keeps only the last question in full.
        (template().replace("{{ message.content }}<|im_end|>\n{% endif %}",
                            "{{ message.content if loop.last else message.content[:3] }}<|im_end|>\n{% endif %}"),
         "rewrites|not append-only|leaves out"),
        (template(content="message.content if loop.last else '(cut)'"), "leaves out"),
        # A turn of the policy has no end of its own.
        (template().replace("{{ CALLS }}", "").replace("</tool_call>{% endfor %}<|im_end|>\n", "</tool_call>{% endfor %}\n"),
         "nothing would tell where a sampled turn ends"),
        (template(prompt=PROMPT.replace("assistant", "model")), "goes on with|not how"),
        (template(prompt=PROMPT.replace("{% endif %}", "Sure: {% endif %}")), "goes on with 'Sure: '"),
        (template(content="message.content | upper"), "not how its chat template renders that turn"),
        ("{% for message in messages %}{{ raise_exception('no such role') }}{% endfor %}", "no such role"),
        ("{% if %}", "not valid"),
        # It writes the system text into the first user's turn.
        (template().replace("<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n", "").replace(
            "{{ message.role }}\n",
            "{{ message.role }}\n{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"),
         "first user's turn"),
    ],
)  # fmt: skip
def test_a_template_that_breaks_a_promise_is_refused_by_name(tmp_path: Path, source: str, promise: str):
    with pytest.raises(TemplateError, match=promise) as refused:
        made(tmp_path, source)
    assert "probed" in str(refused.value)


def test_tools_that_a_template_does_not_show_are_refused(tmp_path: Path):
    renderer = made(
        tmp_path,
        template().replace("{% if tools %}", "{% if false %}").replace("{%- if tools %}", "{%- if false %}"),
    )
    assert renderer.steps(Dialogue((Message("user", "a"),)), 0)
    with pytest.raises(ValueError, match="does not show tools"):
        renderer.steps(Dialogue((Message("user", "a"),), (LOOK,)), 0)


def test_images_where_the_template_has_them(tmp_path: Path):
    content = """{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}"""
    source = template().replace(
        "{{ message.content }}<|im_end|>\n{% endif %}", content + "<|im_end|>\n{% endif %}"
    )
    folder = policy(
        tmp_path / "seeing", source, (*IM, *VISION_MARKS), (*CALL_MARKS, *THINK_MARKS), eos="<|im_end|>"
    )
    renderer = load_renderer(folder)
    assert renderer.images
    image = Image("0" * 64, "image/png", b"")
    _, turn = renderer.steps(Dialogue((Message("user", ("a <|image_pad|> ", image, "b")),)), 0)
    text = cast(SuffixRenderer, renderer).tokenizer.decode(turn, keep_special=True)
    assert (
        text == "<|im_start|>user\na <|image_pad|> <|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n"
    )
    assert not made(tmp_path, template()).images


def test_a_directory_without_a_template_is_chatml(tmp_path: Path):
    assert isinstance(load_renderer(policy_dir(TINY)), ChatMLRenderer)
    with pytest.raises(TemplateError, match="has no chat template"):
        load_renderer(policy_dir(TINY), "template")
    with pytest.raises(ValueError, match=r"engine\.renderer is 'nothing'"):
        load_renderer(policy_dir(TINY), "nothing")
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        load_renderer(tmp_path)


def test_a_template_file_counts_before_the_tokenizers_configuration(tmp_path: Path):
    folder = policy(
        tmp_path / "both", "{{ raise_exception('the old one') }}", IM, (*CALL_MARKS, *THINK_MARKS)
    )
    (folder / "chat_template.jinja").write_text(template())
    assert load_renderer(folder).family == "both"


def test_whatever_the_makers_let_end_a_generation_ends_a_turn(tmp_path: Path):
    folder = policy(tmp_path / "ends", template(), IM, (*CALL_MARKS, *THINK_MARKS), eos="<|im_end|>")
    ends = cast(SuffixRenderer, load_renderer(folder)).tokenizer.specials
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [ends["<|im_end|>"], ends["<|endoftext|>"]]})
    )
    renderer = load_renderer(folder)
    assert renderer.stop_token_ids == (ends["<|im_end|>"], ends["<|endoftext|>"])
    # A turn that another token ended is closed as one that was cut.
    assert renderer.tail([ends["<|endoftext|>"]])[0] == ends["<|im_end|>"]


def test_a_result_without_its_tools_name_gets_it_from_its_call(tmp_path: Path):
    renderer = made(
        tmp_path, template().replace("<|im_start|>tool\n", "<|im_start|>tool {{ message.name }}\n")
    )
    call = ToolCall("c1", "look", "{}")
    messages = (
        Message("user", "a"),
        Message("assistant", "", (call,)),
        Message("tool", "r", tool_call_id="c1"),
    )
    (result,) = renderer.steps(Dialogue(messages, (LOOK,)), 3)
    assert renderer.tokenizer.decode(result, keep_special=True) == "<|im_start|>tool look\nr<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "messages", "trouble"),
    [
        (
            template(calls=CALLS + "{% if '(odd)' in messages[-1].content %}!{% endif %}"),
            (Message("user", "a"), Message("assistant", "b"), Message("user", "(odd)")),
            "rewrites what was there before",
        ),
        (
            template().replace("<|im_start|>{{ message.role }}\n",
                               "<|im_start|>{{ message.role }}{% if '(odd)' in messages[loop.index0 - 1].content %}!{% endif %}\n"),
            (Message("user", "a"), Message("assistant", "(odd)"), Message("user", "b")),
            "by what follows it",
        ),
    ],
)  # fmt: skip
def test_what_only_some_texts_make_a_template_rewrite_is_refused_when_it_comes(
    tmp_path: Path, source: str, messages: tuple[Message, ...], trouble: str
):
    renderer = made(tmp_path, source)
    with pytest.raises(ValueError, match=trouble):
        renderer.steps(Dialogue(messages), 0)


def test_a_token_that_only_the_template_writes_is_not_to_be_had_by_text(tmp_path: Path):
    source = template(bos="<turns>")
    folder = policy(
        tmp_path / "own", source, IM, (*CALL_MARKS, *THINK_MARKS, "<turns>", "<table>"), eos="<|im_end|>"
    )
    renderer = cast(SuffixRenderer, load_renderer(folder))
    own, common = (renderer.tokenizer.token_id(text) for text in ("<turns>", "<table>"))
    preamble, turn = renderer.steps(Dialogue((Message("user", "<turns> of a <table>"),)), 0)
    assert preamble == [own]
    assert own not in turn
    # What no template writes is text of the vocabulary, as it was trained.
    assert common in turn


def test_text_that_a_template_could_take_for_a_token_is_found_at_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Guard, "escape", lambda self, text: text)
    with pytest.raises(TemplateError, match="text that spells a special token becomes one"):
        made(tmp_path, template())
