"""A sampled turn, read while it is sampled: reasoning, text and tool calls out of tokens.

Promises, for any tokens in any portions:
- the pieces put together are the whole turn, and the same however the tokens were portioned;
- no special token is ever shown; text that spells one, in ordinary tokens, is;
- a token costs the same however many came before it;
- what is held back is only what is not decided: half a character, the beginning of a mark or of a stop text, white space
  that nothing follows yet, a tool call that is not closed.

Reasoning stands at the beginning: a reasoning mark later in the turn is dropped, as any special token that has no
meaning where it stands, and what it encloses is shown. Stop texts are sought in what is shown, neither in reasoning nor
in calls; white space right after the reasoning counts as part of its mark.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pipeline.capture.call import Piece, Text, Thought
from pipeline.capture.messages import ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import Fed
from pipeline.capture.renderers.forms import ReasoningForm, ToolForm
from pipeline.capture.tokenizer import PolicyTokenizer

_Mark = Literal["call", "called", "think", "thought"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a family's turns are made of. `calls` None: turns have no tool calls. `thinking`: the generation prompt opens
    the reasoning, so that a turn begins inside it."""

    tokenizer: PolicyTokenizer
    calls: ToolForm | None
    reasoning: ReasoningForm | None = None
    thinking: bool = False

    def parser(
        self,
        opening: Sequence[int] = (),
        stop: Sequence[str] = (),
        parallel: bool = True,
        tools: Sequence[Tool] = (),
    ) -> StreamParser:
        return StreamParser(self, opening, stop, parallel, tools)

    def marks(self) -> dict[_Mark, str]:
        found: dict[_Mark, str] = {}
        if self.calls is not None:
            found |= {"call": self.calls.open, "called": self.calls.close}
        if self.reasoning is not None:
            found |= {"think": self.reasoning.open, "thought": self.reasoning.close}
        return found


