"""Vocabularies for tests of renderers: small, real, with the special tokens that a test names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pipeline.capture.tokenizer import PolicyTokenizer

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
THINK_MARKS = ("<think>", "</think>")
VISION_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


@cache
def byte_level(specials: Sequence[str]) -> PolicyTokenizer:
    """A byte-level vocabulary: text that it does not know is a token a byte."""
    return PolicyTokenizer(_byte_level(specials, ()))


@cache
def byte_fallback(specials: Sequence[str]) -> PolicyTokenizer:
    """A vocabulary as SentencePiece makes them: white space as U+2581, unknown characters as tokens of their bytes."""
    known = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for text in ["\u2581", *'abcdefghijklmnopqrstuvwxyz{}[]:,.<>/_|"', "al", "cal", "too"]:
        known.setdefault(text, len(known))
    backend = Tokenizer(
        models.BPE(vocab=known, merges=[("a", "l"), ("c", "al")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(list(specials))
    return PolicyTokenizer(backend)


def policy(
    folder: Path, template: str, specials: Sequence[str], added: Sequence[str] = (), eos: str = ""
) -> Path:
    """A policy directory with a chat template. `added` are tokens that the vocabulary does not call special."""
    folder.mkdir(parents=True, exist_ok=True)
    _byte_level(specials, added).save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": template,
        "eos_token": eos or specials[0],
        "bos_token": {"content": specials[0]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_level(specials: Sequence[str], added: Sequence[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(['user\nassistant\nsystem\ntool\n{"name": "look", "arguments": {}}'], trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return backend
