"""A policy directory's chat template, in the environment that Hugging Face runs templates in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class CannotRender(ValueError):
    """The template raised an error, or has no place for what it was given."""


class Arguments(dict[str, Any]):
    """A call's arguments: a template that writes them as JSON writes the text that they were written as."""

    text: str = ""


class _Generation(Extension):
    """``{% generation %}`` marks what a model writes, for training masks; here it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Safe to share between threads. The date that a template asks for is that of construction, so that a dialogue is
    rendered the same at any hour."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(variables)
        now = time.localtime()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )

        def strftime_now(form: str) -> str:
            return time.strftime(form, now)

        filters = cast("dict[str, Any]", environment.filters)  # pyright: ignore[reportUnknownMemberType] - untyped there
        filters["tojson"] = _to_json
        names = cast("dict[str, Any]", environment.globals)  # pyright: ignore[reportUnknownMemberType] - untyped there
        names |= {"raise_exception": _raise, "strftime_now": strftime_now}
        try:
            self._template = environment.from_string(source)
        except JinjaError as error:
            raise CannotRender(f"the chat template is not valid: {error}") from error

    @classmethod
    def load(cls, policy_dir: str | Path) -> ChatTemplate | None:
        """From ``chat_template.jinja``, else ``tokenizer_config.json``; None where neither has one."""
        folder = Path(policy_dir)
        config: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_bytes())
        source: Any = config.get("chat_template")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text()
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", source)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        texts = {name: _text_of(config.get(name)) for name in _SPECIALS}
        return cls(source, {name: text for name, text in texts.items() if text is not None})

    def special(self, name: str) -> str | None:
        """The text of ``eos_token`` and the like."""
        return self._variables.get(name)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool
    ) -> str:
        """The dialogue as text, with the generation prompt when `prompt`. Raises CannotRender."""
        try:
            # Llama's puts the tools into the first user turn otherwise.
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=prompt,
                tools_in_user_message=False,
                **self._variables,
            )
        except (
            JinjaError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            raise CannotRender(f"the chat template says: {error}") from error


def _text_of(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - JSON


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if isinstance(value, Arguments):
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise JinjaError(message)
