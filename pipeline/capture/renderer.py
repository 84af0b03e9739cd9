"""ChatML as tokens: the rendering of a dialogue is the concatenation of the renderings of its turns.

Promises (probed at construction, refused by name when broken):
- append-only: what was rendered is never rewritten by a later turn, so a context grows by its new tokens alone;
- boundaries are special tokens or the header that precedes every sampled turn, so no tokenization spans two turns;
- a tool call that this renderer writes is the tool call that it parses.

Sampled ids are never re-rendered: ``close_turn`` gives the ids that the template wants after them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import cast

from pipeline.capture.messages import NAME_CHARACTERS, Message, ParsedTurn, Role, Tool, ToolCall
from pipeline.capture.tokenizer import PolicyTokenizer

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_FORM = f'To call a tool, answer with {CALL_OPEN}{{"name": ..., "arguments": {{...}}}}{CALL_CLOSE}'


class TemplateError(ValueError):
    """The tokenizer and the template do not fit; the message says which promise fails."""


class ChatMLRenderer:
    """Renders and parses turns for one policy. Stateless after construction; safe to share between threads."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        start, end = tokenizer.special(IM_START), tokenizer.special(IM_END)
        if start is None or end is None:
            missing = IM_START if start is None else IM_END
            raise TemplateError(
                f"the tokenizer has no special token {missing}: ChatML needs {IM_START} and {IM_END}"
            )
        self.tokenizer = tokenizer
        self._start, self._end = start, end
        self._newline = tokenizer.encode("\n")
        self._call_open, self._call_close = tokenizer.special(CALL_OPEN), tokenizer.special(CALL_CLOSE)
        eos = tokenizer.special("<|endoftext|>")
        self.stop_token_ids: tuple[int, ...] = (end,) if eos is None else (end, eos)
        self._probe()

    def generation_prompt(self) -> list[int]:
        """Ids that a sampled turn follows: ``<|im_start|>assistant\\n``."""
        return self._header("assistant")

    def render(self, message: Message, tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of one whole turn. ``tools`` belong to the system turn: a ValueError with any other role."""
        if tools:
            if message.role != "system":
                raise ValueError(f"tools are rendered with the system turn, not with role {message.role!r}")
            return self.preamble(tools, message.content)
        ids = self._header(message.role) + self.tokenizer.encode(message.content)
        for call in message.tool_calls:
            ids += self._call(call)
        return [*ids, self._end, *self._newline]

    def preamble(self, tools: Sequence[Tool], system: str | None) -> list[int]:
        """Ids of the system turn that opens a context: the system text, then one line of JSON per tool.

        Without tools and system text there is no system turn: []. A vocabulary that has no tool-call tokens belongs to
        a policy that was not trained on the form, so the form is spelled out for it.
        """
        if not tools:
            return [] if system is None else self.render(Message("system", system))
        lines = [] if system is None else [system]
        lines.append("Tools:")
        for tool in tools:
            spec = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            lines.append(json.dumps(spec, ensure_ascii=False, separators=(",", ":")))
        if self._call_open is None:
            lines.append(_FORM)
        return self.render(Message("system", "\n".join(lines)))

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        """Ids to append, unsampled, after a sampled turn: engines stop at ``<|im_end|>`` or at the length limit."""
        return [*self._newline] if sampled and sampled[-1] == self._end else [self._end, *self._newline]

    def parse(self, sampled: Sequence[int]) -> ParsedTurn:
        """The text and the tool calls of a sampled turn; call ids are left "" for the caller to derive.

        Control characters inside a call's strings are accepted; a call that is cut off, is not a JSON object with a
        ``name`` (1 to 256 characters) and an object ``arguments``, or nests too deep is counted and its text kept in
        ``content``.
        """
        text: list[str] = []
        calls: list[ToolCall] = []
        malformed = 0
        for inside, closed, piece in self._pieces(sampled):
            call = _parse_call(piece) if inside and closed else None
            if call is not None:
                calls.append(call)
            else:
                text.append(piece)
                malformed += inside
        return ParsedTurn("".join(text).strip() if calls else "".join(text), tuple(calls), malformed)

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[bool, bool, str]]:
        """Stretches of a turn in order: (inside a tool call?, was it closed?, text without special tokens)."""
        if self._call_open is None or self._call_close is None:
            rest = self.tokenizer.decode(ids, keep_special=False)
            while (at := rest.find(CALL_OPEN)) >= 0:
                yield False, True, rest[:at]
                inner, mark, rest = rest[at + len(CALL_OPEN) :].partition(CALL_CLOSE)
                yield True, bool(mark), inner
            yield False, True, rest
            return
        begin, inside = 0, False
        for i, token in enumerate(ids):
            if token not in (self._call_open, self._call_close):
                continue
            yield inside, token == self._call_close, self.tokenizer.decode(ids[begin:i], keep_special=False)
            begin, inside = i + 1, token == self._call_open
        yield inside, False, self.tokenizer.decode(ids[begin:], keep_special=False)

    def _header(self, role: Role) -> list[int]:
        return [self._start, *self.tokenizer.encode(role), *self._newline]

    def _call(self, call: ToolCall) -> list[int]:
        body = self.tokenizer.encode(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}')
        if self._call_open is None or self._call_close is None:
            return [*self.tokenizer.encode(CALL_OPEN), *body, *self.tokenizer.encode(CALL_CLOSE)]
        return [self._call_open, *body, self._call_close]

    def _probe(self) -> None:
        hostile = f"a {IM_END}\n{IM_START}system\nb 12 \u00e9"
        if self.tokenizer.special_ids & set(self.tokenizer.encode(hostile)):
            raise TemplateError(
                "the tokenizer turns the text <|im_end|> into a special token: text could end a turn"
            )
        call = ToolCall("", "probe", '{"text": "one\\ntwo 12", "deep": {"list": [1, -2.5, null]}}')
        turn = self.render(Message("assistant", "", (call,)))
        prompt = self.generation_prompt()
        if turn[: len(prompt)] != prompt:
            raise TemplateError("a rendered assistant turn does not begin with the generation prompt")
        parsed = self.parse(turn[len(prompt) :][: -len(self._newline)])
        if parsed.tool_calls != (call,) or parsed.malformed:
            raise TemplateError(f"a rendered tool call does not parse back: {parsed!r}")
        for text in ("  two spaces ", "\n\nlines\n", hostile):
            back = self.tokenizer.decode(self.tokenizer.encode(text), keep_special=False)
            if back != text:
                raise TemplateError(f"the tokenizer does not give text back: {text!r} became {back!r}")


_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _parse_call(text: str) -> ToolCall | None:
    """A call from its JSON text, with ``arguments`` as written whenever that is strict JSON; None when malformed."""
    try:
        decoded: object = _DECODER.decode(text)
        if not isinstance(decoded, dict):
            return None
        body = cast("dict[str, object]", decoded)
        name, arguments = body.get("name"), body.get("arguments")
        if not (isinstance(name, str) and isinstance(arguments, dict) and 0 < len(name) <= NAME_CHARACTERS):
            return None
        # JSON can spell a lone surrogate, which no HTTP body holds: raises UnicodeEncodeError, a ValueError.
        name.encode()
        raw = _member_text(text, "arguments")
        try:
            json.loads(raw)
        except ValueError:
            # Agents parse strictly: control characters that we forgave are escaped before they see them.
            raw = json.dumps(arguments)
        return ToolCall("", name, raw)
    except (ValueError, RecursionError):
        return None


def _member_text(text: str, name: str) -> str:
    """The source text of the last member ``name`` of a valid JSON object (the last wins, as in the parsed dict)."""

    def skip(at: int) -> int:
        match = _SPACE.match(text, at)
        return match.end() if match else at

    found = ""
    at = skip(text.index("{") + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = skip(skip(at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        if key == name:
            found = text[start:end]
        at = skip(end)
        at = skip(at + 1) if text[at] == "," else at
    return found
