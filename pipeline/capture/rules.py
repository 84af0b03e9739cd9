"""What a scaffold's adapter declares about its requests: which header names the agent, which requests are auxiliary.

Pure. The core knows no scaffold: an adapter's rules are data, read by `classify`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pipeline.capture.call import Call
from schemas.config import Pool
from schemas.names import Name, checked_name

LABELS = ("title", "probe", "auxiliary", "summary", "compaction", "subagent")
"""Labels of the rules that ship, and of other agents' contexts."""
_HEAD, _TAIL = 4 << 10, 16 << 10


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A kind of request that is not the agent's own dialogue. It matches when all that it gives hold.

    `header`: name (lower case) and a pattern that its value matches; `system`, `first`, `last`: patterns found in the
    system text, in the first and in the last message's text (of a long one, in its first 4 Ki and last 16 Ki characters:
    what an agent sends is not searched in other tenants' time); `tools`: whether tools are offered; `model`: a pattern
    that the model's name matches; `max_tokens`: the most that it asks for. Raises ValueError.
    """

    label: Name
    header: tuple[str, str] | None = None
    system: str | None = None
    first: str | None = None
    last: str | None = None
    tools: bool | None = None
    model: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        # A context that is exported has it for its label.
        checked_name(self.label, "the label of an auxiliary kind")
        name, value = self.header or ("", None)
        _lower(name)
        for pattern in (value, self.system, self.first, self.last, self.model):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{self.label}: {pattern!r} is no pattern: {error}") from None

    def matches(self, call: Call, headers: Mapping[str, str]) -> bool:
        messages = call.dialogue.messages
        return (
            (self.tools is None or self.tools == bool(call.dialogue.tools))
            and (
                self.max_tokens is None
                or (call.max_tokens is not None and call.max_tokens <= self.max_tokens)
            )
            and (self.header is None or _full(self.header[1], headers.get(self.header[0], "")))
            and (self.model is None or _full(self.model, call.model))
            and _found(self.system, (m.text for m in messages if m.role == "system"), "\n")
            and _found(self.first, islice((m.text for m in messages if m.role != "system"), 1))
            and _found(self.last, islice((m.text for m in reversed(messages) if m.role != "system"), 1))
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one scaffold. `agent_header` (lower case) names a subagent by its id; without it, or with the value
    `main_agent`, a request is the main agent's; so is one without `subagent_header`, where that is given."""

    agent_header: str = ""
    main_agent: str = ""
    subagent_header: str = ""
    auxiliary: Sequence[Auxiliary] = field(default=())

    def __post_init__(self) -> None:
        _lower(self.agent_header)
        _lower(self.subagent_header)


class UnknownRules(ValueError):
    """A name that is no scaffold's rules."""


def load_rules(name: str) -> Rules:
    """The rules of a scaffold that ships (claude_code, ...), or `module:NAME`; none for "". Raises UnknownRules."""
    if not name:
        return Rules()
    module, _, attribute = name.partition(":")
    if not attribute:
        module, attribute = f"pipeline.harnesses.scaffolds.{name}", "RULES"
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        if ":" in name:
            raise UnknownRules(f"rules {name!r} cannot be imported: {error}") from error
        raise UnknownRules(
            f"rules {name!r} are neither module:NAME nor a scaffold's that ships: {', '.join(_shipped())}"
        ) from error
    if not isinstance(found, Rules):
        raise UnknownRules(f"rules {name!r} are a {type(found).__name__}, not pipeline.capture.rules.Rules")
    return found


def pool_rules(pool: Pool) -> str:
    """The name that `load_rules` knows the rules of a pool by: the pool's own, else those of the scaffold that its harness
    runs."""
    agent = pool.options.get("agent", "")
    if pool.rules or pool.harness != "harbor" or not isinstance(agent, str):
        return pool.rules
    name = agent.replace("-", "_")
    return name if name in _shipped() else ""


def _shipped() -> list[str]:
    package = importlib.import_module("pipeline.harnesses.scaffolds")
    return sorted(name.replace("-", "_") for name in package.NAMES)


@dataclass(frozen=True, slots=True)
class Kind:
    """Whose a request is: `agent` is "" for the main agent; `label` is None for an agent's own dialogue."""

    agent: str = ""
    label: Name | None = None

    @property
    def told(self) -> str | None:
        """The label that a request alone gives: by that, turns are left out of training."""
        return self.label or ("subagent" if self.agent else None)


def classify(rules: Rules, call: Call, headers: Mapping[str, str]) -> Kind:
    """`headers` have lower-case names. The first auxiliary kind that matches counts."""
    subagent = not rules.subagent_header or rules.subagent_header in headers
    agent = headers.get(rules.agent_header, "")[:256] if rules.agent_header and subagent else ""
    # Bytes of a header that are no UTF-8 come as lone surrogates, which the journal cannot write.
    agent = agent.encode(errors="backslashreplace").decode()
    label = next((kind.label for kind in rules.auxiliary if kind.matches(call, headers)), None)
    return Kind("" if agent == rules.main_agent else agent, label)


def _full(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, _searched(text), re.DOTALL) is not None


def _found(pattern: str | None, texts: Iterable[str], between: str = "") -> bool:
    return pattern is None or re.search(pattern, _searched(between.join(texts)), re.DOTALL) is not None


def _searched(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else text[:_HEAD] + text[-_TAIL:]


def _lower(header: str) -> None:
    if header != header.lower():
        raise ValueError(f"header {header!r} would match nothing: names of headers are given in lower case")
