"""What a grader is, and how one is made from its configuration.

Promises:
- a grader knows no log: it gets a group as `Material` and returns what it makes of it, or raises `GraderFailed`;
- one instance judges every group of a source that this process judges, several at once, and keeps no state between them;
- a call that is cancelled (its time is over, the service stops) leaves nothing running that it could end.

A grader of your own is a function from a group's `SampleCompleted` to its rewards in member order, or to an answer
(`pipeline.signal.grading.Answer`, or the same as a dictionary), named as module:function or by an entry point of the group
`packtrain.graders`. It may take a second argument, `transcripts`: then it is given what the group said (`pipeline.graders.transcripts`).
A class stands for a function too: it is constructed with the grader's `options`, if there are any, else without arguments, and called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from pipeline.graders.transcripts import Transcript
from pipeline.plugin import Kinds
from pipeline.signal.grading import Graded
from schemas.facts import Artefact, SampleCompleted

NONE = "none"
BUILT_IN: Mapping[str, str] = {
    "rubric": "pipeline.graders.rubric:Rubric",
    "command": "pipeline.graders.command:Command",
}
ENTRY_POINTS = "packtrain.graders"
"""Group of the entry points by which other packages name their graders."""
Need = Literal["transcripts", "artefacts"]


class UnknownGrader(ValueError):
    """A kind that names no grader, or options that it does not have; the message says which there are."""


KINDS = Kinds(
    "grader",
    {NONE: "", **BUILT_IN},
    UnknownGrader,
    ENTRY_POINTS,
    form="module:function",
    remedy="give none, or module:function, of a module that is installed or whose directory is in PYTHONPATH",
)


class GraderFailed(Exception):
    """A try that gave no answer, in one line. again: whether another may give one, not before `after` seconds; cost: what
    it cost all the same."""

    def __init__(self, reason: str, *, again: bool = True, after: float = 0.0, cost: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.after, self.cost = again, after, cost


@dataclass(frozen=True)
class Material:
    """A group, with what its grader needs of it. `task`: what the configuration and events say of its task, as JSON values;
    `artefacts`: of each sequence what its trial left, to be read with `fetch`."""

    completed: SampleCompleted
    transcripts: tuple[Transcript, ...] = ()
    task: Mapping[str, Any] | None = None
    artefacts: Mapping[str, tuple[Artefact, ...]] | None = None
    fetch: Callable[[Artefact], Awaitable[bytes]] | None = None


class Grader(Protocol):
    @property
    def needs(self) -> frozenset[Need]:
        """What of `Material` it reads beside `completed`."""
        ...

    async def judge(self, group: Material) -> tuple[Graded, float]:
        """The group's grades and what they cost. Raises GraderFailed; whatever else it raises is a failed try too."""
        ...

    async def close(self) -> None:
        """Ends what it holds."""
        ...


def make(kind: str, options: Mapping[str, Any] | None = None) -> Grader | None:
    """The grader of that kind; None for `none`. Raises UnknownGrader, pydantic's ValidationError for options that a
    built-in kind does not take, and what a class's constructor raises."""
    given = dict(options or {})
    if kind == NONE:
        if given:
            raise UnknownGrader(
                f"grader 'none' has no options, and is given {', '.join(given)}: leave them out"
            )
        return None
    if kind in BUILT_IN:
        return cast(Grader, KINDS.load(kind)(given))
    from pipeline.graders.function import Function

    found = KINDS.load(kind)
    if isinstance(found, type):
        found = cast("Callable[..., Any]", found)(**({"options": given} if given else {}))
    elif given:
        raise UnknownGrader(
            f"grader {kind!r} is a function and takes no options, and is given {', '.join(given)}: leave them out, or make it a class"
        )
    if not callable(found):
        raise UnknownGrader(f"grader {kind!r} is not callable; give none, or module:function")
    return Function(kind, cast("Callable[..., Any]", found))
