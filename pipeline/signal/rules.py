"""Rules on what agents do: what a rule sees, which a source names, and which of them have flagged a turn.

Promises:
- a rule is a pure function of one turn, or of the messages that follow it; a turn's flags are a set of bits: bit i is the
  source's penalty i;
- those that ship take time linear in what they see, whatever an agent writes there;
- a rule that raises, or answers neither true nor false, flags nothing in silence: `RuleFailed` names it.

A rule of your own is a class with `judges` ("turn" or "results") and `__call__`, named as module:Class. It is constructed with the
penalty's `options`, if there are any, else without arguments, once a process. It is called on threads, several at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from pipeline.plugin import Kinds
from schemas.signal import Penalty

_SHIPPED = "pipeline.signal.shipped_rules"
BUILT_IN: Mapping[str, str] = {
    "malformed_call": f"{_SHIPPED}:MalformedCall",
    "unknown_tool": f"{_SHIPPED}:UnknownTool",
    "repetition": f"{_SHIPPED}:Repetition",
    "garbled": f"{_SHIPPED}:Garbled",
    "nonzero_exit": f"{_SHIPPED}:NonzeroExit",
    "infra_failure": f"{_SHIPPED}:InfraFailure",
}


class BadRule(ValueError):
    """A name that is no rule; says what is."""


KINDS = Kinds("rule", BUILT_IN, BadRule)


class RuleFailed(Exception):
    """A rule raised, or gave no answer, so that nobody knows what the turn's flags are."""


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call that parsed; `arguments` is JSON text as it was sampled."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn. `text` is what the agent is shown, `reasoning` what was thought; `malformed` counts calls that did not
    parse (their text is in `text`); `offered` are the names of the request's tools; `tokens` the sampled ids, int32 [n];
    `finish` is stop, length, tool_calls or stop_sequence."""

    text: str
    tokens: npt.NDArray[np.int32]
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    malformed: int = 0
    offered: frozenset[str] = frozenset()
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Results:
    """The texts of the tool and user messages that follow a turn, in order, without images."""

    texts: tuple[str, ...]


Judged = Literal["turn", "results"]


class Rule(Protocol):
    """See the module's text."""

    @property
    def judges(self) -> Judged: ...

    def __call__(self, seen: Any) -> bool:
        """Whether the turn is flagged; `seen` is a `Turn` or `Results`, by `judges`."""
        ...


@dataclass(frozen=True)
class Judge:
    """The rules of one source: (bit, name, rule) each. `stops`, `context` and `sequence` are the bits of the penalties that
    end the rollout, and of those of these scopes; `own`: whether a rule is not one that ships."""

    rules: tuple[tuple[int, str, Rule], ...] = ()
    stops: int = 0
    context: int = 0
    sequence: int = 0
    own: bool = False

    def asks(self, what: Judged) -> bool:
        """Whether a rule judges that."""
        return any(rule.judges == what for _, _, rule in self.rules)

    def flags(self, seen: Turn | Results) -> int:
        """The bits of the rules that flag it. Raises RuleFailed."""
        what: Judged = "turn" if isinstance(seen, Turn) else "results"
        found = 0
        for bit, name, rule in self.rules:
            if rule.judges == what and _answer(name, rule, seen):
                found |= bit
        return found

    def stopped_by(self, flags: int) -> str:
        """The name of the first rule among these bits that ends a rollout; empty without one."""
        return next((name for bit, name, _ in self.rules if bit & flags & self.stops), "")


NO_RULES = Judge()


def judge_of(penalties: Sequence[Penalty]) -> Judge:
    """The rules of a source's penalties. Raises what `resolve` raises."""
    bits = [(1 << i, penalty) for i, penalty in enumerate(penalties)]
    return Judge(
        rules=tuple((bit, each.rule, resolve(each.rule, each.options)) for bit, each in bits),
        stops=sum(bit for bit, each in bits if each.stop),
        context=sum(bit for bit, each in bits if each.scope == "context"),
        sequence=sum(bit for bit, each in bits if each.scope == "sequence"),
        own=any(each.rule not in BUILT_IN for each in penalties),
    )


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """The rule of a built-in name or `module:Class`. Raises BadRule, and what its constructor raises for options that it does
    not know (pydantic's ValidationError, by custom)."""
    factory: Any = KINDS.load(name)
    rule = factory(options=dict(options)) if options else factory()
    if getattr(rule, "judges", None) not in ("turn", "results") or not callable(rule):
        raise BadRule(
            f"rule {name!r} is no rule: it needs judges, 'turn' or 'results', and __call__, true for what it flags"
        )
    return cast(Rule, rule)


def _answer(name: str, rule: Rule, seen: Turn | Results) -> bool:
    try:
        found: Any = rule(seen)
    except Exception as error:
        raise RuleFailed(f"rule {name!r} raised {type(error).__name__}: {error}") from error
    if type(found) not in (bool, np.bool_):
        raise RuleFailed(f"rule {name!r} answered {type(found).__name__}, not true or false")
    return bool(found)
