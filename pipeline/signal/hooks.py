"""The chain from a group's rewards to its advantages: what a hook is, and the list of them that a source names.

Promises:
- a hook is a pure function from one `Signal` to the next, and reads no column but those that it names;
- a chain has hooks of three stages in this order: those that change rewards, those that make advantages of them, those that
  change advantages; at least one makes advantages;
- what comes out has one finite advantage a member, and of a member with advantages by token one for each of its loss tokens;
- a chain of built-in hooks that name no column depends on events alone: `Chain.pure`.

A hook of your own is a class with `stage`, `columns` and `__call__`, named as module:Class or by an entry point of the group
`packtrain.hooks`. It is constructed with the hook's `options`, if there are any, else without arguments. It runs in the hook
service, never where a run is replayed.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from schemas.sources import Source

Array = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]
Stage = Literal["rewards", "advantages", "after"]

BUILT_IN: Mapping[str, str] = {
    "length_penalty": "pipeline.signal.rewards:LengthPenalty",
    "overlong": "pipeline.signal.rewards:Overlong",
    "grpo": "pipeline.signal.advantages:Grpo",
    "dr_grpo": "pipeline.signal.advantages:DrGrpo",
    "rloo": "pipeline.signal.advantages:Rloo",
    "leave_one_out": "pipeline.signal.advantages:LeaveOneOut",
    "reinforce_pp_baseline": "pipeline.signal.advantages:ReinforcePlusPlusBaseline",
    "redistribute": "pipeline.signal.redistribution:Redistribute",
    "segment_penalty": "pipeline.signal.penalties:SegmentPenalty",
    "opd": "pipeline.signal.opd:Opd",
    "opd_topk": "pipeline.signal.opd:OpdTopK",
}
ENTRY_POINTS = "packtrain.hooks"
"""Group of the entry points by which other packages name their hooks."""
_ORDER: Mapping[Stage, int] = {"rewards": 0, "advantages": 1, "after": 2}


class BadHook(ValueError):
    """A name that is no hook, a chain that is none, or a result that cannot be trained; names the hook and the remedy."""


@dataclass(frozen=True, slots=True)
class Member:
    """A finished sequence of the group, as events tell it.

    generated: sampled tokens. loss_tokens: rows of its columns by token, all tokens with loss mask 1 of its payload.
    flagged, unflagged: of the loss tokens that penalties leave, those that the strategy `weigh` has flagged, and the others.
    quality in (0, 1] and hack: the grader's. masked: none of its tokens is trained.
    """

    sequence: str
    generated: int = 0
    loss_tokens: int = 0
    flagged: int = 0
    unflagged: int = 0
    quality: float = 1.0
    hack: bool = False
    masked: bool = False
    termination: str = "completed"


@dataclass(frozen=True, slots=True)
class Signal:
    """What flows from hook to hook, of a group of n members.

    rewards: float64 [n]. advantages: float64 [n], None before a hook made them. tokens: of each member None, or float32
    [loss_tokens], which then stand for its advantage. columns: of each member the columns that the chain names, by their names
    there, with one row for each loss token in payload order; a member whose teacher failed lacks the teacher's.
    """

    members: tuple[Member, ...]
    rewards: Array
    pass_reward: float = 1.0
    advantages: Array | None = None
    tokens: tuple[npt.NDArray[np.float32] | None, ...] = ()
    columns: tuple[Columns, ...] = ()

    def passes(self) -> npt.NDArray[np.bool_]:
        """Which members pass: bool [n], by the rewards that the chain began with or its hooks have made since."""
        return self.rewards >= self.pass_reward

    def made(self) -> Array:
        """The advantages, [n]; raises BadHook where none were made."""
        if self.advantages is None:
            raise BadHook("a hook that changes advantages stands before one that makes them")
        return self.advantages


class Hook(Protocol):
    """See the module's text."""

    @property
    def stage(self) -> Stage: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads: of the payload by their name (`logprobs`), of a teacher's sidecar as `teacher.<name>.<column>`."""
        ...

    def __call__(self, signal: Signal) -> Signal: ...


