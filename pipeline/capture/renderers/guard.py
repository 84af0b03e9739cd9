"""Text for a template, so that nobody's text becomes a special token.

A template writes special tokens as text, among the text that it is given. So what it is given is escaped first: text that
spells a special token is replaced by private-use characters, which the template passes on and takes for nothing. In
what it returns, special tokens are then the template's own; the rest is turned back and encoded as ordinary text.
"""

from __future__ import annotations

import re
from typing import Any, cast

from pipeline.capture.tokenizer import PolicyTokenizer

_ESCAPE = "\uf8ff"
SENTINELS = ("\uf8f0", "\uf8f1", "\uf8f2")
"""Contents of the dialogues that renderings are compared over; nobody's text holds them once it is escaped."""


class Guard:
    """Stateless after construction."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.specials
        spelled = sorted((text for text in self._ids if text), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, spelled)) + ")")
        self._guarded = [_ESCAPE, *SENTINELS, *spelled]
        self._number = {text: i for i, text in enumerate(self._guarded)}
        guarded = sorted(self._guarded, key=len, reverse=True)
        self._hostile = re.compile("|".join(map(re.escape, guarded)))
        self._escaped = re.compile(f"{_ESCAPE}([0-9]+){_ESCAPE}")

    def escape(self, text: str) -> str:
        return self._hostile.sub(lambda found: f"{_ESCAPE}{self._number[found[0]]}{_ESCAPE}", text)

    def escape_json(self, value: Any) -> Any:
        """Every text in a JSON value escaped, names of members too."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self.escape_json(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            return {self.escape(name): self.escape_json(item) for name, item in members.items()}
        return value

    def unescape(self, text: str) -> str:
        return self._escaped.sub(lambda found: self._guarded[int(found[1])], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of what a template wrote: its special tokens, and all else as ordinary text."""
        ids: list[int] = []
        for i, piece in enumerate(self._special.split(text)):
            if i % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._tokenizer.encode(self.unescape(piece))
        return ids
