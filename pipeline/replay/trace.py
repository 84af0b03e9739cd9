"""The causal life of a sample, a sequence or a batch, with durations, from a run's events.

Promises:
- of a sequence: its own events (all attempts), those of its sample, and those of the batch that its sample went into; of a
  sample: those of all its sequences; of a batch: what came of it, and its samples with the time each waited, recomputed by
  the sampler's core;
- events stand under the event that they were decided on; one whose cause is outside names it, and none is left out;
- times are those that the writers gave: between two machines a duration is as right as their clocks.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pipeline.batch.sampler import SamplerCore
from schemas.envelope import Event
from schemas.facts import (
    BatchReplanned,
    BatchYielded,
    Fact,
    RunStarted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceQuarantined,
    SequenceScored,
)

_ATTEMPT = re.compile(r"(.+)-a[1-9][0-9]*")
_OF = re.compile(r"(.+-[0-9]{6,})-r[0-9]+|(.+-[0-9]{6,}-[0-9]+)-.+")
"""An id of a fact that a sample or a sequence has several of: graded or shaped anew, or scored."""
_RECENT = 65_536
_SHOWN = 5


class NoSuchId(LookupError):
    """An id of which the log has no event; the message names near ones."""


@dataclass(frozen=True, slots=True)
class Node:
    """An event of the tree. `depth` and `cause` (a message of the tree, None at a root) say where it hangs; `outside` is
    a root's cause as text (`message 1, run.started demo`). `after_s`: seconds since the cause, None when that is not known.
    `note`: what the fact says of grading, scores, shaping, a rejection, penalties or quarantine; text of others, which may hold anything.
    """

    seq: int
    depth: int
    cause: int | None
    type: str
    id: str
    time: datetime
    producer: str
    after_s: float | None
    outside: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A sample of a batch. Seconds: from its first dispatch to its first advantages, and from those to the batch."""

    source: str
    sample: str
    sequences: int
    tokens: int
    staleness: int
    in_flight_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The life of `id`. `batch` is the step it was in, None for what is in none. `nodes` come depth first, in stream order
    under one cause. `total_s`: first to last event."""

    kind: Literal["sample", "sequence", "batch"]
    id: str
    batch: int | None
    nodes: tuple[Node, ...]
    members: tuple[Member, ...]
    total_s: float


@dataclass(slots=True)
class _Times:
    dispatched: datetime
    shaped: datetime | None = None


@dataclass(slots=True)
class _Kept:
    event: Event
    cause_time: datetime | None
    cause: str


class Tracer:
    """`feed` every event in stream order, then read `trace`."""

    def __init__(self, run: str, id_: str) -> None:
        attempt = _ATTEMPT.fullmatch(id_)
        self.id = f"{int(id_):06d}" if id_.isascii() and id_.isdigit() else (attempt[1] if attempt else id_)
        of = _OF.fullmatch(self.id)
        self._of = (of[1] or of[2]) if of else self.id
        self._core = SamplerCore(run)
        self.failed = ""
        """What the core raised, and on which message; empty if nothing. Batches after it have no members."""
        self._kind: Literal["sample", "sequence", "batch"] | None = "batch" if self.id.isdigit() else None
        self._sample = self.id
        self._batch: int | None = None
        self._kept: list[_Kept] = []
        self._steps: dict[str, list[_Kept]] = {}
        self._recent: dict[str, tuple[datetime, str]] = {}
        self._times: dict[str, _Times] = {}
        self._members: tuple[Member, ...] = ()
        self._known: dict[str, None] = {}

    def feed(self, event: Event) -> None:
        fact = event.fact
        if isinstance(fact, SequenceDispatched):
            self._known.setdefault(fact.sample)
            self._known[fact.sequence] = None
            self._times.setdefault(fact.sample, _Times(event.time))
            for id_ in (self.id, self._of):
                if id_ in (fact.sample, fact.sequence) and self._kind is None:
                    self.id, self._sample = id_, fact.sample
                    self._kind = "sample" if id_ == fact.sample else "sequence"
        elif isinstance(fact, SampleShaped) and fact.sample in self._times:
            times = self._times[fact.sample]
            times.shaped = times.shaped or event.time
        elif isinstance(fact, SampleRejected):
            self._times.pop(fact.sample, None)
        elif isinstance(fact, BatchYielded):
            self._yielded(event, fact)
        self._fold(event)
        self._keep(event)
        self._recent[event.id] = (event.time, f"message {event.seq}, {fact.type} {fact.id()}")
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def trace(self) -> Trace:
        """The life of the id; raises NoSuchId."""
        step = f"{self._batch:06d}" if self._batch is not None else ""
        kept = [*self._kept, *self._steps.get(step, [])]
        kept.sort(key=lambda each: each.event.seq)
        if self._kind is None or not kept:
            raise NoSuchId(self._missing())
        times = [each.event.time for each in kept]
        return Trace(
            kind=self._kind,
            id=self.id,
            batch=self._batch,
            nodes=_tree(kept),
            members=self._members,
            total_s=(max(times) - min(times)).total_seconds(),
        )

    def _fold(self, event: Event) -> None:
        if self.failed:
            return
        try:
            self._core.fold(event)
        except (
            Exception
        ) as error:  # a log that the core cannot follow, which replay explains, is traced all the same
            self.failed = (
                f"message {event.seq}, {event.fact.type} {event.fact.id()}: {type(error).__name__}: {error}"
            )

    def _yielded(self, event: Event, fact: BatchYielded) -> None:
        self._known[fact.id()] = None
        groups = self._core.members(fact) if not self.failed else []
        mine = fact.id() == self.id if self._kind == "batch" else self._sample in [g.sample for g in groups]
        members: list[Member] = []
        for group in groups:
            times = self._times.pop(group.sample, None)
            if not mine or times is None or times.shaped is None:
                continue
            members.append(
                Member(
                    source=group.source,
                    sample=group.sample,
                    sequences=len(group.finished),
                    tokens=group.tokens(),
                    staleness=max(0, fact.step - 1 - group.min_version()),
                    in_flight_s=(times.shaped - times.dispatched).total_seconds(),
                    waited_s=(event.time - times.shaped).total_seconds(),
                )
            )
        if mine:
            self._batch = fact.step
            self._members = tuple(members) if self._kind == "batch" else ()

    def _keep(self, event: Event) -> None:
        fact = event.fact
        correlation = fact.correlation()
        if isinstance(fact, SequenceQuarantined) and self._kind == "batch":
            correlation = f"{fact.step:06d}"
        if correlation is None or isinstance(fact, RunStarted):
            return
        time, shown = self._recent.get(event.causation or "", (None, ""))
        kept = _Kept(event, time, shown or (f"event {event.causation}" if event.causation else ""))
        if correlation.isdigit():
            # A step's facts come after its batch; those of one that the traced sample is not in are let go.
            step = int(correlation)
            if self._batch == step or (self._kind == "batch" and correlation == self.id):
                self._steps.setdefault(correlation, []).append(kept)
        elif self._kind != "batch" and correlation == self._sample:
            sequence = getattr(fact, "sequence", None)
            if self._kind == "sample" or sequence in (None, self.id):
                self._kept.append(kept)

    def _missing(self) -> str:
        near = [known for known in self._known if known.startswith(self.id)][:_SHOWN]
        near = near or difflib.get_close_matches(self.id, self._known, n=_SHOWN, cutoff=0.75)
        steps = [known for known in self._known if known.isdigit()]
        if self._kind == "batch":
            told = f"batches: {steps[0]} to {steps[-1]}" if steps else "no batch is yielded yet"
        elif near:
            told = f"near ones: {', '.join(near)}"
        else:
            told = (
                f"ids are as {', '.join([*list(self._known)[:2], *steps[:1]])}"
                if self._known
                else "it has none yet"
            )
        return f"the log has no sample, sequence or batch {self.id[:140]!r}; {told}"


def _tree(kept: list[_Kept]) -> tuple[Node, ...]:
    places = {each.event.id: each.event.seq for each in kept}
    children: dict[int | None, list[_Kept]] = {}
    for each in kept:
        cause = places.get(each.event.causation or "")
        # What does not stand before an event is no cause of it, whatever its writer says: so there are no cycles.
        children.setdefault(cause if cause is not None and cause < each.event.seq else None, []).append(each)
    nodes: list[Node] = []
    following: list[tuple[_Kept, int, int | None]] = [
        (each, 0, None) for each in reversed(children.get(None, []))
    ]
    while following:
        each, depth, cause = following.pop()
        event = each.event
        after = (event.time - each.cause_time).total_seconds() if each.cause_time is not None else None
        outside = each.cause if cause is None else ""
        nodes.append(
            Node(
                seq=event.seq,
                depth=depth,
                cause=cause,
                type=event.fact.type,
                id=event.fact.id(),
                time=event.time,
                producer=event.producer,
                after_s=after,
                outside=outside,
                note=_note(event.fact),
            )
        )
        following += [(child, depth + 1, event.seq) for child in reversed(children.get(event.seq, []))]
    return tuple(nodes)


def _note(fact: Fact) -> str:
    parts: list[str] = []
    match fact:
        case SampleGraded():
            parts += ["a late answer"] if fact.revision else []
            parts += [f"fallback: {fact.fallback}"] if fact.fallback else []
            parts += [f"quality {min(fact.quality):.3g} to {max(fact.quality):.3g}"] if fact.quality else []
            parts += [f"confirmed hacks: {sum(fact.hacks)}"] if any(fact.hacks) else []
        case SequenceScored():
            scored = f"{fact.tokens} tokens in {fact.seconds:.1f} s"
            parts.append(scored if fact.failure is None else f"not scored: {fact.failure}")
        case SampleShaped():
            parts += ["anew"] if fact.revision else []
            by_token = sum(sidecar is not None for sidecar in fact.sidecars)
            parts += [f"by token: {by_token}"] if by_token else []
        case SampleRejected():
            parts.append(fact.reason)
        case BatchYielded(factors=factors) if factors is not None:
            parts.append(f"penalty factors alpha {factors.alpha:.3f}, beta {factors.beta:.3f}")
        case SequenceQuarantined():
            where = [fact.key, *([f"column {fact.column}"] if fact.column else [])]
            where += [f"block {fact.block}"] if fact.block is not None else []
            parts.append(f"{fact.reason}: {' '.join(where)}")
        case BatchReplanned():
            parts.append(f"without {len(fact.without)}, the newest {fact.without[-1]}")
        case _:
            pass
    return ", ".join(parts)
