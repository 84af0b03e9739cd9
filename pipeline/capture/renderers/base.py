"""The seam between capture and a model family: a dialogue's turns as tokens, and a sampled turn's tokens as text and calls.

A renderer promises, and probes at construction (it raises `TemplateError`, naming the family and the promise):
- append-only: the rendering of a dialogue is the concatenation of the renderings of its steps
  (`pipeline.capture.dialogue.steps`), so only the new suffix is ever rendered and tokenized;
- no text that anyone writes becomes a special token, and no special token is ever shown as text;
- a tool call and a reasoning that it writes are what its parser reads back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.capture.call import Piece, ToolChoice
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import ParsedTurn, Tool


class TemplateError(ValueError):
    """The tokenizer and the template do not fit; the message says which promise fails."""


@dataclass(frozen=True, slots=True)
class Fed:
    """What some sampled tokens added. `keep` is how many of them belong to the turn when it ends among them, else None."""

    pieces: tuple[Piece, ...]
    keep: int | None = None


class TurnParser(Protocol):
    """Reads one sampled turn while it is sampled. Not shared between threads."""

    def feed(self, ids: Sequence[int]) -> Fed:
        """`ids`: the next sampled tokens, without the opening that was forced. Text that may turn out to be the beginning
        of a stop text or of a mark, half a character, and white space at the end are held back until they are decided.
        """
        ...

    def finish(self) -> tuple[tuple[Piece, ...], ParsedTurn]:
        """The pieces held back, and the whole turn: equal to all the pieces. Call ids are "" in both."""
        ...

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the turn."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far are reasoning, its marks included."""
        ...


class Renderer(Protocol):
    """Stateless after construction; safe to share between threads."""

    @property
    def family(self) -> str:
        """The model family, for errors and logs."""
        ...

    @property
    def images(self) -> bool:
        """Whether it can render an image; a dialogue with one is refused at the door otherwise."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sampled turn."""
        ...

    def steps(self, dialogue: Dialogue, first: int) -> list[list[int]]:
        """Token ids of the dialogue's steps from number `first` on, one list a step; [] for a step without tokens (a
        preamble of no tools and no system text).

        Raises ValueError for what cannot be rendered, lone surrogates among it.
        """
        ...

    def lead(self, choice: ToolChoice) -> tuple[list[int], list[int]]:
        """(the generation prompt, the opening that forces the choice): what a sampled turn follows. The opening is [] when
        nothing is forced; it belongs to the turn's text and is not sampled."""
        ...

    def tail(self, turn: Sequence[int]) -> list[int]:
        """What the template wants after a turn (opening and sampled ids): engines stop at the end-of-turn token or at the
        length limit, before what closes it. Never sampled, so never trained."""
        ...

    def parser(
        self,
        opening: Sequence[int] = (),
        stop: Sequence[str] = (),
        parallel: bool = True,
        tools: Sequence[Tool] = (),
    ) -> TurnParser:
        """A parser for one turn. `opening`: as `lead` gave it; `stop`: texts that end the turn in what is shown;
        `parallel` False: the turn ends with its first tool call; `tools`: those offered, by whose schemas some forms of
        call tell a number from text."""
        ...
