"""Groups that a run left behind, as the first groups of another: which they are, and the facts that they enter it with. Pure.

Promises:
- what was accepted, never put into a batch and not rejected since is left behind, in the order of acceptance;
- a group enters only where it means the same: a training source of that name, with the same group size, environment and
  penalties, and only while its oldest token is at most `staleness` versions behind the last policy of the run that it is of.
  Its tokens then count as of version 0, so that policy is the one that the other run is to begin with;
- what it shows is copied with it, an image once; sizes of images hold only while `engine.vision` is the same;
- the facts are those of a group that is dispatched and ends at once: who judges, scores, grades and shapes it is the other run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.batch.sampler import SamplerCore
from schemas.config import Decisions, Source
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    PolicyPublished,
    SampleAccepted,
    SampleRejected,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.keys import image_key, run_prefix
from schemas.names import attempt_id, sample_id, sequence_id


class NotInheritable(ValueError):
    """Groups that cannot enter the run, and what differs."""


@dataclass(slots=True)
class Left:
    """A group while it may still be left behind: what it enters another run with, each with its event."""

    sample: str
    dispatched: dict[int, Event] = field(default_factory=dict[int, Event])
    ended: dict[str, Event] = field(default_factory=dict[str, Event])
    accepted: SampleAccepted | None = None


@dataclass(frozen=True, slots=True)
class Entrance:
    """What enters a run. facts: with the id of the event of the other run that each is made of, in order. copies: object keys,
    of the other run and of this one. groups: by source, none that has none. stale: groups that are too old."""

    facts: tuple[tuple[Fact, str], ...]
    copies: tuple[tuple[str, str], ...]
    groups: dict[str, int]
    stale: int


class Leftovers:
    """A fold over the log of the run that leaves them behind. What is rejected or yielded is forgotten."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.version = 0
        """The last policy version."""
        self._core = SamplerCore(run)
        self._groups: dict[str, Left] = {}
        self._accepted: dict[str, None] = {}

    @property
    def decisions(self) -> Decisions | None:
        """What the run was started with; None before its run.started."""
        return self._core.decisions

    def fold(self, event: Event) -> None:
        match event.fact:
            case SequenceDispatched(sample=sample, member=member):
                self._groups.setdefault(sample, Left(sample)).dispatched.setdefault(member, event)
            case (
                SequenceFinished(sample=sample, sequence=sequence)
                | SequenceFailed(sample=sample, sequence=sequence)
            ):
                if group := self._groups.get(sample):
                    group.ended.setdefault(sequence, event)
            case SampleAccepted(sample=sample) as fact:
                if group := self._groups.get(sample):
                    group.accepted = fact
                    self._accepted[sample] = None
            case SampleRejected(sample=sample):
                self._forget(sample)
            case BatchYielded() as fact:
                for member in self._core.members(fact):
                    self._forget(member.sample)
            case PolicyPublished(step=step):
                self.version = max(self.version, step)
            case _:
                pass
        self._core.fold(event)

    def left(self) -> list[Left]:
        """The groups, in the order of their acceptance."""
        return [self._groups[sample] for sample in self._accepted]

    def _forget(self, sample: str) -> None:
        self._groups.pop(sample, None)
        self._accepted.pop(sample, None)


def entrance(left: Leftovers, into: str, decisions: Decisions) -> Entrance:
    """How the groups enter run `into`, which has these decisions. Raises NotInheritable on the first that cannot."""
    given = left.decisions
    facts: list[tuple[Fact, str]] = []
    copies: dict[tuple[str, str], None] = {}
    groups: dict[str, int] = {}
    stale = 0
    for group in left.left():
        assert given is not None
        assert group.accepted is not None
        source = _source(given.source(group.accepted.source), left.run, decisions.training())
        if left.version - group.accepted.min_version > source.staleness:
            stale += 1
            continue
        if group.ended.keys() != {event.fact.id() for event in group.dispatched.values()}:
            raise NotInheritable(
                f"run {left.run} accepted {group.sample}, of which not every sequence has ended in its log"
            )
        number = groups.get(source.name, 0)
        groups[source.name] = number + 1
        sample = sample_id(source.name, number)
        for member, event in sorted(group.dispatched.items()):
            assert isinstance(event.fact, SequenceDispatched)
            named = {"sample": sample, "sequence": sequence_id(sample, member), "pool": source.pool}
            facts.append((event.fact.model_copy(update={**named, "min_policy_version": 0}), event.id))
        for member, event in sorted(group.dispatched.items()):
            ended = group.ended[event.fact.id()]
            fact, copied = _ended(ended.fact, into, sample, sequence_id(sample, member))
            facts.append((fact, ended.id))
            copies |= dict.fromkeys(copied)
            digests = _images(fact)
            if digests and given.vision != decisions.vision:
                raise NotInheritable(
                    f"run {left.run} left groups that show images, and had another engine.vision: give this run the same, or begin "
                    "without them"
                )
            copies |= dict.fromkeys((image_key(left.run, d), image_key(into, d)) for d in digests)
    return Entrance(tuple(facts), tuple(copies), groups, stale)


def _source(theirs: Source, run: str, sources: Sequence[Source]) -> Source:
    """The source that its groups enter."""
    named = [source for source in sources if source.name == theirs.name]
    if not named:
        raise NotInheritable(
            f"run {run} left groups of source {theirs.name!r}, which is no training source here; sources: "
            f"{[source.name for source in sources]}"
        )
    for key in ("group_size", "environment", "penalties"):
        there, here = getattr(theirs, key), getattr(named[0], key)
        if there != here:
            shown = f" ({there} there, {here} here)" if key == "group_size" else ""
            raise NotInheritable(
                f"run {run} left groups of source {theirs.name!r} with another {key}{shown}: they would not be what this run's "
                "groups are; give the source the same, or begin without them"
            )
    return named[0]


def _images(fact: Fact) -> list[str]:
    contexts = fact.contexts if isinstance(fact, SequenceFinished) else ()
    return [image.digest for context in contexts for image in context.images]


def _ended(fact: Fact, into: str, sample: str, sequence: str) -> tuple[Fact, list[tuple[str, str]]]:
    """The end of a member in its new run, and what is copied for it."""
    named = {"sample": sample, "sequence": sequence}
    if isinstance(fact, SequenceFailed):
        # What it sampled is for people, who find it in the run that it is of.
        return fact.model_copy(update={**named, "contexts": (), "payload": None}), []
    assert isinstance(fact, SequenceFinished)
    # Below another name than an attempt's of this run, and copied, since sidecars are made anew beside it.
    key = f"{run_prefix(into)}/inherited/{fact.source}/{attempt_id(sequence, fact.attempt)}.safetensors"
    contexts = tuple(c.model_copy(update={"min_version": 0, "max_version": 0}) for c in fact.contexts)
    payload = fact.payload.model_copy(update={"key": key})
    update = {**named, "contexts": contexts, "payload": payload}
    return fact.model_copy(update=update), [(fact.payload.key, key)]
