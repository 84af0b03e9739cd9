"""The chain from a group's rewards to its advantages: what a hook is, and the list of them that a source names.

Promises:
- a hook is a pure function from one `Signal` to the next, and reads no column but those that it names;
- a chain has hooks of three stages in this order: those that change rewards, the one that makes advantages of them, those
  that change advantages;
- what comes out has one finite advantage a member, and of a member with advantages by token one for each of its loss tokens,
  also as float32, in which they are trained;
- no hook puts a group's members in another order, or changes advantages that those by token stand for;
- a chain of built-in hooks that name no column depends on events alone: `Chain.pure`.

A hook of your own is a class with `stage`, `columns` and `__call__`, named as module:Class or by an entry point of the group
`packtrain.hooks`. It is constructed with the hook's `options`, if there are any, else without arguments. It runs in the hook
service, never where a run is replayed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from pipeline.plugin import Kinds
from schemas.names import legal_name
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
REMEDY = "give module:Class, of a module that is installed or whose directory is in PYTHONPATH"
"""For what cannot be imported."""
WEIGHING = "segment_penalty"
"""The built-in hook that the strategy `weigh` needs."""
BY_TOKEN = ("opd", "opd_topk")
"""Built-in hooks that make advantages by token."""
_WEIGHS_ONE = (
    f"hook {WEIGHING!r} weighs one advantage a sequence, and {{}} makes some by token: leave it out, and use the strategies "
    "scale, set, subtract or mask"
)
_ORDER: Mapping[Stage, int] = {"rewards": 0, "advantages": 1, "after": 2}
_LARGEST = float(np.finfo(np.float32).max)
_SHOWN = 512
"""Numbers that an error tells one by one: the largest group."""


class BadHook(ValueError):
    """A name that is no hook, a chain that is none, or a result that cannot be trained; names the hook and the remedy."""


KINDS = Kinds("hook", BUILT_IN, BadHook, ENTRY_POINTS, remedy=REMEDY)


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
    there, with one row for each loss token in payload order; a member whose teacher failed lacks the teacher's. passed: bool [n],
    who passed by the rewards that the chain began with; None before it.
    """

    members: tuple[Member, ...]
    rewards: Array
    pass_reward: float = 1.0
    advantages: Array | None = None
    tokens: tuple[npt.NDArray[np.float32] | None, ...] = ()
    columns: tuple[Columns, ...] = ()
    passed: npt.NDArray[np.bool_] | None = None

    def passes(self) -> npt.NDArray[np.bool_]:
        """Which members pass: bool [n], by the rewards that the chain began with: a success whose length cost it a part of its
        reward is still one. A hook that makes failures of them sets `passed`."""
        return self.rewards >= self.pass_reward if self.passed is None else self.passed

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
        signal = replace(signal, passed=signal.passes())
        for kind, hook in self.hooks:
            signal = _checked(kind, signal, hook(signal))
        signal.made()
        if WEIGHING in self.kinds and any(tokens is not None for tokens in signal.tokens):
            raise BadHook(_WEIGHS_ONE.format("one of its source's other hooks"))
        return signal

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, _ in self.hooks)


def chain(source: Source) -> Chain:
    """The source's hooks, or its estimator where it names none. Raises BadHook."""
    given = [[hook.kind, hook.options] for hook in source.hooks] or [[source.estimator, {}]]
    return _chain(json.dumps(given, sort_keys=True))


def teacher_of(column: str) -> str:
    """The teacher whose sidecar has the column; empty for one of the payload."""
    parts = column.split(".", 2)
    return parts[1] if len(parts) == 3 and parts[0] == "teacher" else ""


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
    if len(makers) > 1:
        raise BadHook(
            f"hooks {makers} each make advantages, and the last forgets those of the others: leave one, or give opd add = true"
        )
    _by_token([kind for kind, _ in hooks])
    columns = tuple(dict.fromkeys(name for _, hook in hooks for name in hook.columns))
    estimator = legal_name("-".join(makers))
    shipped = all(kind in BUILT_IN for kind, _ in hooks)
    return Chain(hooks, columns, shipped and not columns, estimator)


