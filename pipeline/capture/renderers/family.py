"""Model families that the package `renderers` knows, turn by turn.

The package renders whole dialogues, or bridges from one turn to the next; it takes text that spells a special token for
one. So each turn's tokens are cut from its renderings of small fixed dialogues, it is given escaped text only
(see `Guard`), and what it bridges must be the same turns. Where the policy's directory has a chat template, that is what
its renderings of whole dialogues are held against.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.capture.messages import Message, Tool
from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.guard import Guard
from pipeline.capture.renderers.jinja import Arguments, CannotRender, ChatTemplate
from pipeline.capture.renderers.whole_turn import PackageReader
from pipeline.capture.renderers.wire import PROBE, Wire, answering, calling, offer, user, wire
from pipeline.capture.tokenizer import PolicyTokenizer


def available() -> bool:
    """Whether the package is installed, with what it imports (httpx, which it does not declare)."""
    return all(importlib.util.find_spec(name) is not None for name in ("renderers", "httpx"))


def names() -> list[str]:
    return sorted(set(_families().values()))


def known(policy_dir: Path) -> list[str]:
    """Families that a policy may be of by its published name: ``_name_or_path`` of its configuration, else the last part of
    its directory's name, which several may share."""
    if not available():
        return []
    by_name = _families()
    path = policy_dir / "config.json"
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    published = str(config.get("_name_or_path", ""))
    if published in by_name:
        return [by_name[published]]
    last = policy_dir.resolve().name
    return sorted({family for name, family in by_name.items() if name.rpartition("/")[2] == last})


def _families() -> Mapping[str, str]:
    """Family by published name."""
    return importlib.import_module("renderers.base").MODEL_RENDERER_MAP


class FamilySource:
    """See `Source`. Raises TemplateError where the family's turns cannot be told apart."""

    def __init__(
        self, family: str, tokenizer: PolicyTokenizer, renderer: Any, template: ChatTemplate | None
    ) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self.package = renderer
        self._template = template
        self._guard = Guard(tokenizer)
        try:
            self._before = {tools: self._ids([user("a")], tools) for tools in (False, True)}
            self._close = self._end_of_turn()
            self._prompt = _cut(self._ids([user("a")], False, prompt=True), self._before[False])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise TemplateError(f"{family}: its turns cannot be told apart: {error}") from error
        stops = [int(token) for token in renderer.get_stop_token_ids()]
        self.stop_token_ids = (self._close[0], *(token for token in stops if token != self._close[0]))
        self.tools = self._before[True] != self._before[False]
        self.images = self._shows_images()

    @classmethod
    def load(
        cls, policy_dir: Path, family: str, is_mark: Callable[[str], bool], template: ChatTemplate | None
    ) -> FamilySource:
        """Raises TemplateError for a family that the package does not know, and without the package."""
        if not available():
            raise TemplateError(
                f"{family}: the package `renderers` is not installed with httpx: pip install renderers httpx, or "
                "engine.renderer = template"
            )
        if family not in names():
            raise TemplateError(f"{family}: the package `renderers` knows {', '.join(names())}")
        asked: set[str] = set()
        tokenizer, renderer = _made(policy_dir, family, is_mark, template, asked)
        # Tokens that it takes by name are marks, whatever the vocabulary calls them.
        if not asked <= set(tokenizer.specials):
            tokenizer, renderer = _made(
                policy_dir, family, lambda text: is_mark(text) or text in asked, template, set()
            )
        return cls(family, tokenizer, renderer, template)

    def preamble(self, tools: Sequence[Tool], system: str | None) -> list[int]:
        first = [] if system is None else [wire(Message("system", system), self._guard)]
        offered = [offer(tool, self._guard) for tool in tools]
        whole = self._whole([*first, user("a")], offered, False)
        turn = self.turn((Message("user", "a"),), bool(tools))
        if whole[len(whole) - len(turn) :] != turn:
            raise CannotRender(f"{self.family} writes the system text into the first user's turn")
        return whole[: len(whole) - len(turn)]

    def turn(self, messages: Sequence[Message], tools: bool) -> list[int]:
        return self._turn([wire(message, self._guard) for message in messages], tools)

    def prompt(self) -> list[int]:
        return self._prompt

    def close(self) -> list[int]:
        return self._close

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        wired = [wire(message, self._guard) for message in messages]
        offered = [offer(tool, self._guard) for tool in tools]
        rendered = self._whole(wired, offered, True)
        if self._template is not None:
            text = self._guard.unescape(self._template.render(wired, offered, True))
            if self.tokenizer.encode_trusted(text) != rendered:
                raise TemplateError(
                    f"{self.family}: the package `renderers` renders {[m.role for m in messages]} differently from the "
                    "chat template in the policy's directory"
                )
        self._bridged(messages, wired, offered)
        return rendered

    def reader(self) -> PackageReader:
        return PackageReader(self.package, self.tokenizer, self._prompt)

    def _bridged(self, messages: Sequence[Message], wired: Sequence[Wire], offered: Sequence[Wire]) -> None:
        """The package's own bridge over the last sampled turn must go on with the same turns."""
        at = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
        if at < 0:
            return
        before = self._whole(wired[:at], offered, True)
        said = [*self.tokenizer.encode("It is 15."), self._close[0]]
        bridge = self.package.bridge_to_next_turn(
            before, said, list(wired[at + 1 :]), tools=list(offered) or None
        )
        if bridge is None:
            # It renders such a dialogue anew, as the template does, to take out earlier reasoning.
            return
        ours = [*before, *said, *self._close[1:]]
        for turn in _grouped(wired[at + 1 :]):
            ours += self._turn(turn, bool(offered))
        if ours + self._prompt != list(bridge.token_ids):
            raise TemplateError(
                f"{self.family}: the turns differ from those that the package `renderers` bridges to"
            )

    def _turn(self, turn: Sequence[Wire], tools: bool) -> list[int]:
        role = turn[0]["role"]
        if role == "assistant":
            follow = answering(turn[0], "b")
            ids = _cut(self._ids([user("a"), turn[0], *follow], tools), self._before[tools])
            tail = self._turn(follow, tools)
            if ids[len(ids) - len(tail) :] != tail:
                raise CannotRender(f"{self.family} rewrites a turn of the policy by what follows it")
            return ids[: len(ids) - len(tail)]
        said = calling("b", turn) if role == "tool" else {"role": "assistant", "content": "b"}
        try:
            ids = self._ids([user("a"), said, *turn], tools)
        except CannotRender:
            if role != "system":
                raise
            # No place for a system text that comes later: an instruction is then the user's.
            return self._turn([{**turn[0], "role": "user"}], tools)
        ids = _cut(ids, self._before[tools])
        end = ids.index(self._close[0]) if self._close[0] in ids else len(ids)
        return _cut(ids[end:], self._close)

    def _end_of_turn(self) -> list[int]:
        """What the package says was sampled last in a turn of the policy, and what it says was not, after it."""
        rendered = self.package.render([user("a"), {"role": "assistant", "content": "b"}, user("a")])
        own = [i for i, message in enumerate(rendered.message_indices) if message == 1]
        sampled = [i for i in own if rendered.sampled_mask[i]]
        end = rendered.token_ids[sampled[-1]]
        if end not in self.tokenizer.special_ids:
            raise CannotRender("a turn of the policy does not end with a special token of its own")
        return [end, *(rendered.token_ids[i] for i in own if i > sampled[-1])]

    def _shows_images(self) -> bool:
        # The package counts an image's tokens itself, from pixels and with the family's processor; engines do so here.
        return False

    def _ids(self, messages: Sequence[Wire], tools: bool, prompt: bool = False) -> list[int]:
        return self._whole(messages, [offer(PROBE)] if tools else [], prompt)

    def _whole(self, messages: Sequence[Wire], tools: Sequence[Wire], prompt: bool) -> list[int]:
        for message in messages:
            if not isinstance(message["content"], str):
                raise CannotRender(f"{self.family}: images are not rendered with the package `renderers`")
        plain = [self._plain(message) for message in messages]
        try:
            ids = self.package.render_ids(plain, tools=list(tools) or None, add_generation_prompt=prompt)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise CannotRender(f"{self.family}: the package `renderers` says: {error}") from error
        return list(ids)

    def _plain(self, message: Wire) -> Wire:
        """Arguments as the text that they were written as, unless reading it would bring out a special token."""
        if not message.get("tool_calls"):
            return {name: value for name, value in message.items() if name != "tool_calls"}
        calls: list[Wire] = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            arguments = function["arguments"]
            if isinstance(arguments, Arguments) and json.loads(arguments.text, strict=False) == arguments:
                function["arguments"] = arguments.text
            calls.append({**call, "function": function})
        return {**message, "tool_calls": calls}


