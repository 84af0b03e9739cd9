"""A renderer over a model family's own template: what it renders of a dialogue is only the turns that are new.

A `Source` gives each turn's tokens, taken from renderings of small fixed dialogues; `probe` proves, before anything is
rendered, that they put together what the template renders of whole dialogues. The proof is for dialogues without
earlier reasoning: some templates take it out of history, while what was sampled stays as it was sampled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pipeline.capture.call import ToolChoice
from pipeline.capture.dialogue import Dialogue, split_system, turns
from pipeline.capture.messages import Message, Tool
from pipeline.capture.renderers.base import TurnParser
from pipeline.capture.renderers.forms import ReasoningForm, ToolForm
from pipeline.capture.renderers.parsing import Grammar
from pipeline.capture.tokenizer import PolicyTokenizer


class Reader(Protocol):
    """Makes parsers of sampled turns: a `Grammar`, or a family's own reader of whole turns."""

    def parser(
        self,
        opening: Sequence[int] = (),
        stop: Sequence[str] = (),
        parallel: bool = True,
        tools: Sequence[Tool] = (),
    ) -> TurnParser: ...


class Source(Protocol):
    """A family's template. Every method raises ValueError for what the template has no place for.

    `tools`: whether the dialogue offers any.
    """

    @property
    def family(self) -> str: ...

    @property
    def tokenizer(self) -> PolicyTokenizer: ...

    @property
    def images(self) -> bool: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tools(self) -> bool:
        """Whether the template shows tools to the policy."""
        ...

    def preamble(self, tools: Sequence[Tool], system: str | None) -> list[int]: ...

    def turn(self, messages: Sequence[Message], tools: bool) -> list[int]:
        """One message, or consecutive tool messages."""
        ...

    def prompt(self) -> list[int]:
        """The generation prompt."""
        ...

    def close(self) -> list[int]:
        """What follows the text of a turn of the policy, its end token first."""
        ...

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The template's own rendering of a dialogue, with the generation prompt, for the probe."""
        ...

    def reader(self) -> Reader | None:
        """What reads the family's turns where no form of ours does."""
        ...


class SuffixRenderer:
    """See `Renderer`. Stateless after construction; safe to share between threads. Not proven yet: see `probe`.

    blank: what the template writes between a call's mark and its body. reader: reads turns, in place of the forms.
    """

    def __init__(
        self,
        source: Source,
        calls: ToolForm | None,
        reasoning: ReasoningForm | None,
        blank: str = "",
        reader: Reader | None = None,
    ) -> None:
        self.source = source
        self.family = source.family
        self.tokenizer = source.tokenizer
        self.images = source.images
        self.stop_token_ids = source.stop_token_ids
        self.calls, self.reasoning = calls, reasoning
        self._blank = blank
        self._prompt, self._close = source.prompt(), source.close()
        self._thinking = reasoning is not None and self._opens_thinking(reasoning)
        self._reader = reader or Grammar(source.tokenizer, calls, reasoning, self._thinking)
        self.reader = reader or Grammar(source.tokenizer, calls, reasoning)
        """Reads a turn that has its reasoning's opening in itself."""

    def steps(self, dialogue: Dialogue, first: int) -> list[list[int]]:
        """See ``Renderer.steps``."""
        if dialogue.tools and not self.source.tools:
            raise ValueError(
                f"{self.family}: its chat template does not show tools, the dialogue offers some"
            )
        system, rest = split_system(dialogue)
        if len(rest) < len(dialogue.messages) and dialogue.messages[0].images:
            raise ValueError("the system text holds an image: images belong to user and tool messages")
        rendered = [self.source.preamble(dialogue.tools, system)] if first == 0 else []
        found, offered = turns(rest), bool(dialogue.tools)
        for i in range(max(first - 1, 0), len(found)):
            turn = _named(found[i], found[i - 1]) if i else found[i]
            rendered.append(self.source.turn(turn, offered))
        return rendered

    def lead(self, choice: ToolChoice) -> tuple[list[int], list[int]]:
        """See ``Renderer.lead``. A choice that is forced where the template opens the reasoning closes it first."""
        if choice.mode != "required":
            return [*self._prompt], []
        if self.calls is None:
            raise ValueError(f"{self.family}: its calls have no form that is known, so none can be forced")
        opening: list[int] = []
        if self._thinking and self.reasoning is not None:
            opening += self.mark(self.reasoning.close) + self.tokenizer.encode("\n\n")
        opening += self.mark(self.calls.open)
        if choice.name is not None:
            opening += self.tokenizer.encode(self._blank + self.calls.force(choice.name))
        return [*self._prompt], opening

    def tail(self, turn: Sequence[int]) -> list[int]:
        """See ``Renderer.tail``."""
        return self._close[1:] if turn and turn[-1] == self._close[0] else [*self._close]

    def parser(
        self,
        opening: Sequence[int] = (),
        stop: Sequence[str] = (),
        parallel: bool = True,
        tools: Sequence[Tool] = (),
    ) -> TurnParser:
        """See ``Renderer.parser``."""
        return self._reader.parser(opening, stop, parallel, tools)

    def mark(self, text: str) -> list[int]:
        token = self.tokenizer.special(text)
        return self.tokenizer.encode(text) if token is None else [token]

    def _opens_thinking(self, reasoning: ReasoningForm) -> bool:
        text = self.tokenizer.decode(self._prompt, keep_special=True)
        return text.rfind(reasoning.open) > text.rfind(reasoning.close)


def _named(turn: Sequence[Message], before: Sequence[Message]) -> Sequence[Message]:
    """Results with the names of the tools that were called: some templates write them, and clients may leave them out."""
    names = {call.id: call.name for message in before for call in message.tool_calls}
    return [
        replace(message, name=names.get(message.tool_call_id or ""))
        if message.role == "tool" and message.name is None
        else message
        for message in turn
    ]
