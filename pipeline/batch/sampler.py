"""The sampler's core: groups complete, are judged and shaped, and batches yield. A fold over the log.

Promises:
- every decision depends on the folded state and one event; configuration enters with `run.started`;
- a group that is too old for the next batch is rejected when the batch before it is settled, never trained;
- what is yielded or rejected is forgotten: state is bounded by what is in flight.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pipeline.batch.yielding import batch, members
from pipeline.decision import Decision
from pipeline.signal.sampling import Group, Groups, complete, judge, shape, staleness
from schemas.config import Decisions
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
    StepTrained,
)


class SamplerCore:
    """See the module's promises."""

    STATE_VERSION: ClassVar[int] = 2

    def __init__(self, run: str) -> None:
        self.run = run
        self.decisions: Decisions | None = None
        self.groups = Groups()
        self.yielded = 0
        self.trained = 0

    def fold(self, event: Event) -> None:
        match event.fact:
            case RunStarted(config=config):
                self.decisions = Decisions.model_validate(config)
            case SequenceDispatched() as fact:
                self.groups.dispatched(fact)
            case SequenceFinished() as fact:
                self.groups.finished(fact, self._masked(fact))
            case SequenceFailed() as fact:
                self.groups.failed(fact)
            case SampleGraded(sample=sample, rewards=rewards):
                if group := self.groups.get(sample):
                    group.rewards = rewards
            case SampleShaped() as fact:
                self.groups.shaped(fact, event.seq)
            case SampleRejected(sample=sample):
                self.groups.forget(sample)
            case BatchYielded() as fact:
                self._settle(fact)
            case StepTrained(step=step):
                self.trained = max(self.trained, step)
            case _:
                pass

    def _masked(self, fact: SequenceFinished) -> bool:
        if self.decisions is None:
            return False
        # By name, not `Decisions.source`: a run that was given another configuration for a replay may lack the source.
        sources = (source for source in self.decisions.sources if source.name == fact.source)
        return any(source.effects.get(fact.termination) == "mask" for source in sources)

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
        for group in self.members(fact):
            self.groups.forget(group.sample)
        self.yielded = max(self.yielded, fact.step)

    def dump(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "decisions": self.decisions.model_dump(mode="json") if self.decisions is not None else None,
            "yielded": self.yielded,
            "trained": self.trained,
            **self.groups.dump(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.run = state["run"]
        decisions = state["decisions"]
        self.decisions = Decisions.model_validate(decisions) if decisions is not None else None
        self.yielded = state["yielded"]
        self.trained = state["trained"]
        self.groups.load(state)

    def decide(self, event: Event) -> list[Decision]:
        if self.decisions is None:
            return []
        match event.fact:
            case SequenceFinished(sample=sample) | SequenceFailed(sample=sample):
                group = self.groups.get(sample)
                completed = complete(group) if group is not None else None
                return [Decision(completed)] if completed is not None else []
            case SampleGraded(sample=sample, rewards=rewards):
                group = self.groups.get(sample)
                if group is None:
                    return []
                source, budget = self.decisions.source(group.source), self.decisions.batch.token_budget
                return [Decision(judge(group, source, rewards, self.yielded + 1, budget))]
            case SampleAccepted(sample=sample):
                group = self.groups.get(sample)
                return (
                    [Decision(shape(group, self.decisions.source(group.source)))] if group is not None else []
                )
            case SampleShaped(source=source):
                return self._batch(event) if self._lacked(source, event.seq) else []
            case StepTrained():
                return self._batch(event)
            case BatchYielded():
                return self._stale() + self._batch(event)
            case _:
                return []

    def _lacked(self, name: str, seq: int) -> bool:
        """Whether the next batch lacked a group of the source before the event `seq`.

        One beyond the source's share changes nothing: what it would decide was decided before it. To make the plan again
        for each of them would take the square of their number.
        """
        assert self.decisions is not None
        for source in self.decisions.training():
            if source.name == name:
                before = members(self.groups, source, self.yielded + 1, seq - 1, source.groups)
                return len(before) < source.groups
        return False

    def _batch(self, event: Event) -> list[Decision]:
        assert self.decisions is not None
        decision = batch(self.groups, self.decisions, self.run, self.yielded, self.trained, event.seq)
        return [decision] if decision is not None else []

    def _stale(self) -> list[Decision]:
        # Decided here and nowhere else: how old a group is for a batch depends on the batch's number alone, and the
        # members of the batch before are settled now, so this can never contradict a yield that is on its way.
        assert self.decisions is not None
        return [
            Decision(
                SampleRejected(source=source.name, sample=group.sample, reason="stale", tokens=group.tokens())
            )
            for source in self.decisions.training()
            for group in self.groups.waiting(source.name)
            if staleness(group, self.yielded + 1) > source.staleness
        ]
