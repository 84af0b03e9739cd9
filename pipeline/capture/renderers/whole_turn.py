"""Sampled turns read by the package `renderers`, for families whose calls have no form of ours.

The package reads whole turns only, so nothing is shown before the turn is over. A turn still ends where a stop text is
complete (sought in the turn's text, its reasoning and calls included) and, without parallel calls, with its first call.
A turn that the package fails over is text, as a malformed call is: what was sampled is never lost for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, cast

from pipeline.capture.call import Piece, Text, Thought
from pipeline.capture.messages import NAME_CHARACTERS, ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import Fed
from pipeline.capture.renderers.forms import too_deep
from pipeline.capture.renderers.parsing import Grammar
from pipeline.capture.renderers.wire import offer
from pipeline.capture.tokenizer import PolicyTokenizer

_LOG = logging.getLogger("packtrain.capture.renderers")
_READ_FREELY = 64
"""Times that a turn is read to see whether it holds a call; then only when it has grown by an eighth: a policy may go on
with special tokens for ever."""


class PackageReader:
    """Makes the parsers of one family. `package` is its renderer there; `prompt` the generation prompt, by which it tells
    whether a turn begins inside the reasoning."""

    def __init__(self, package: Any, tokenizer: PolicyTokenizer, prompt: Sequence[int]) -> None:
        self._package = package
        self.tokenizer = tokenizer
        self._prompt = list(prompt)

    def parser(
        self,
        opening: Sequence[int] = (),
        stop: Sequence[str] = (),
        parallel: bool = True,
        tools: Sequence[Tool] = (),
    ) -> WholeTurn:
        return WholeTurn(self, opening, stop, parallel, tools)

    def read(self, ids: Sequence[int], tools: Sequence[Tool]) -> ParsedTurn:
        offered = [offer(tool) for tool in tools] or None
        try:
            found = self._package.parse_response(list(ids), tools=offered, prompt_ids=self._prompt)
        except Exception as error:  # thirty families' code, over whatever a policy samples
            _LOG.warning("a turn of %d tokens cannot be read: %r", len(ids), error)
            return ParsedTurn(self.tokenizer.decode(ids, keep_special=False).strip(), (), 1)
        content = [found.content or ""]
        calls: list[ToolCall] = []
        malformed = 0
        for attempt in found.tool_calls:
            call = read_call(attempt)
            if call is None:
                malformed += 1
                content.append(attempt.raw)
            else:
                calls.append(call)
        shown, thought = (
            self._without_specials(text, ids).strip()
            for text in ("".join(content), found.reasoning_content or "")
        )
        return ParsedTurn(shown, tuple(calls), malformed, thought)

    def _without_specials(self, text: str, ids: Sequence[int]) -> str:
        """The package writes special tokens that have no meaning where they stand out as text."""
        sampled = set(ids)
        for spelled, token in self.tokenizer.specials.items():
            if token in sampled:
                text = text.replace(spelled, "")
        return text


class WholeTurn:
    """See `TurnParser`."""

    def __init__(
        self,
        reader: PackageReader,
        opening: Sequence[int],
        stop: Sequence[str],
        parallel: bool,
        tools: Sequence[Tool],
    ) -> None:
        self._reader = reader
        self._tools = tools
        self._parallel = parallel
        self._ids = list(opening)
        self._special = reader.tokenizer.special_ids
        self._text = Grammar(reader.tokenizer, None).parser(stop=stop)
        self._ended = False
        self._reads = self._read_at = 0
        self._turn: ParsedTurn | None = None
        self.reasoning_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        return self._text.stopped_by

    def feed(self, ids: Sequence[int]) -> Fed:
        keep = 0 if self._ended else None
        for i, token in enumerate(ids):
            if self._ended:
                break
            self._ids.append(token)
            self._ended = self._text.feed([token]).keep is not None or self._called(token)
            if self._ended:
                keep = i + 1
        return Fed((), keep)

    def finish(self) -> tuple[tuple[Piece, ...], ParsedTurn]:
        if self._turn is not None:
            return (), self._turn
        self._ended = True
        turn = self._reader.read(self._ids, self._tools)
        if self.stopped_by is not None:
            content = (
                turn.content.rpartition(self.stopped_by)[0]
                if self.stopped_by in turn.content
                else turn.content
            )
            turn = ParsedTurn(content.strip(), turn.tool_calls, turn.malformed, turn.reasoning)
        self._turn = turn
        self.reasoning_tokens = len(self._reader.tokenizer.encode(turn.reasoning))
        pieces: list[Piece] = [Thought(turn.reasoning)] if turn.reasoning else []
        pieces += [Text(turn.content)] if turn.content else []
        return (*pieces, *turn.tool_calls), turn

    def _called(self, token: int) -> bool:
        """Whether the turn's first call is complete: families end a call with a special token."""
        if self._parallel or token not in self._special:
            return False
        if self._reads >= _READ_FREELY and len(self._ids) < self._read_at * 9 // 8:
            return False
        self._reads, self._read_at = self._reads + 1, len(self._ids)
        return bool(self._reader.read(self._ids, self._tools).tool_calls)


def read_call(attempt: Any) -> ToolCall | None:
    """The package's reading of a call; None for one that is no call, or that agents' JSON parsers would refuse."""
    if attempt.status != "ok" or not 0 < len(attempt.name or "") <= NAME_CHARACTERS:
        return None
    arguments = attempt.arguments
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
        written = json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    taken = isinstance(arguments, dict) and not too_deep(cast("object", arguments))
    return ToolCall("", attempt.name, written) if taken else None
