"""Sampled turns read by the package `renderers`, for families whose calls have no form of ours.

The package reads whole turns only, so nothing is shown before the turn is over. A turn still ends where a stop text is
complete (sought in the turn's text, its reasoning and calls included) and, without parallel calls, with its first call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.capture.call import Piece, Text, Thought
from pipeline.capture.messages import NAME_CHARACTERS, ParsedTurn, Tool, ToolCall
from pipeline.capture.renderers.base import Fed
from pipeline.capture.renderers.parsing import Grammar
from pipeline.capture.renderers.wire import offer
from pipeline.capture.tokenizer import PolicyTokenizer


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
        found = self._package.parse_response(list(ids), tools=offered, prompt_ids=self._prompt)
        content = [found.content or ""]
        calls: list[ToolCall] = []
        malformed = 0
        for attempt in found.tool_calls:
            call = _call(attempt)
            if call is None:
                malformed += 1
                content.append(attempt.raw)
            else:
                calls.append(call)
        reasoning = (found.reasoning_content or "").strip()
        return ParsedTurn("".join(content).strip(), tuple(calls), malformed, reasoning)


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
        return bool(self._reader.read(self._ids, self._tools).tool_calls)


def _call(attempt: Any) -> ToolCall | None:
    if attempt.status != "ok" or not 0 < len(attempt.name or "") <= NAME_CHARACTERS:
        return None
    arguments = attempt.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    return ToolCall("", attempt.name, json.dumps(arguments)) if isinstance(arguments, dict) else None