class StreamParser:
    """See `TurnParser`."""

    def __init__(
        self,
        grammar: Grammar,
        opening: Sequence[int],
        stop: Sequence[str],
        parallel: bool,
        tools: Sequence[Tool],
    ) -> None:
        tokenizer = grammar.tokenizer
        self._form = grammar.calls
        self._tools = tools
        self._parallel = parallel
        self._special = tokenizer.special_ids
        self._bytes_of = tokenizer.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._mark_tokens: dict[int, _Mark] = {}
        self._mark_texts: dict[_Mark, str] = {}
        for mark, text in grammar.marks().items():
            token = tokenizer.special(text)
            if token is None:
                self._mark_texts[mark] = text
            else:
                self._mark_tokens[token] = mark

        self._state: Literal["text", "call", "thinking"] = "thinking" if grammar.thinking else "text"
        self._held = ""
        self._body: list[str] = []
        self._shown = _Trimmed()
        self._thought = _Trimmed()
        self._calls: list[ToolCall] = []
        self._malformed = 0
        self._out: list[Piece] = []
        self._skip_blank = False
        self._ended = False
        self._stop: tuple[str, ...] = ()
        self._stopped_by: str | None = None
        self._sampled = self._reasoning = 0
        for token in opening:
            self._take(token)
        self._stop = tuple(text for text in stop if text)
        self._sampled = self._reasoning = 0
        # Then only a special token changes what the text means, so that what stands between two is read at once.
        self._whole_runs = parallel and not self._stop and not self._mark_texts

    @property
    def stopped_by(self) -> str | None:
        return self._stopped_by

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning

    def feed(self, ids: Sequence[int]) -> Fed:
        if self._whole_runs:
            self._take_runs(ids)
            return Fed(self._drain(), None)
        keep = 0 if self._ended else None
        for i, token in enumerate(ids):
            if self._ended:
                break
            self._take(token)
            if self._ended:
                keep = i + 1
        return Fed(self._drain(), keep)

    def finish(self) -> tuple[tuple[Piece, ...], ParsedTurn]:
        if not self._ended:
            self._settle()
        if not self._ended and self._state == "call":
            self._give_up_call()
        self._ended = True
        pieces = self._drain()
        turn = ParsedTurn(self._shown.whole(), tuple(self._calls), self._malformed, self._thought.whole())
        return pieces, turn

    def _drain(self) -> tuple[Piece, ...]:
        out, self._out = self._out, []
        return tuple(_merged(out))

    def _take_runs(self, ids: Sequence[int]) -> None:
        run: list[int] = []
        for token in ids:
            if token in self._special:
                self._take_run(run)
                run = []
                self._take(token)
            else:
                run.append(token)
        self._take_run(run)

    def _take_run(self, run: Sequence[int]) -> None:
        self._sampled += len(run)
        if self._state == "thinking":
            self._reasoning += len(run)
        text = self._utf8.decode(b"".join(map(self._bytes_of, run)))
        if text:
            self._read(text)

    def _take(self, token: int) -> None:
        self._sampled += 1
        thinking = self._state == "thinking"
        mark = self._mark_tokens.get(token)
        if mark is not None:
            self._at_mark(mark)
        elif token not in self._special:
            text = self._utf8.decode(self._bytes_of(token))
            if text:
                self._read(text)
        if thinking:
            self._reasoning += 1

    def _at_mark(self, mark: _Mark) -> None:
        """A mark that is a token. One that has no meaning here is dropped."""
        if mark == "call" and self._state != "thinking":
            self._settle()
            if self._ended:
                return
            if self._state == "call":
                self._give_up_call()
            self._state = "call"
        elif mark == "called" and self._state == "call":
            self._settle()
            self._close_call()
        elif mark == "think" and self._state == "text" and self._nothing_yet:
            self._settle()
            if not self._ended and self._nothing_yet:
                self._begin_thinking()
        elif mark == "thought" and self._state == "thinking":
            self._settle()
            self._end_thinking()

    def _settle(self) -> None:
        """Nothing that is held back will go on."""
        rest = self._utf8.decode(b"", True)
        if rest:
            self._read(rest)
        held, self._held = self._held, ""
        if held and not self._ended:
            self._put(held)

    def _read(self, text: str) -> None:
        while text and not self._ended:
            if self._skip_blank:
                text = text.lstrip()
                self._skip_blank = not text
                if not text:
                    return
            text = self._held + text
            self._held = ""
            sought = self._sought()
            found = _first(text, sought)
            if found is None:
                held = _unfinished(text, sought)
                self._held = text[len(text) - held :]
                if held < len(text):
                    self._put(text[: len(text) - held])
                return
            at, pattern = found
            text = self._at_text(text, at, pattern)

    def _at_text(self, text: str, at: int, pattern: str) -> str:
        """Acts on a mark or a stop text that is text; returns what is still to be read."""
        before, rest = text[:at], text[at + len(pattern) :]
        if before:
            self._put(before)
        marks = self._mark_texts
        if self._state == "call":
            self._close_call()
        elif self._state == "thinking":
            self._end_thinking()
        elif pattern in self._stop:
            self._ended, self._stopped_by = True, pattern
        elif pattern == marks.get("call"):
            self._state = "call"
        elif self._nothing_yet:
            self._begin_thinking()
        else:
            # Text stands before it: no reasoning begins here, and from now on none is sought.
            return text[at:]
        return rest

    def _sought(self) -> list[str]:
        marks = self._mark_texts
        if self._state == "call":
            return [marks["called"]] if "called" in marks else []
        if self._state == "thinking":
            return [marks["thought"]] if "thought" in marks else []
        sought = list(self._stop)
        if "call" in marks:
            sought.append(marks["call"])
        if "think" in marks and self._nothing_yet:
            sought.append(marks["think"])
        return sought

    @property
    def _nothing_yet(self) -> bool:
        return self._shown.empty and not self._calls

    def _put(self, text: str) -> None:
        if self._state == "call":
            self._body.append(text)
        elif self._state == "thinking":
            if more := self._thought.add(text):
                self._out.append(Thought(more))
        elif more := self._shown.add(text):
            self._out.append(Text(more))

    def _begin_thinking(self) -> None:
        self._state = "thinking"
        # Nothing but white space came before: the mark's own tokens, when it is spelled as text.
        self._reasoning = self._sampled

    def _end_thinking(self) -> None:
        self._state = "text"
        self._skip_blank = True

    def _close_call(self) -> None:
        assert self._form is not None
        body = "".join(self._body)
        call = self._form.read(body, self._tools)
        if call is None:
            self._give_up_call()
            return
        self._body, self._state = [], "text"
        self._calls.append(call)
        self._out.append(call)
        self._ended = not self._parallel

    def _give_up_call(self) -> None:
        body, self._body, self._state = "".join(self._body), [], "text"
        self._malformed += 1
        self._put(body)


class _Trimmed:
    """Text without surrounding white space, as it grows."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._blank: list[str] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    def add(self, text: str) -> str:
        """What can be shown of it now."""
        if self.empty:
            text = text.lstrip()
        solid = text.rstrip()
        if not solid:
            if not self.empty:
                self._blank.append(text)
            return ""
        shown = "".join([*self._blank, solid])
        self._blank = [text[len(solid) :]]
        self._parts.append(shown)
        return shown

    def whole(self) -> str:
        return "".join(self._parts)


def _first(text: str, patterns: Sequence[str]) -> tuple[int, str] | None:
    """(start, pattern) of the occurrence that ends first; of several that end there, the longest."""
    found = [(at + len(p), at, p) for p in patterns if (at := text.find(p)) >= 0]
    if not found:
        return None
    _, at, pattern = min(found)
    return at, pattern


def _unfinished(text: str, patterns: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a pattern."""
    longest = 0
    for pattern in patterns:
        for size in range(min(len(pattern) - 1, len(text)), longest, -1):
            if text.endswith(pattern[:size]):
                longest = size
                break
    return longest


def _merged(pieces: Iterable[Piece]) -> Iterable[Piece]:
    for kind, run in groupby(pieces, key=type):
        if kind is Text:
            yield Text("".join(p.text for p in run if isinstance(p, Text)))
        elif kind is Thought:
            yield Thought("".join(p.text for p in run if isinstance(p, Thought)))
        else:
            yield from run
