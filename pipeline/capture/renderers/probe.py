"""Proves at start-up that a family's turns, rendered one by one, are what its template renders of whole dialogues.

Raises TemplateError, which names the family, the promise that fails and a dialogue for which it does. What is proven, for
dialogues without earlier reasoning (templates may take that out of history):
- the preamble, the turns and the generation prompt put together are the template's own rendering, token by token;
- a sampled text, after the generation prompt and before the closing tokens, is the template's rendering of that turn;
- text that spells a special token stays text, wherever it stands;
- a call and a reasoning as the template writes them are what the parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.capture.call import ToolChoice
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Message, ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.suffix import SuffixRenderer

_TOOLS = (
    Tool("look", "Looks it up.", {"type": "object", "properties": {"what": {"type": "string"}}}),
    Tool("write_file", "Writes.\n\nTwice.", {"type": "object", "properties": {}, "required": []}),
)
_CALL = ToolCall("call00001", "look", '{"what": "a b\\n1 + 2", "deep": {"list": [1, -2.5, null, true]}}')
_OTHER = ToolCall("call00002", "write_file", '{"path": "/tmp/\u00e9", "text": ""}')
_SYSTEM = Message("system", "Be brief.\n")
_ASK, _PADDED = Message("user", "What is 12 + 3?"), Message("user", "\n\n  indented\n \n")
_SAID, _LINES = Message("assistant", "It is 15."), Message("assistant", "One.\n\nTwo.")
_RESULT = Message("tool", "  15\n", tool_call_id="call00001", name="look")
_FAILED = Message("tool", "no such file", tool_call_id="call00002", name="write_file", is_error=True)

_PLAIN: tuple[tuple[Message, ...], ...] = (
    (_ASK,),
    (_SYSTEM, _ASK),
    (_ASK, _SAID, _PADDED),
    (_SYSTEM, _PADDED, _SAID, _ASK, _LINES, _PADDED),
)
_WITH_TOOLS: tuple[tuple[Message, ...], ...] = (
    (_ASK,),
    (_SYSTEM, _ASK, Message("assistant", "", (_CALL,)), _RESULT),
    (_ASK, Message("assistant", "Let me see.", (_CALL, _OTHER)), _RESULT, _FAILED),
    (_ASK, Message("assistant", "", (_CALL,)), _RESULT, _SAID, _PADDED),
    (
        *(_SYSTEM, _ASK, Message("assistant", "", (_CALL,)), _RESULT),
        *(Message("assistant", "", (_OTHER,)), _FAILED, _LINES, _ASK),
    ),
)


def probe(renderer: SuffixRenderer) -> None:
    """Raises TemplateError."""
    try:
        for messages in _PLAIN:
            _same(renderer, messages, ())
        if renderer.source.tools:
            for messages in _WITH_TOOLS:
                _same(renderer, messages, _TOOLS)
        _sampled(renderer)
        _hostile(renderer)
    except TemplateError:
        raise
    except ValueError as error:
        raise TemplateError(f"{renderer.family}: cannot be rendered turn by turn: {error}") from error
    trouble = misread(renderer)
    if trouble is not None:
        raise TemplateError(f"{renderer.family}: {trouble}")


def misread(renderer: SuffixRenderer) -> str | None:
    """What the parser reads wrongly of what the template writes; None when nothing is."""
    source, reasoning = renderer.source, renderer.reasoning
    calls = (_CALL, _OTHER) if source.tools else ()
    header, close = _header(renderer), source.close()
    offered = _TOOLS if calls else ()
    for content, thought in (("", ""), ("Let me see.", ""), ("", "Why:\n\none"), ("So.", "Two\nlines")):
        if (thought and reasoning is None) or not (content or calls):
            continue
        ids = source.turn((Message("assistant", content, calls, reasoning=thought),), bool(calls))
        written = ids[len(header) : len(ids) - len(close) + 1]
        if thought and not _contains(renderer, ids, thought):
            # The template takes reasoning out of history: what a policy samples is its to write.
            written = _thinking(renderer, thought) + written
        # Without the part of the generation prompt that opens the reasoning: the turn has it in itself.
        parser = renderer.reader.parser(tools=offered)
        parser.feed(written)
        turn = parser.finish()[1]
        if _meaning(turn) != (content, [(c.name, json.loads(c.arguments)) for c in calls], 0, thought):
            return (
                "a turn that its chat template writes is not read back; name the parsers that fit it (engine.tool_parser, "
                f"engine.reasoning_parser): {source.tokenizer.decode(written, keep_special=True)!r} was read as {turn!r}"
            )
    return None


def _same(renderer: SuffixRenderer, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    turns = renderer.steps(Dialogue(tuple(messages), tuple(tools)), 0)
    ours = [*(token for turn in turns for token in turn), *renderer.lead(ToolChoice())[0]]
    theirs = renderer.source.whole(messages, tools)
    if ours == theirs:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    decode = renderer.tokenizer.decode
    raise TemplateError(
        f"{renderer.family}: its chat template is not append-only: the turns of "
        f"{[message.role for message in messages]} put together differ from its rendering of the dialogue at token {at}: "
        f"{decode(ours[at : at + 16], keep_special=True)!r} is {decode(theirs[at : at + 16], keep_special=True)!r} there"
    )


def _sampled(renderer: SuffixRenderer) -> None:
    header, source = _header(renderer), renderer.source
    for text in ("It is 15.", "One.\n\nTwo."):
        turn = source.turn((Message("assistant", text),), False)
        sampled = [*renderer.tokenizer.encode(text), source.close()[0]]
        for ids in (sampled, sampled[:-1]):
            if header + ids + renderer.tail(ids) != turn:
                raise TemplateError(
                    f"{renderer.family}: a sampled turn between the generation prompt and the closing tokens is not "
                    f"how its chat template renders that turn: {renderer.tokenizer.decode(turn, keep_special=True)!r}"
                )


def _header(renderer: SuffixRenderer) -> list[int]:
    """The generation prompt, without what opens the reasoning there."""
    prompt, form = renderer.source.prompt(), renderer.reasoning
    turn = renderer.source.turn((Message("assistant", "It is 15."),), False)
    same = next((i for i, (a, b) in enumerate(zip(prompt, turn, strict=False)) if a != b), len(prompt))
    more = renderer.tokenizer.decode(prompt[same:], keep_special=True)
    if more:
        left = more if form is None else more.replace(form.open, "", 1).replace(form.close, "", 1)
        if form is None or not more.startswith(form.open) or left.strip():
            raise TemplateError(
                f"{renderer.family}: the generation prompt goes on with {more!r}, with which no turn of the policy begins"
            )
    return prompt[:same]


def _hostile(renderer: SuffixRenderer) -> None:
    specials = renderer.tokenizer.special_ids
    spelled = " ".join(renderer.tokenizer.specials)

    def marks(text: str) -> list[int]:
        schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
        # As JSON may spell it too: a template that reads arguments brings it out.
        escaped = "".join(f"\\u{ord(c):04x}" for c in text)
        call = ToolCall(_CALL.id, "look", f'{{"what": {json.dumps(text)}, "deep": ["{escaped}"]}}')
        tools = (Tool("look", text, schema),) if renderer.source.tools else ()
        turns: list[Message] = [Message("system", text), Message("user", text)]
        if tools:
            turns += [Message("assistant", text, (call,)), Message("tool", text, (), _CALL.id, "look")]
        turns += [Message("assistant", text), Message("user", text)]
        rendered = renderer.steps(Dialogue(tuple(turns), tools), 0)
        return [token for turn in rendered for token in turn if token in specials]

    if marks(spelled) != marks("a"):
        raise TemplateError(f"{renderer.family}: text that spells a special token becomes one")


def _thinking(renderer: SuffixRenderer, thought: str) -> list[int]:
    form = renderer.reasoning
    assert form is not None
    blank = renderer.tokenizer.encode("\n")
    return [
        *renderer.mark(form.open),
        *blank,
        *renderer.tokenizer.encode(thought),
        *renderer.mark(form.close),
    ]


def _contains(renderer: SuffixRenderer, ids: Sequence[int], text: str) -> bool:
    return text in renderer.tokenizer.decode(ids, keep_special=True)


def _meaning(turn: ParsedTurn) -> tuple[object, ...]:
    calls = [(call.name, json.loads(call.arguments)) for call in turn.tool_calls]
    return turn.content, calls, turn.malformed, turn.reasoning
