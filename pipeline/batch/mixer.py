"""The dispatcher's core: which prompts are sent out, and when the run ends. A fold over the log.

Promises:
- while batches are wanted, a training source has `ceil(groups * oversample)` groups in play (dispatched, and neither
  rejected nor yielded), so that what is rejected is replaced and memory is bounded;
- evaluation tasks go out before the first training group and again after the last step, on the final policy;
- `run.stopped` is decided once, when the last policy is published and every evaluation is in;
- ids are counted by source, so that every process that folds the same log decides the same facts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from pipeline.decision import Decision
from schemas.config import Decisions, Source
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleRejected,
    SequenceDispatched,
)
from schemas.names import sample_id, sample_index, sequence_id


class MixerCore:
    """See the module's promises."""

    STATE_VERSION: ClassVar[int] = 1

    def __init__(self, run: str) -> None:
        self.run = run
        self.decisions: Decisions | None = None
        self.dispatched: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.in_batches: Counter[str] = Counter()
        self.yielded = 0
        self.published = 0
        self.stopped = False

    def fold(self, event: Event) -> None:
        match event.fact:
            case RunStarted(config=config):
                self.decisions = Decisions.model_validate(config)
            case SequenceDispatched(source=source, sample=sample):
                self.dispatched[source] = max(self.dispatched[source], sample_index(sample, source) + 1)
            case SampleRejected(source=source):
                self.rejected[source] += 1
            case BatchYielded(step=step, sources=sources):
                self.yielded = max(self.yielded, step)
                self.in_batches.update({name: share.groups for name, share in sources.items()})
            case PolicyPublished(step=step):
                self.published = max(self.published, step)
            case RunStopped():
                self.stopped = True
            case _:
                pass

    def decide(self, event: Event) -> list[Decision]:
        if self.decisions is None or self.stopped:
            return []
        # A dispatch changes nothing: how many groups there are to be follows from these alone. To decide the rest of a burst
        # again on each of its events would take the square of its size.
        if not isinstance(event.fact, RunStarted | SampleRejected | BatchYielded | PolicyPublished):
            return []
        return [Decision(fact) for fact in self._facts(self.decisions)]

    def dump(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "decisions": self.decisions.model_dump(mode="json") if self.decisions is not None else None,
            "dispatched": dict(self.dispatched),
            "rejected": dict(self.rejected),
            "in_batches": dict(self.in_batches),
            "yielded": self.yielded,
            "published": self.published,
            "stopped": self.stopped,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.run = state["run"]
        decisions = state["decisions"]
        self.decisions = Decisions.model_validate(decisions) if decisions is not None else None
        self.dispatched = Counter(state["dispatched"])
        self.rejected = Counter(state["rejected"])
        self.in_batches = Counter(state["in_batches"])
        self.yielded = state["yielded"]
        self.published = state["published"]
        self.stopped = state["stopped"]

    def in_play(self, source: str) -> int:
        """Groups dispatched, and neither rejected nor yielded."""
        return self.dispatched[source] - self.rejected[source] - self.in_batches[source]

    def _facts(self, decisions: Decisions) -> Iterator[Fact]:
        rounds = 1 if self.published < decisions.steps else 2
        for source in decisions.evaluation():
            for index in range(self.dispatched[source.name], rounds * source.evaluate):
                version = 0 if index < source.evaluate else decisions.steps
                yield from self._group(source, index, index % source.evaluate, version)
        evaluated = all(self.rejected[s.name] >= rounds * s.evaluate for s in decisions.evaluation())
        if rounds == 2:
            if evaluated:
                yield RunStopped(run=self.run, reason="completed", steps=decisions.steps)
            return
        if not evaluated or self.yielded >= decisions.steps:
            return
        for source in decisions.training():
            missing = math.ceil(source.groups * source.oversample) - self.in_play(source.name)
            for index in range(self.dispatched[source.name], self.dispatched[source.name] + max(missing, 0)):
                yield from self._group(source, index, index, 0)

    @staticmethod
    def _group(source: Source, index: int, task: int, version: int) -> Iterator[SequenceDispatched]:
        sample = sample_id(source.name, index)
        for member in range(source.group_size):
            yield SequenceDispatched(
                source=source.name,
                sample=sample,
                sequence=sequence_id(sample, member),
                member=member,
                group_size=source.group_size,
                pool=source.pool,
                task_index=task,
                min_policy_version=version,
            )
