"""A renderer that renders the preambles of a host's sessions once: a pool's agents all begin with the same long one.

Promises: it renders what the renderer that it stands before does (a dialogue's rendering is that of its steps, one after
the other); it holds the few preambles that were used last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from pipeline.capture.call import ToolChoice
from pipeline.capture.dialogue import Dialogue, Key, split_system, steps
from pipeline.capture.messages import Tool
from pipeline.capture.renderers.base import Renderer, TurnParser

_KEPT = 64


class Remembering:
    """See `Renderer`."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: OrderedDict[Key, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def family(self) -> str:
        return self._renderer.family

    @property
    def images(self) -> bool:
        return self._renderer.images

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._renderer.stop_token_ids

    def steps(self, dialogue: Dialogue, first: int) -> list[list[int]]:
        if first:
            return self._renderer.steps(dialogue, first)
        system, _ = split_system(dialogue)
        opening = Dialogue(() if system is None else dialogue.messages[:1], dialogue.tools)
        key = steps(opening)[0].prompt_key
        with self._lock:
            known = self._known.pop(key, None)
        if known is None:
            known = self._renderer.steps(opening, 0)[0]
        with self._lock:
            self._known[key] = known
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return [known, *self._renderer.steps(dialogue, 1)]

    def lead(self, choice: ToolChoice) -> tuple[list[int], list[int]]:
        return self._renderer.lead(choice)

    def tail(self, turn: Sequence[int]) -> list[int]:
        return self._renderer.tail(turn)

    def parser(
        self,
        opening: Sequence[int] = (),
        stop: Sequence[str] = (),
        parallel: bool = True,
        tools: Sequence[Tool] = (),
    ) -> TurnParser:
        return self._renderer.parser(opening, stop, parallel, tools)