def _made(
    policy_dir: Path,
    family: str,
    is_mark: Callable[[str], bool],
    template: ChatTemplate | None,
    asked: set[str],
) -> tuple[PolicyTokenizer, Any]:
    tokenizer = PolicyTokenizer.load(policy_dir, is_mark)
    package, configs = importlib.import_module("renderers"), importlib.import_module("renderers.configs")
    # By name, as its own registry has it: there is no public way from a name to its configuration.
    config = configs._config_class_for(family)()
    try:
        return tokenizer, package.create_renderer(_Shim(tokenizer, family, template, asked), config)
    except Exception as error:  # thirty families' code, with dependencies of its own
        raise TemplateError(f"{family}: the package `renderers` refuses the tokenizer: {error!r}") from error


class _Shim:
    """What the package takes for a tokenizer. `asked`: gets the tokens that it asks for by name."""

    def __init__(
        self, tokenizer: PolicyTokenizer, family: str, template: ChatTemplate | None, asked: set[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self._asked = asked
        self.name_or_path = family
        self.unk_token_id: int | None = None
        eos = None if template is None else template.special("eos_token")
        self.eos_token_id = tokenizer.special(eos or "")
        self.chat_template = template.source if template is not None else None

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._guard.encode(text)

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, keep_special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._tokenizer.token_id(tokens)
        if found is not None:
            self._asked.add(tokens)
        return found


def _cut(ids: list[int], known: Sequence[int]) -> list[int]:
    if ids[: len(known)] != list(known):
        raise CannotRender("what was there before is rewritten once a turn follows")
    return ids[len(known) :]


def _grouped(messages: Sequence[Wire]) -> list[list[Wire]]:
    found: list[list[Wire]] = []
    for message in messages:
        if message["role"] == "tool" and found and found[-1][0]["role"] == "tool":
            found[-1].append(message)
        else:
            found.append([message])
    return found
