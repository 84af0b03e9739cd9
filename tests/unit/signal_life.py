"""Groups of one source in a sampler, told what happens to them one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Decision
from schemas.config import Decisions
from schemas.envelope import Event
from schemas.facts import (
    Fact,
    Failure,
    RunStarted,
    SampleAccepted,
    SampleCompleted,
    SampleRejected,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.plan import Plan
from tests.unit.factories import config, event, finished


class Life:
    """Groups of one source in a sampler; decisions are told to it at once, unless `hold` says which are on their way."""

    def __init__(
        self,
        hold: tuple[type[Fact], ...] = (),
        teachers: tuple[str, ...] = (),
        run: dict[str, Any] | None = None,
        **source: Any,
    ) -> None:
        whole = {
            "name": "math",
            "pool": "p",
            "groups": 1,
            "group_size": 2,
            "environment": {"kind": "arithmetic"},
            "teachers": teachers,
            **source,
        }
        self.config = config(sources=[whole], teachers=[{"name": name} for name in teachers], **(run or {}))
        self.core, self.seq, self.hold = SamplerCore("r"), 0, hold
        self.facts: list[Fact] = []
        self.held: list[Fact] = []
        self.plans: list[Plan] = []
        self.log: list[Event] = []
        self.causes: dict[str, str] = {}
        self.decisions = Decisions.model_validate(self.config.decisions())
        self.tell(RunStarted(run="r", config=self.config.decisions()))

    def tell(self, *facts: Fact) -> None:
        for fact in facts:
            self.seq += 1
            causation = self.causes.get(fact.subject("r").text)
            told = replace(event(fact, self.seq), causation=causation)
            self.log.append(told)
            self.core.fold(told)
            for decision in self.core.decide(told):
                self._decided(decision, told.id)

    def _decided(self, decision: Decision, cause: str) -> None:
        self.causes.setdefault(decision.fact.subject("r").text, cause)
        self.plans += [Plan.model_validate_json(body) for body in decision.objects.values()]
        if isinstance(decision.fact, self.hold):
            self.held.append(decision.fact)
        else:
            self.facts.append(decision.fact)
            self.tell(decision.fact)

    def release(self) -> None:
        held, self.held, self.hold = self.held, [], ()
        self.facts += held
        self.tell(*held)

    def roll_out(self, *members: SequenceFinished | None, task: int = 0, sample: int = 0) -> SampleCompleted:
        """Dispatches a group whose members finish so, or fail; returns its completion."""
        name = f"math-{sample:06d}"
        for number in range(len(members)):
            self.tell(
                SequenceDispatched(
                    source="math",
                    sample=name,
                    sequence=f"{name}-{number}",
                    member=number,
                    group_size=len(members),
                    pool="p",
                    task_index=task,
                )
            )
        lost = Failure(kind="infra", reason="lost")
        self.tell(
            *(
                fact
                or SequenceFailed(
                    source="math", sample=name, sequence=f"{name}-{number}", attempts=1, failure=lost
                )
                for number, fact in enumerate(members)
            )
        )
        (completed,) = [f for f in self.of(SampleCompleted) if f.sample == name]
        return completed

    def of(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def end(self, sample: int = 0) -> str:
        """What became of a group."""
        ends = [
            fact.reason if isinstance(fact, SampleRejected) else "accepted"
            for fact in self.facts
            if isinstance(fact, SampleAccepted | SampleRejected) and fact.sample == f"math-{sample:06d}"
        ]
        return " ".join(ends) or "undecided"


def member(number: int, reward: float, sample: int = 0, **given: Any) -> SequenceFinished:
    return finished(f"math-{sample:06d}-{number}", reward, **given)


PAIR = (member(0, 1.0), member(1, 0.0))
