"""The dispatcher's core: which prompts are sent out, and when the run ends. A fold over the log.

Promises:
- while batches are wanted, a training source has `ceil(groups * oversample)` groups in play (dispatched, and neither
  rejected nor yielded), so that what is rejected is replaced and memory is bounded;
- of a source with a limit (`pipeline.batch.limits`) no more sequences run at once, lowered ones excepted, which run out; its
  next group goes out with the end that makes room for it. A source without one is decided as if there were no limits;
- evaluation tasks go out before the first training group and again after the last step, on the final policy;
- `run.stopped` is decided once, when the last policy is published and every evaluation is in;
- ids are counted by source, so that every process that folds the same log decides the same facts.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from pipeline.batch.limits import Limits, Running
from pipeline.decision import Decision
from schemas.config import Decisions, Source
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    LimitChanged,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleRejected,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.names import sample_id, sample_index, sequence_id


class MixerCore:
    """See the module's promises."""

    STATE_VERSION: ClassVar[int] = 2

    def __init__(self, run: str) -> None:
        self.run = run
        self.decisions: Decisions | None = None
        self.dispatched: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.in_batches: Counter[str] = Counter()
        self.limits = Limits()
        self.running = Running()
        self.yielded = 0
        self.published = 0
        self.stopped = False

    def fold(self, event: Event) -> None:
        match event.fact:
            case RunStarted(config=config):
                self.decisions = Decisions.model_validate(config)
            case SequenceDispatched(source=source, sample=sample) as fact:
                # In the order of their numbers, whoever publishes: a higher one than before is a new group.
                if (index := sample_index(sample, source)) >= self.dispatched[source]:
                    self.dispatched[source] = index + 1
                    self.running.begin(fact)
            case SequenceFinished() | SequenceFailed() as fact:
                self.running.end(fact, self.dispatched[fact.source])
            case LimitChanged() as fact if (source := self._limited(fact)) is not None:
                self.limits.fold(fact, source)
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
        match event.fact:
            case RunStarted() | SampleRejected() | BatchYielded() | PolicyPublished():
                facts = self._facts(self.decisions)
            case SequenceFinished(source=name) | SequenceFailed(source=name):
                facts = self._groups(
                    self.decisions,
                    (s for s in self.decisions.sources if s.name == name and self.limits.of(s)),
                )
            case LimitChanged() as fact if (source := self._limited(fact)) is not None:
                facts = self._groups(self.decisions, (source,))
            case _:
                return []
        return [Decision(fact) for fact in facts]

    def dump(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "decisions": self.decisions.model_dump(mode="json") if self.decisions is not None else None,
            "dispatched": dict(self.dispatched),
            "rejected": dict(self.rejected),
            "in_batches": dict(self.in_batches),
            "limits": {source: list(change) for source, change in self.limits.changes.items()},
            "running": self.running.dump(),
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
        self.limits = Limits({source: (change[0], change[1]) for source, change in state["limits"].items()})
        self.running = Running.loaded(state["running"])
        self.yielded = state["yielded"]
        self.published = state["published"]
        self.stopped = state["stopped"]

    def in_play(self, source: str) -> int:
        """Groups dispatched, and neither rejected nor yielded."""
        return self.dispatched[source] - self.rejected[source] - self.in_batches[source]

    def _limited(self, fact: LimitChanged) -> Source | None:
        """The source whose limit is changed; None where it is a pool's, or of no source of ours."""
        sources = self.decisions.sources if self.decisions is not None and fact.of == "source" else ()
        return next((source for source in sources if source.name == fact.name), None)

    def _facts(self, decisions: Decisions) -> Iterator[Fact]:
        yield from self._groups(decisions, decisions.evaluation())
        if self._trained(decisions):
            if self._evaluated(decisions):
                yield RunStopped(run=self.run, reason="completed", steps=decisions.steps)
            return
        yield from self._groups(decisions, decisions.training())

    def _groups(self, decisions: Decisions, sources: Iterable[Source]) -> Iterator[SequenceDispatched]:
        """The sources' groups that are wanted, and have room."""
        for source in sources:
            first = self.dispatched[source.name]
            for index in range(first, first + min(self._wanted(decisions, source), self._room(source))):
                if source.evaluate:
                    version = 0 if index < source.evaluate else decisions.steps
                    yield from self._group(source, index, index % source.evaluate, version)
                else:
                    yield from self._group(source, index, index, 0)

    def _wanted(self, decisions: Decisions, source: Source) -> int:
        """Groups that the source is short of."""
        if source.evaluate:
            return self._rounds(decisions) * source.evaluate - self.dispatched[source.name]
        if self._trained(decisions) or self.yielded >= decisions.steps or not self._evaluated(decisions):
            return 0
        return math.ceil(source.groups * source.oversample) - self.in_play(source.name)

    def _room(self, source: Source) -> int:
        """Groups of the source that may begin."""
        if not (limit := self.limits.of(source)):
            return sys.maxsize
        return (limit - self.running.count(source.name)) // source.group_size

    def _trained(self, decisions: Decisions) -> bool:
        return self.published >= decisions.steps

    def _rounds(self, decisions: Decisions) -> int:
        return 2 if self._trained(decisions) else 1

    def _evaluated(self, decisions: Decisions) -> bool:
        rounds = self._rounds(decisions)
        return all(self.rejected[s.name] >= rounds * s.evaluate for s in decisions.evaluation())

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
