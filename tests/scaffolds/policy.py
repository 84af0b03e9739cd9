"""A policy double for scaffolds: emits the turns that a script chooses and keeps what it was given and what it gave.

Every token that it ever emits has a log-probability of its own, exact in float32, so that a token is told from its copies.
"""

from __future__ import annotations

import contextvars
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.base import EngineUnavailable, Generation
from tests.capture_parts import SPECIALS, Reply, ScriptedEngine

ASKED: contextvars.ContextVar[Any] = contextvars.ContextVar("asked", default=None)
"""The exchange that a generation belongs to: set where the request comes in, seen by the task that samples for it."""

_MARKS = re.compile("(</?tool_call>|</?think>)")


@cache
def thinking_renderer() -> ChatMLRenderer:
    """ChatML over a byte-level vocabulary that has the marks of tool calls and of reasoning."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*SPECIALS, "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user\nassistant\nsystem\ntool\n"], trainer)
    return ChatMLRenderer(PolicyTokenizer(backend))


def call(name: str, **arguments: Any) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def think(text: str) -> str:
    return f"<think>{text}</think>"


@dataclass(frozen=True, slots=True)
class Scene:
    """What the policy is asked: (role, text) of every turn, the tools' and system text first if there is any. `headers` are
    the request's, with lower-case names."""

    turns: tuple[tuple[str, str], ...]
    headers: dict[str, str]

    @property
    def system(self) -> str:
        return "\n".join(text for role, text in self.turns if role == "system")

    @property
    def first(self) -> str:
        """The first turn that is no system text."""
        return next(text for role, text in self.turns if role != "system")

    @property
    def last(self) -> str:
        """The last turn that is no system text."""
        return next(text for role, text in reversed(self.turns) if role != "system")

    @property
    def said(self) -> int:
        """Assistant turns so far."""
        return sum(role == "assistant" for role, _ in self.turns)

    @property
    def tools(self) -> bool:
        return "\nTools:\n{" in f"\n{self.turns[0][1]}" and self.turns[0][0] == "system"


Play = Callable[[Scene], Reply]
_SCENE: contextvars.ContextVar[Scene] = contextvars.ContextVar("scene")


@dataclass(frozen=True, slots=True)
class Emission:
    """A turn that was sampled: for which exchange, from which prompt."""

    exchange: Any
    prompt: tuple[int, ...]
    generation: Generation


class Policy(ScriptedEngine):
    """`trouble`: errors to raise instead of a generation, by how many were asked for, from 1."""

    def __init__(self, play: Play) -> None:
        super().__init__(lambda _: play(_SCENE.get()), thinking_renderer())
        self.portion = 4
        self.emissions: list[Emission] = []
        self.on_portion: Callable[[], None] = lambda: None
        self.trouble: dict[int, EngineUnavailable] = {}
        self.asked = 0
        self._emitted = 0

    async def step(self) -> None:
        self.on_portion()
        await super().step()

    async def generate(self, token_ids: Any, *given: Any, **named: Any) -> Generation:
        self.asked += 1
        if error := self.trouble.pop(self.asked, None):
            raise error
        exchange = ASKED.get()
        # A generation is a task of its own, so this is seen by no other.
        _SCENE.set(Scene(self.turns_of(token_ids)[:-1], exchange.headers if exchange else {}))
        made = await super().generate(token_ids, *given, **named)
        first, self._emitted = self._emitted, self._emitted + len(made.token_ids)
        logprobs = tuple(-(first + i + 1) / 65536 for i in range(len(made.token_ids)))
        made = replace(made, logprobs=logprobs)
        self.emissions.append(Emission(exchange, tuple(map(int, token_ids)), made))
        # A turn that is not watched has no portions.
        self.on_portion()
        return made

    def turns_of(self, ids: Sequence[int]) -> tuple[tuple[str, str], ...]:
        """(role, text) of the turns of a prompt, special tokens written out; the last is the header that asks for one."""
        tokenizer = self.renderer.tokenizer
        start = tokenizer.special("<|im_start|>")
        ids = list(map(int, ids))
        begins = [i for i, token in enumerate(ids) if token == start]
        found: list[tuple[str, str]] = []
        for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
            role, _, text = tokenizer.decode(ids[begin + 1 : end], keep_special=True).partition("\n")
            found.append((role, text.removesuffix("\n").removesuffix("<|im_end|>")))
        return tuple(found)

    def turn(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _MARKS.split(text):
            mark = self.renderer.tokenizer.special(piece) if _MARKS.fullmatch(piece) else None
            ids += self.renderer.tokenizer.encode(piece) if mark is None else [mark]
        return [*ids, self.renderer.stop_token_ids[0]]
