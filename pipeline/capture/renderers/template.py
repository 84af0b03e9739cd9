"""Any model family that ships a chat template: each turn's tokens out of renderings of small fixed dialogues.

A turn is what follows a known turn's text in such a rendering, up to the known beginning of what comes after it. What
the template makes of a message's content (trimming, say) it makes of it here too, but never a special token: see `Guard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.capture.messages import Image, Message, Tool
from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.guard import SENTINELS, Guard
from pipeline.capture.renderers.jinja import CannotRender, ChatTemplate
from pipeline.capture.renderers.wire import PROBE, Wire, answering, calling, offer, user, wire
from pipeline.capture.tokenizer import PolicyTokenizer

_FIRST, _SECOND, _LAST = SENTINELS


@dataclass(frozen=True, slots=True)
class _Shape:
    """The template's own text around turns: before and after a user's text, after the policy's text and call."""

    user: str
    after_user: str
    after_text: str
    prompt: str


class TemplateSource:
    """See `Source`. `stops`: tokens that end a turn besides the template's own end and ``eos_token``. Raises TemplateError where the template has no turns that a sampled one could follow."""

    def __init__(
        self, family: str, tokenizer: PolicyTokenizer, template: ChatTemplate, stops: Iterable[int] = ()
    ) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self._template = template
        self._guard = Guard(tokenizer)
        self._shapes = {False: self._shape(False)}
        self.tools = self._shows_tools()
        if self.tools:
            self._shapes[True] = self._shape(True)
        self._prompt = self._guard.encode(self._shapes[self.tools].prompt)
        self._close = self._guard.encode(self._shapes[self.tools].after_text)
        if not self._close or self._close[0] not in tokenizer.special_ids:
            raise TemplateError(
                f"{family}: its chat template ends a turn of the policy with {self._shapes[False].after_text!r}, which "
                "does not begin with a special token: nothing would tell where a sampled turn ends"
            )
        eos = tokenizer.special(template.special("eos_token") or "")
        ends = [self._close[0], *([] if eos is None else [eos]), *stops]
        self.stop_token_ids = tuple(dict.fromkeys(ends))
        self.images = self._shows_images()

    def preamble(self, tools: Sequence[Tool], system: str | None) -> list[int]:
        shape = self._shapes[bool(tools)]
        first = [] if system is None else [wire(Message("system", system), self._guard)]
        text = self._render([*first, user(_FIRST)], [offer(tool, self._guard) for tool in tools])
        before = text[: text.index(_FIRST)]
        if not before.endswith(shape.user):
            raise CannotRender(
                f"{self.family}: its chat template writes the system text into the first user's turn"
            )
        return self._guard.encode(before[: len(before) - len(shape.user)])

    def turn(self, messages: Sequence[Message], tools: bool) -> list[int]:
        return self._guard.encode(self._turn([wire(message, self._guard) for message in messages], tools))

    def prompt(self) -> list[int]:
        return self._prompt

    def close(self) -> list[int]:
        return self._close

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        wired = [wire(message, self._guard) for message in messages]
        text = self._render(wired, [offer(tool, self._guard) for tool in tools], prompt=True)
        return self.tokenizer.encode_trusted(self._guard.unescape(text))

    def reader(self) -> None:
        return None

    def _turn(self, turn: list[Wire], tools: bool) -> str:
        shape, role = self._shapes[tools], turn[0]["role"]
        if role == "assistant":
            return self._assistant(turn[0], tools)
        if role == "tool":
            known = [user(_FIRST), calling(_SECOND, turn)]
            after = self._after(known, _SECOND, tools)
            return _cut(self._after([*known, *turn], _SECOND, tools), after, "a tool's result")
        known = [user(_FIRST), {"role": "assistant", "content": _SECOND}]
        try:
            return _cut(self._after([*known, *turn], _SECOND, tools), shape.after_text, "a user's turn")
        except CannotRender:
            if role != "system":
                raise
            # No place for a system text that comes later: an instruction is then the user's.
            return self._turn([{**turn[0], "role": "user"}], tools)

    def _assistant(self, turn: Wire, tools: bool) -> str:
        """As it stands once the turn after it is asked for: that is what templates let see of its reasoning."""
        follow = answering(turn, _LAST)
        text = self._after([user(_FIRST), turn, *follow], _FIRST, tools)
        text = _cut(text, self._shapes[tools].after_user, "a turn of the policy")
        tail = self._turn(follow, tools)
        if not text.endswith(tail):
            raise CannotRender(
                f"{self.family}: its chat template rewrites a turn of the policy by what follows it"
            )
        return text[: len(text) - len(tail)]

    def _shape(self, tools: bool) -> _Shape:
        try:
            one = [user(_FIRST)]
            after_user = self._after(one, _FIRST, tools)
            prompt = _cut(self._after(one, _FIRST, tools, prompt=True), after_user, "the generation prompt")
            two = [*one, {"role": "assistant", "content": _SECOND}]
            after_text = self._after(two, _SECOND, tools)
            third = self._after([*two, user(_LAST)], _SECOND, tools)
            third = _cut(third, after_text, "a user's turn")
            return _Shape(third[: third.index(_LAST)], after_user, after_text, prompt)
        except ValueError as error:
            raise TemplateError(
                f"{self.family}: its chat template cannot be used turn by turn: {error}"
            ) from error

    def _shows_tools(self) -> bool:
        marked = replace(PROBE, description=_LAST)
        try:
            return _LAST in self._render([user(_FIRST)], [offer(marked)])
        except CannotRender:
            return False

    def _shows_images(self) -> bool:
        image = Image("0" * 64, "image/png", b"")
        try:
            text = self._guard.encode(self._turn([wire(Message("user", ("a", image)), self._guard)], False))
            plain = self._guard.encode(self._turn([wire(Message("user", "a"), self._guard)], False))
        except (ValueError, TypeError):
            return False
        at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), len(plain))
        added = len(text) - len(plain)
        specials = self.tokenizer.special_ids
        return added > 0 and set(text[at : at + added]) <= specials and text[at + added :] == plain[at:]

    def _after(self, messages: Sequence[Wire], sentinel: str, tools: bool, prompt: bool = False) -> str:
        text = self._render(messages, [offer(PROBE)] if tools else [], prompt)
        at = text.rfind(sentinel)
        if at < 0:
            raise CannotRender("it leaves out a message's text")
        return text[at + len(sentinel) :]

    def _render(self, messages: Sequence[Wire], tools: Sequence[Wire], prompt: bool = False) -> str:
        return self._template.render(messages, tools, prompt)


def _cut(text: str, known: str, what: str) -> str:
    if not text.startswith(known):
        raise CannotRender(
            f"it rewrites what was there before, once {what} follows: {text!r} is no longer {known!r}"
        )
    return text[len(known) :]