@dataclass(frozen=True)
class Chain:
    """The hooks of one source, with the names that the configuration has for them."""

    hooks: tuple[tuple[str, Hook], ...]
    columns: tuple[str, ...]
    pure: bool
    """Whether it is built in, and reads no column."""
    estimator: str
    """What makes the advantages: a legal name."""

    def run(self, signal: Signal) -> Signal:
        """The shaped signal. Raises BadHook, naming the hook whose result cannot be trained; and what a hook raises."""
        if not np.isfinite(signal.rewards).all():
            raise BadHook(f"rewards must be finite, got {signal.rewards.tolist()}")
        for kind, hook in self.hooks:
            signal = _checked(kind, hook(signal))
        signal.made()
        return signal

    def find(self, kind: type[Any]) -> Any | None:
        """The hook of that class, if there is one."""
        return next((hook for _, hook in self.hooks if isinstance(hook, kind)), None)


def chain(source: Source) -> Chain:
    """The source's hooks, or its estimator where it names none. Raises BadHook."""
    given = [[hook.kind, hook.options] for hook in source.hooks] or [[source.estimator, {}]]
    return _chain(json.dumps(given, sort_keys=True))


def built_in(source: Source) -> bool:
    """Whether all of the source's hooks ship with packtrain: to ask imports nothing else."""
    return all(hook.kind in BUILT_IN for hook in source.hooks)


@lru_cache(maxsize=256)
def _chain(given: str) -> Chain:
    hooks = tuple((kind, resolve(kind, options)) for kind, options in json.loads(given))
    for (_, before), (kind, after) in pairwise(hooks):
        if _ORDER[after.stage] < _ORDER[before.stage]:
            raise BadHook(
                f"hook {kind!r} is of stage {after.stage!r} and stands after one of stage {before.stage!r}: first those that "
                "change rewards, then those that make advantages, then those that change them"
            )
    makers = [kind for kind, hook in hooks if hook.stage == "advantages"]
    if not makers:
        raise BadHook(
            f"hooks {[kind for kind, _ in hooks]} make no advantages: add an estimator, such as grpo, or opd"
        )
    columns = tuple(dict.fromkeys(name for _, hook in hooks for name in hook.columns))
    estimator = re.sub(r"[^A-Za-z0-9_-]", "-", "-".join(makers))[:128]
    shipped = all(kind in BUILT_IN for kind, _ in hooks)
    return Chain(hooks, columns, shipped and not columns, estimator)


def resolve(kind: str, options: Mapping[str, Any] | None = None) -> Hook:
    """The hook of a built-in name, an entry point or `module:Class`. Raises BadHook, and what its constructor raises for options
    that it does not know (pydantic's ValidationError, by custom)."""
    target = BUILT_IN.get(kind, kind)
    if ":" not in target:
        target = named().get(kind, "")
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise BadHook(
            f"hook {kind!r} is none of {sorted({*BUILT_IN, *named()})}, and not of the form module:Class"
        )
    try:
        factory: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadHook(f"hook {kind!r} cannot be imported: {error}") from error
    return cast(Hook, factory(options=dict(options)) if options else factory())


def named() -> dict[str, str]:
    """The module:Class of each name that other packages gave. None takes a built-in one's place."""
    return {p.name: p.value for p in entry_points(group=ENTRY_POINTS) if p.name not in BUILT_IN}


def _checked(kind: str, signal: Signal) -> Signal:
    n = len(signal.members)
    for name, array in (("rewards", signal.rewards), ("advantages", signal.advantages)):
        if array is None:
            continue
        if array.shape != (n,) or not np.isfinite(array).all():
            raise BadHook(f"hook {kind!r} gave {name} that are not {n} finite numbers: {array.tolist()}")
    if not signal.tokens:
        return signal
    if len(signal.tokens) != n:
        raise BadHook(f"hook {kind!r} gave advantages by token of {len(signal.tokens)} members, of {n}")
    for member, tokens in zip(signal.members, signal.tokens, strict=True):
        if tokens is not None and (tokens.shape != (member.loss_tokens,) or not np.isfinite(tokens).all()):
            raise BadHook(
                f"hook {kind!r}, sequence {member.sequence}: advantages by token have shape {tokens.shape} (finite: "
                f"{bool(np.isfinite(tokens).all())}), and it has {member.loss_tokens} loss tokens"
            )
    return signal
