"""The dispatcher's core: which prompts are sent out, and when the run ends. A fold over the log.

Promises:
- while batches are wanted, a training source has `ceil(groups * oversample)` groups in play (dispatched, and neither
  rejected nor yielded), or by demand as many as `pipeline.batch.demand` says, so that what is rejected is replaced and memory
  is bounded;
- of a source with a limit (`pipeline.batch.limits`) no more sequences run at once, lowered ones excepted, which run out; its
  next group goes out with the end that makes room for it. A source without one is decided as if there were no limits;
- by demand, or under `mixer.in_flight`, which the training sources share, groups go out in the order of their weights, each
  decided once, on the event that made it wanted or made room for it;
- groups that a run begins with, another run's, have the first numbers of their source: they are the launcher's to send out;
- a source of so many tasks takes them in turn, by the number of the group;
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

from pipeline.batch.demand import Record, order, targets, weights
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
    SampleAccepted,
    SampleCompleted,
    SampleRejected,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.names import sample_id, sample_index, sequence_id


class MixerCore:
    """See the module's promises."""

    STATE_VERSION: ClassVar[int] = 3

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
        # Of the training sources, where they share what goes out: by demand, or under a limit for all of them.
        self.records: dict[str, Record] = {}
        self.began: dict[str, float] = {}
        self._fresh: list[tuple[str, int]] = []

    def fold(self, event: Event) -> None:
        match event.fact:
            case RunStarted(config=config) as fact:
                self.decisions = Decisions.model_validate(config)
                if fact.inherited is not None:
                    self.dispatched.update(fact.inherited.groups)
                if self.decisions.mixer.dispatch == "demand" or self.decisions.mixer.in_flight:
                    self.records = {
                        s.name: Record(self.dispatched[s.name]) for s in self.decisions.training()
                    }
            case SequenceDispatched(source=source, sample=sample) as fact:
                # In the order of their numbers, whoever publishes: a higher one than before is a new group.
                if (index := sample_index(sample, source)) >= self.dispatched[source]:
                    self.dispatched[source] = index + 1
                    self.running.begin(fact)
                    if (record := self.records.get(source)) is not None:
                        record.granted = max(record.granted, index + 1)
                        self.began[sample] = event.time.timestamp()
            case SequenceFinished() | SequenceFailed() as fact:
                self.running.end(fact, self.dispatched[fact.source])
            case SampleCompleted(source=source, sample=sample) if began := self.began.pop(sample, None):
                self.records[source].time(event.time.timestamp() - began)
            case LimitChanged() as fact if (source := self._limited(fact)) is not None:
                self.limits.fold(fact, source)
            case SampleAccepted(source=source) if (record := self.records.get(source)) is not None:
                record.accept()
            case SampleRejected(source=source) as fact:
                self.rejected[source] += 1
                if (record := self.records.get(source)) is not None:
                    # Without a pass rate though there are tokens: as its fields are described, it had been accepted.
                    if fact.by == "hook" or (fact.pass_rate is None and fact.tokens):
                        record.spoil()
                    else:
                        record.reject()
            case BatchYielded(step=step, sources=sources):
                self.yielded = max(self.yielded, step)
                self.in_batches.update({name: share.groups for name, share in sources.items()})
                for name in sources.keys() & self.records.keys():
                    self.records[name].waiting -= sources[name].groups
            case PolicyPublished(step=step):
                self.published = max(self.published, step)
            case RunStopped():
                self.stopped = True
            case _:
                pass
        self._fresh = self._grant(event)

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
                facts = iter(())
        return [Decision(fact) for fact in (*facts, *self._granted(self.decisions))]

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
            "records": {source: record.dump() for source, record in self.records.items()},
            "began": dict(self.began),
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
        self.records = {source: Record(**record) for source, record in state["records"].items()}
        self.began = dict(state["began"])
        self._fresh = []

    def in_play(self, source: str) -> int:
        """Groups dispatched, and neither rejected nor yielded."""
        return self.dispatched[source] - self.rejected[source] - self.in_batches[source]

    def _grant(self, event: Event) -> list[tuple[str, int]]:
        """(source, number) of the groups that go out now where training sources share what does, in order.

        Part of the fold: what was decided counts from then on, whether or not it is in the log yet, so that the rest of a burst
        is not decided again on each event that comes between.
        """
        decisions = self.decisions
        if not self.records or decisions is None or self.stopped or not self._batches_wanted(decisions):
            return []
        training, mixer, records = decisions.training(), decisions.mixer, self.records
        match event.fact:
            case RunStarted() | SampleCompleted() | SampleAccepted() | SampleRejected() | BatchYielded():
                pass
            case PolicyPublished() | LimitChanged():
                pass
            case SequenceFinished(source=name) | SequenceFailed(source=name):
                # Where no limit holds, the end of a sequence makes no room.
                if not mixer.in_flight and not any(s.name == name and self.limits.of(s) for s in training):
                    return []
            case _:
                return []
        # Granted ones run, or are about to.
        running = {
            s.name: self.running.count(s.name)
            + (records[s.name].granted - self.dispatched[s.name]) * s.group_size
            for s in training
        }
        free = mixer.in_flight - sum(running.values()) if mixer.in_flight else sys.maxsize
        short: dict[str, int] = {}
        for source, wanted in zip(training, targets(training, records, mixer), strict=True):
            in_play = records[source.name].granted - self.rejected[source.name] - self.in_batches[source.name]
            short[source.name] = min(wanted - in_play, self._room(source, running[source.name]))
        chosen = order(training, records, weights(training, records, mixer.alpha), short, free)
        out: list[tuple[str, int]] = []
        for name in chosen:
            out.append((name, records[name].granted))
            records[name].granted += 1
        return out

    def _granted(self, decisions: Decisions) -> Iterator[SequenceDispatched]:
        sources = {source.name: source for source in decisions.training()} if self._fresh else {}
        for name, index in self._fresh:
            yield from self._group(sources[name], index, _task(sources[name], index), 0)

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
            room = self._room(source, self.running.count(source.name))
            for index in range(first, first + min(self._wanted(decisions, source), room)):
                version = decisions.steps if source.evaluate and index >= source.evaluate else 0
                yield from self._group(source, index, _task(source, index), version)

    def _wanted(self, decisions: Decisions, source: Source) -> int:
        """Groups that the source is short of."""
        if source.evaluate:
            return self._rounds(decisions) * source.evaluate - self.dispatched[source.name]
        # Of a source that shares what goes out, see `_grant`.
        if source.name in self.records or not self._batches_wanted(decisions):
            return 0
        return math.ceil(source.groups * source.oversample) - self.in_play(source.name)

    def _room(self, source: Source, running: int) -> int:
        """Groups of the source that may begin while so many of its sequences run."""
        if not (limit := self.limits.of(source)):
            return sys.maxsize
        return (limit - running) // source.group_size

    def _batches_wanted(self, decisions: Decisions) -> bool:
        return not self._trained(decisions) and self.yielded < decisions.steps and self._evaluated(decisions)

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


def _task(source: Source, index: int) -> int:
    """Which task group `index` of a source has."""
    tasks = source.evaluate or source.tasks
    return index % tasks if tasks else index
