"""The sampler's core: groups complete, are judged and shaped, and batches yield. A fold over the log.

Promises:
- every decision depends on the folded state and one event; configuration enters with `run.started`;
- a group is judged on the last of what it waits for: its grading, or a teacher's answer;
- it is shaped here where its hooks need events alone; else its `sample.shaped`, or that it cannot be shaped, is an input;
- a group that is too old for the next batch is rejected when the batch before it is settled, or when it is shaped after
  that, never trained;
- what is decided on a group that waits for a batch never changes whether it is in one: a late grading changes its advantages
  alone, and those of a batch that is decided stand in its plan;
- what is yielded or rejected is forgotten, but for the names of sequences until their batch is trained: state is bounded by
  what is in flight;
- a batch, once yielded, has its members, places and weights for good; that some of its sequences are left out since their
  objects are damaged or gone is a decision of its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pipeline.batch.arranging import fit
from pipeline.batch.quarantine import Quarantine
from pipeline.batch.yielding import batch, members
from pipeline.decision import Decision
from pipeline.signal.groups import Group, Groups
from pipeline.signal.overlong import Fit
from pipeline.signal.sampling import complete, judge, ready, shape, staleness, withdrawn
from schemas.config import Decisions, Source
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    RunStarted,
    SampleAccepted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceQuarantined,
    SequenceScored,
    StepTrained,
)


class SamplerCore:
    """See the module's promises."""

    STATE_VERSION: ClassVar[int] = 4

    def __init__(self, run: str) -> None:
        self.run = run
        self.decisions: Decisions | None = None
        self.groups = Groups()
        self.quarantine = Quarantine()
        self.yielded = 0
        self.trained = 0

    def fold(self, event: Event) -> None:
        match event.fact:
            case RunStarted(config=config):
                self.decisions = Decisions.model_validate(config)
            case SequenceDispatched() as fact:
                self.groups.dispatched(fact)
            case SequenceFinished() as fact:
                source = self._source(fact.source)
                if source is None:
                    self.groups.finished(fact)
                else:
                    masked = source.effects.get(fact.termination) == "mask"
                    self.groups.finished(fact, masked, source.penalties, self._fit())
            case SequenceFailed() as fact:
                self.groups.failed(fact)
            case SequenceScored() as fact:
                self.groups.scored(fact)
            case SampleGraded() as fact:
                self.groups.graded(fact)
            case SampleAccepted(sample=sample):
                self.groups.accepted(sample)
            case SampleShaped() as fact:
                if not self._duplicate(self.groups.get(fact.sample)):
                    self.groups.shaped(fact, event.seq)
            case SampleRejected() as fact:
                self.groups.rejected(fact)
            case BatchYielded() as fact:
                self._settle(fact)
            case StepTrained(step=step):
                self.trained = max(self.trained, step)
                self.quarantine.trained(step)
            case SequenceQuarantined() as fact:
                self.quarantine.quarantined(fact)
            case _:
                pass

    def _fit(self) -> Fit:
        assert self.decisions is not None
        return fit(self.decisions.batch)

    def _source(self, name: str) -> Source | None:
        # Not `Decisions.source`: a run that was given another configuration for a replay may lack the source.
        sources = self.decisions.sources if self.decisions is not None else ()
        return next((source for source in sources if source.name == name), None)

    def _duplicate(self, group: Group | None) -> bool:
        """Whether another was accepted with its task while the acceptance of this one was on its way: it is in no batch."""
        if group is None or not group.twin:
            return False
        source = self._source(group.source)
        return source is not None and source.accept.duplicates == "reject"

    def members(self, fact: BatchYielded) -> list[Group]:
        """The groups of a batch that is about to be folded; those of one that is folded are forgotten."""
        if self.decisions is None:
            return []
        return [
            group
            for source in self.decisions.training()
            if source.name in fact.sources
            for group in members(
                self.groups, source, fact.step, fact.through, fact.sources[source.name].groups
            )
        ]

    def _settle(self, fact: BatchYielded) -> None:
        groups = self.members(fact)
        self.quarantine.yielded(fact.step, (sequence for group in groups for sequence in group.finished))
        for group in groups:
            self.groups.forget(group.sample)
        self.yielded = max(self.yielded, fact.step)

    def dump(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "decisions": self.decisions.model_dump(mode="json") if self.decisions is not None else None,
            "yielded": self.yielded,
            "trained": self.trained,
            "quarantine": self.quarantine.dump(),
            **self.groups.dump(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.run = state["run"]
        decisions = state["decisions"]
        self.decisions = Decisions.model_validate(decisions) if decisions is not None else None
        self.yielded = state["yielded"]
        self.trained = state["trained"]
        self.quarantine.load(state["quarantine"])
        self.groups.load(state)

    def decide(self, event: Event) -> list[Decision]:
        if self.decisions is None:
            return []
        match event.fact:
            case SequenceFinished(sample=sample) | SequenceFailed(sample=sample):
                group = self.groups.get(sample)
                completed = complete(group) if group is not None else None
                return [Decision(completed)] if completed is not None else []
            case SequenceScored() as fact:
                group = self.groups.get(fact.sample)
                return self._judge(group) if group and fact.id() in group.scored else []
            case SampleGraded() as fact:
                group = self.groups.get(fact.sample)
                if fact.revision == 0:
                    return self._judge(group)
                late = group is not None and group.accepted and group.graded == fact.revision
                return self._shape(group, fact.revision) if late else []
            case SampleAccepted(sample=sample):
                return self._shape(self.groups.get(sample), 0)
            case SampleShaped() as fact:
                return self._shaped(fact, event)
            case StepTrained():
                return self._batch(event)
            case BatchYielded():
                return self._stale() + self._batch(event)
            case SequenceQuarantined() as fact:
                replanned = self.quarantine.replanned(fact)
                return [Decision(replanned)] if replanned is not None else []
            case _:
                return []

    def _judge(self, group: Group | None) -> list[Decision]:
        assert self.decisions is not None
        if group is None or group.accepted:
            return []
        source = self.decisions.source(group.source)
        if not ready(group, source):
            return []
        limit, twin = self._fit().limit, self.groups.has_twin(group)
        return [Decision(judge(group, source, self.yielded + 1, limit, twin))]

    def _shape(self, group: Group | None, revision: int) -> list[Decision]:
        assert self.decisions is not None
        if group is None:
            return []
        if self._duplicate(group):
            return [Decision(withdrawn(group, "duplicate"))] if revision == 0 else []
        fact = shape(group, self.decisions.source(group.source), revision)
        return [Decision(fact)] if fact is not None else []

    def _shaped(self, fact: SampleShaped, event: Event) -> list[Decision]:
        assert self.decisions is not None
        group = self.groups.get(fact.sample)
        if group is None or fact.revision:
            return []
        if not group.shaped_seq and group.accepted and not self._duplicate(group):
            # They are not about the group, and nobody makes others.
            return [Decision(withdrawn(group, "failed"))]
        if group.shaped_seq != event.seq:
            return []
        if staleness(group, self.yielded + 1) > self.decisions.source(group.source).staleness:
            # It became too old between its acceptance and this. In no batch that is on its way: those are of later steps.
            return [Decision(withdrawn(group, "stale"))]
        return self._batch(event) if self._lacked(fact.source, event.seq) else []

    def _lacked(self, name: str, seq: int) -> bool:
        """Whether the next batch lacked a group of the source before the event `seq`.

        One beyond the source's share changes nothing: what it would decide was decided before it. To make the plan again
        for each of them would take the square of their number.
        """
        assert self.decisions is not None
        for source in self.decisions.training():
            if source.name == name and self.groups.shaped_of(name) > source.groups:
                before = members(self.groups, source, self.yielded + 1, seq - 1, source.groups)
                return len(before) < source.groups
        return True

    def _batch(self, event: Event) -> list[Decision]:
        assert self.decisions is not None
        decision = batch(self.groups, self.decisions, self.run, self.yielded, self.trained, event.seq)
        return [decision] if decision is not None else []

    def _stale(self) -> list[Decision]:
        # Decided here, and of one that is shaped later then: how old a group is for a batch depends on the batch's number
        # alone, and the members of the batch before are settled now, so this can never contradict a yield that is on its way.
        assert self.decisions is not None
        return [
            Decision(withdrawn(group, "stale"))
            for source in self.decisions.training()
            for group in self.groups.waiting(source.name)
            if staleness(group, self.yielded + 1) > source.staleness
        ]
