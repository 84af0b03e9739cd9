"""A sampled turn as it is read: its tokens parsed as they come, its tool calls named, its pieces told to its clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Sequence

from pipeline.capture.call import Finish, Piece, Text
from pipeline.capture.messages import ParsedTurn, ToolCall
from pipeline.capture.renderers.base import TurnParser
from pipeline.capture.turn import Turn
from pipeline.engines.base import Generation


class Reading:
    """Parses a turn's tokens as they come and tells the turn; names the tool calls."""

    def __init__(self, turn: Turn, parser: TurnParser, name: str, calls: bool) -> None:
        self._turn = turn
        self._parser = parser
        self._name = name
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._named: list[ToolCall] = []
        self._shown: list[str] = []

    def watch(self, ids: Sequence[int]) -> int | None:
        fed = self._parser.feed(ids)
        self._tell(fed.pieces)
        return fed.keep

    def finish(self) -> ParsedTurn:
        pieces, parsed = self._parser.finish()
        self._tell(pieces)
        content = parsed.content if self._calls else "".join(self._shown).strip()
        return ParsedTurn(content, tuple(self._named), parsed.malformed, parsed.reasoning)

    def _tell(self, pieces: Sequence[Piece]) -> None:
        named = [self._name_call(piece) if isinstance(piece, ToolCall) else piece for piece in pieces]
        self._shown += [piece.text for piece in named if isinstance(piece, Text)]
        if threading.get_ident() == self._thread:
            self._turn.add(named)
        else:
            # A long turn is parsed on a thread; its clients wait on the loop.
            self._loop.call_soon_threadsafe(self._turn.add, named)

    def _name_call(self, call: ToolCall) -> Piece:
        if not self._calls:
            # The agent asked for none: what the policy said all the same is shown.
            return Text(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}')
        call = ToolCall(self._call_id(), call.name, call.arguments)
        self._named.append(call)
        return call

    def _call_id(self) -> str:
        """Unique in the run."""
        made = hashlib.sha256(f"{self._name}/{len(self._named)}".encode()).hexdigest()
        return f"call_{made[:24]}"


def finish(generation: Generation, parser: TurnParser, parsed: ParsedTurn) -> Finish:
    """Why the turn ended."""
    if generation.finish_reason == "length":
        return "length"
    if parser.stopped_by is not None:
        return "stop_sequence"
    return "tool_calls" if parsed.tool_calls else "stop"
