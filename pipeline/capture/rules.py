"""What a scaffold's adapter declares about its requests: which header names the agent, which requests are auxiliary.

Pure. The core knows no scaffold: an adapter's rules are data, read by `classify`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.capture.call import Call
from schemas.names import Name


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A kind of request that is not the agent's own dialogue. It matches when all that it gives hold.

    `header`: name (lower case) and a pattern that its value matches; `system`, `first`, `last`: patterns found in the
    system text, in the first and in the last message's text; `tools`: whether tools are offered; `model`: a pattern that
    the model's name matches; `max_tokens`: the most that it asks for.
    """

    label: Name
    header: tuple[str, str] | None = None
    system: str | None = None
    first: str | None = None
    last: str | None = None
    tools: bool | None = None
    model: str | None = None
    max_tokens: int | None = None

    def matches(self, call: Call, headers: Mapping[str, str]) -> bool:
        messages = call.dialogue.messages
        system = "\n".join(m.text for m in messages if m.role == "system")
        rest = [m for m in messages if m.role != "system"]
        first, last = (rest[0].text, rest[-1].text) if rest else ("", "")
        return (
            (self.header is None or _full(self.header[1], headers.get(self.header[0], "")))
            and all(
                pattern is None or re.search(pattern, text, re.DOTALL) is not None
                for pattern, text in ((self.system, system), (self.first, first), (self.last, last))
            )
            and (self.tools is None or self.tools == bool(call.dialogue.tools))
            and (self.model is None or _full(self.model, call.model))
            and (
                self.max_tokens is None
                or (call.max_tokens is not None and call.max_tokens <= self.max_tokens)
            )
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one scaffold. `agent_header` (lower case) names a subagent by its id; without it, or with the value
    `main_agent`, a request is the main agent's."""

    agent_header: str = ""
    main_agent: str = ""
    auxiliary: Sequence[Auxiliary] = field(default=())


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
        raise UnknownRules(
            f"rules {name!r} are neither a scaffold's that ships nor module:NAME: {error}"
        ) from error
    if not isinstance(found, Rules):
        raise UnknownRules(f"rules {name!r} are a {type(found).__name__}, not pipeline.capture.rules.Rules")
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """Whose a request is: `agent` is "" for the main agent; `label` is None for an agent's own dialogue."""

    agent: str = ""
    label: Name | None = None


def classify(rules: Rules, call: Call, headers: Mapping[str, str]) -> Kind:
    """`headers` have lower-case names. The first auxiliary kind that matches counts."""
    agent = headers.get(rules.agent_header, "")[:256] if rules.agent_header else ""
    label = next((kind.label for kind in rules.auxiliary if kind.matches(call, headers)), None)
    return Kind("" if agent == rules.main_agent else agent, label)


def _full(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.DOTALL) is not None
