"""A policy's tokenizer: text that anyone can write never becomes a special token.

Promises: ``encode`` yields no special id whatever the text (``<|im_end|>`` in a web page is ordinary tokens);
special ids enter a sequence only through ``special``. ``decode(encode(text), keep_special=False) == text`` for byte-level
vocabularies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as _Backend
from tokenizers import decoders as _decoders


def _byte_of() -> dict[str, int]:
    """Byte-level vocabularies write a byte that is no printable Latin-1 character as one from U+0100 on, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\xa1"), ord("\xac") + 1),
        *range(ord("\xae"), 256),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of()
_SHORT = 1_000
"""Characters that are tokenized in less time than a batch takes to be begun."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class PolicyTokenizer:
    """Thin wrapper over ``tokenizers.Tokenizer``; safe to share between threads (no state after construction)."""

    def __init__(self, backend: _Backend) -> None:
        backend.encode_special_tokens = True
        self._backend = backend
        self._special = {
            added.content: token_id
            for token_id, added in backend.get_added_tokens_decoder().items()
            if added.special
        }
        self.special_ids: frozenset[int] = frozenset(self._special.values())
        """Every id that ``encode`` never yields."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._byte_level = isinstance(backend.decoder, _decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {
            token_id: added.content.encode() for token_id, added in backend.get_added_tokens_decoder().items()
        }

    @classmethod
    def load(cls, policy_dir: str | Path, is_mark: Callable[[str], bool] | None = None) -> PolicyTokenizer:
        """Read ``<policy_dir>/tokenizer.json``. Raises FileNotFoundError naming the path when it is missing.

        is_mark: tells added tokens that are special here whatever the file says: Qwen's does not call ``<tool_call>``
        and ``<think>`` special, so text that spells them would become them.
        """
        path = Path(policy_dir) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}: a policy directory has config.json, model.safetensors, tokenizer.json"
            )
        if is_mark is None:
            return cls(_Backend.from_file(str(path)))
        described: dict[str, Any] = orjson.loads(path.read_bytes())
        for added in described.get("added_tokens", ()):
            added["special"] = added["special"] or is_mark(added["content"])
        return cls(_Backend.from_str(orjson.dumps(described).decode()))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with no special token added and none recognized.

        Raises ValueError for text with a lone surrogate (JSON can spell one): it has no UTF-8 form, hence no tokens.
        """
        try:
            if len(text) < _SHORT:
                return self._backend.encode(text, add_special_tokens=False).ids
            # `encode` holds the interpreter for as long as the text takes; this one does not, and knows no offsets.
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is None:
                raise
            raise ValueError(
                f"text has a lone surrogate {text[at]!r} at character {at}: replace it before encoding"
            ) from error

    def decode(self, ids: Sequence[int], keep_special: bool) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD. Special tokens are written out or left out."""
        return self._backend.decode(list(ids), skip_special_tokens=not keep_special)

    def special(self, text: str) -> int | None:
        """The id of the special token spelled ``text``, or None when this vocabulary has none."""
        return self._special.get(text)

    def encode_trusted(self, text: str) -> list[int]:
        """Token ids of ``text`` with special tokens recognized in it, as the vocabulary's own tokenizer has them.

        For comparing at start-up: not while another thread encodes.
        """
        self._backend.encode_special_tokens = False
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = True

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled ``text``, special or not; None when this vocabulary has none."""
        return self._backend.token_to_id(text)

    @property
    def specials(self) -> Mapping[str, int]:
        """The special tokens' ids by their text."""
        return self._special

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; b"" for an id that the vocabulary does not have. UTF-8, but that a
        character's bytes may be spread over several tokens."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._read_bytes(token, self._backend.id_to_token(token) or "")
        return found

    def _read_bytes(self, token: int, text: str) -> bytes:
        if self._byte_level:
            spelled = all(c in _BYTE_OF for c in text)
            return bytes(_BYTE_OF[c] for c in text) if spelled else text.encode()
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(byte[1], 16)])
        # Behind another token: SentencePiece's decoders take white space from the beginning of a text.
        before = self.encode("a")
        known = self.decode(before, keep_special=True)
        return self.decode([*before, token], keep_special=True)[len(known) :].encode()
