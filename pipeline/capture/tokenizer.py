"""A policy's tokenizer: text that anyone can write never becomes a special token.

Promises: ``encode`` yields no special id whatever the text (``<|im_end|>`` in a web page is ordinary tokens);
special ids enter a sequence only through ``special``. ``decode(encode(text), keep_special=False) == text`` for byte-level
vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend


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
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, policy_dir: str | Path) -> PolicyTokenizer:
        """Read ``<policy_dir>/tokenizer.json``. Raises FileNotFoundError naming the path when it is missing."""
        path = Path(policy_dir) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}: a policy directory has config.json, model.safetensors, tokenizer.json"
            )
        return cls(_Backend.from_file(str(path)))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with no special token added and none recognized.

        Raises ValueError for text with a lone surrogate (JSON can spell one): it has no UTF-8 form, hence no tokens.
        """
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
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

    @property
    def special_ids(self) -> frozenset[int]:
        """Every id that ``encode`` never yields."""
        return frozenset(self._special.values())