def _by_token(kinds: Sequence[str]) -> None:
    """Refuses built-in hooks that change one advantage a sequence where there are some by token."""
    first = min((kinds.index(kind) for kind in BY_TOKEN if kind in kinds), default=len(kinds))
    if "redistribute" in kinds[first:]:
        raise BadHook(
            f"hook 'redistribute' changes one advantage a sequence, and {kinds[first]!r} before it makes some by token: put it "
            f"before {kinds[first]!r}, with add = true and an estimator before both, or leave it out"
        )
    if WEIGHING in kinds and first < len(kinds):
        raise BadHook(_WEIGHS_ONE.format(repr(kinds[first])))


def resolve(kind: str, options: Mapping[str, Any] | None = None) -> Hook:
    """The hook of a built-in name, an entry point or `module:Class`. Raises BadHook, and what its constructor raises for options
    that it does not know (pydantic's ValidationError, by custom)."""
    factory: Any = KINDS.load(kind)
    if options and "options" not in _parameters(factory):
        raise BadHook(f"hook {kind!r} has no options, and is given {', '.join(options)}: leave them out")
    return _hook(kind, factory(options=dict(options)) if options else factory())


def _parameters(factory: Any) -> Collection[str]:
    parameters = inspect.signature(factory).parameters.values()
    return {"options" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def _hook(kind: str, made: Any) -> Hook:
    """What was made, if it is a hook."""
    stage, columns = getattr(made, "stage", None), getattr(made, "columns", None)
    if stage not in _ORDER:
        raise BadHook(f"hook {kind!r} has stage {stage!r}, must be one of {list(_ORDER)}")
    names = cast("tuple[object, ...]", columns) if isinstance(columns, tuple) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise BadHook(f"hook {kind!r} has columns {columns!r}, must be a tuple of names, () for none")
    if not callable(made):
        raise BadHook(f"hook {kind!r} cannot be called: give it __call__(signal) -> Signal")
    return cast(Hook, made)


def _checked(kind: str, before: Signal, signal: Signal) -> Signal:
    """The hook's result, if it can be trained."""
    if not isinstance(signal, Signal):  # pyright: ignore[reportUnnecessaryIsInstance]  # other people's code
        raise BadHook(f"hook {kind!r} gave {type(signal).__name__}, must give a Signal")
    n = len(before.members)
    if [m.sequence for m in signal.members] != [m.sequence for m in before.members]:
        raise BadHook(f"hook {kind!r} gave other members, or in another order, than it was given")
    for name, array in (("rewards", signal.rewards), ("advantages", signal.advantages)):
        if array is not None and not _finite(array, (n,)):
            raise BadHook(
                f"hook {kind!r} gave {name} that are not {n} finite numbers: {_shown(array)}; they are trained as float32"
            )
    if before.tokens and signal.tokens is before.tokens and not _equal(before.advantages, signal.advantages):
        raise BadHook(
            f"hook {kind!r} changed advantages of sequences where those by token stand for them; change `tokens`, or put it before "
            "the hook that made them"
        )
    if len(signal.tokens) not in (0, n):
        raise BadHook(f"hook {kind!r} gave advantages by token of {len(signal.tokens)} members, of {n}")
    for member, tokens in zip(signal.members, signal.tokens, strict=False):
        if tokens is not None and not _finite(tokens, (member.loss_tokens,)):
            raise BadHook(
                f"hook {kind!r}, sequence {member.sequence}: advantages by token must be {member.loss_tokens} finite numbers, one for "
                f"each loss token, and are {_shown(tokens)}"
            )
    return signal


def _finite(array: object, shape: tuple[int, ...]) -> bool:
    if not isinstance(array, np.ndarray):
        return False
    numbers = cast("npt.NDArray[Any]", array)
    # NaN is under no limit. Those that are larger would be infinite where they are packed.
    return (
        numbers.dtype.kind in "fiub" and numbers.shape == shape and bool((np.abs(numbers) <= _LARGEST).all())
    )


def _equal(one: Array | None, other: Array | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _shown(array: object) -> str:
    """An array by its shape, and its numbers where they are few."""
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__}"
    numbers = cast("npt.NDArray[Any]", array)
    if numbers.size <= _SHOWN:
        return str(numbers.tolist())
    return f"of shape {numbers.shape}, {int(numbers.size - np.isfinite(numbers).sum())} of them not finite"
