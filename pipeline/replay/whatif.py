"""What a run's decisions would have been with other values in its configuration, as far as its log can tell.

Promises:
- the inputs are the recorded ones: of what the core does not decide, every event, where it stands (events of sources that
  the changed configuration does not have are left out, and counted);
- the core's own decisions replace the recorded ones. A decision whose subject was recorded stands where the recorded fact
  stood, in our version; one that comes after that place, or was never recorded, stands at once; a recorded one that we do
  not decide is left out. With the configuration unchanged this is the recording;
- advantages that only the hook service makes are not made again: of a source whose changed hooks read columns, or are not
  built in, the recorded ones stand, and `unmade` says so;
- what the recording had on its way when it ended, and this code decides with the recorded configuration too, stays on its
  way.

What it cannot tell: rollouts that were never made are not invented. Groups, rewards, token counts and policy versions are
those that the recorded policies gave, and training takes place where it was recorded: the policies that other batches would
have made, and all that these would have sampled, are not in it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace

from pipeline.replay.rerun import Report, Rerun
from pipeline.replay.service import Service
from pipeline.replay.tally import BatchFigures, Tally
from pipeline.signal.hooks import built_in, chain
from schemas.config import Decisions, Source
from schemas.envelope import Event
from schemas.facts import Fact, RunStarted, SampleRejected, SampleShaped

LIMITS = (
    "Rollouts that were never made are not invented: groups, rewards, tokens and policy versions are the recorded ones,",
    "and training takes place where it was recorded. What other batches would have taught the policy is not in it.",
    "Each core is asked alone: the mixer sends out no replacements for groups that the changed sampler rejects.",
)


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group whose outcome is another; an empty outcome is one that the log does not come to."""

    sample: str
    source: str
    recorded: str
    changed: str


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A batch in both versions; None is one that was not, or could not have been, filled, or is not wanted."""

    step: int
    recorded: BatchFigures | None
    changed: BatchFigures | None
    added: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference that the change makes. Outcomes are counted as source -> outcome -> (recorded, changed)."""

    service: str
    run: str
    outcomes: dict[str, dict[str, tuple[int, int]]]
    groups: tuple[GroupChange, ...]
    advantages_changed: int
    """Samples that have advantages in both, not the same."""
    largest_advantage_change: float
    batches: tuple[BatchChange, ...]
    dispatched: dict[str, tuple[int, int]]
    """Sequences by source: (recorded, changed)."""
    dispatched_added: tuple[str, ...]
    dispatched_removed: tuple[str, ...]
    stopped: tuple[int | None, int | None]
    """The message at which the run is over: (recorded, changed)."""
    facts: tuple[int, int, int]
    """Of the core's own: with another body or made later, only in the changed version, only in the recorded."""
    left_out: int
    """Inputs of sources that the changed configuration does not have."""
    unmade: tuple[str, ...]
    """What cannot be made again with the change, in words."""
    failed: str
    """What the core raised, and on which message; empty if nothing. Then nothing after that message is in the difference."""
    steps: int
    """Of the changed configuration."""
    baseline: Report
    """The recorded configuration's own rerun: where that diverges, so does the difference."""

    @property
    def none(self) -> bool:
        return self.facts == (0, 0, 0) and not self.failed

    @property
    def unfilled(self) -> tuple[int, ...]:
        """Recorded batches that the changed run wants too, and that could not have been filled."""
        return tuple(b.step for b in self.batches if b.changed is None and b.step <= self.steps)


class WhatIf:
    """Two passes over the same events: `index` each, then `feed` each, then read `report`."""

    def __init__(self, run: str, service: Service, decisions: Decisions) -> None:
        self.run = run
        self.service = service
        self._steps = decisions.steps
        self._config = decisions.model_dump(mode="json")
        self._sources = {source.name: source for source in decisions.sources}
        self._unshaped = {source.name for source in decisions.training() if not _pure(source)}
        self._baseline = Rerun(run, service)
        self._recorded = Tally()
        self._places: dict[str, int] = {}
        self._core = service.core(run)
        self._started: RunStarted | None = None
        self._changed = Tally()
        self._decided: set[str] = set()
        self._held: dict[str, Fact] = {}
        self._bodies = 0
        self._added = 0
        self._missing = 0
        self._left_out = 0
        self._failed = ""
        self._on_the_way: set[str] | None = None

    def index(self, event: Event) -> None:
        """The first pass: what was recorded, and what this code makes of it unchanged."""
        self._recorded.see(self._baseline.core, event)
        if isinstance(event.fact, RunStarted):
            self._started = event.fact
        if self._decides(event.fact):
            self._places.setdefault(event.fact.subject(self.run).text, event.seq)
        self._baseline.feed(event)

    def _decides(self, fact: Fact) -> bool:
        """Whether the changed core decides what the fact says, whoever did in the recording."""
        if self.service.name == "sampler" and (
            isinstance(fact, SampleShaped) or (isinstance(fact, SampleRejected) and fact.by == "hook")
        ):
            return fact.source not in self._unshaped
        inherited = self._started is not None and self._started.begins_with(fact)
        return self.service.decides(fact) and not inherited

    def feed(self, event: Event) -> None:
        """The second pass."""
        fact = event.fact
        if self._on_the_way is None:
            self._on_the_way = self._baseline.pending()
        if self._failed:
            return
        if isinstance(fact, RunStarted):
            event = replace(event, fact=fact.model_copy(update={"config": self._config}))
        elif self._decides(fact):
            ours = self._held.pop(fact.subject(self.run).text, None)
            if ours is None:
                return
            self._bodies += ours != fact
            event = replace(event, fact=ours)
        elif getattr(fact, "source", None) not in {None, *self._sources}:
            self._left_out += 1
            return
        try:
            self._settle(event)
        except (
            Exception
        ) as error:  # whatever it is, it would stop the service on this event: that is the finding
            self._failed = f"message {event.seq}, {fact.type} {fact.id()}: {type(error).__name__}: {error}"

    def _settle(self, event: Event) -> None:
        """Folds the event, and what is decided on it and has no place further on."""
        following = deque([event])
        while following:
            now = following.popleft()
            self._changed.see(self._core, now)
            self._core.fold(now)
            for decision in self._core.decide(now):
                subject = decision.fact.subject(self.run).text
                if subject in self._decided or not self._decides(decision.fact):
                    continue
                self._decided.add(subject)
                at = self._places.get(subject)
                if at is not None and at > event.seq:
                    self._held[subject] = decision.fact
                elif subject not in (self._on_the_way or ()):
                    self._bodies += at is not None  # recorded, but made later here
                    following.append(replace(now, fact=decision.fact, id=f"{now.id}+", causation=now.id))

    def _unmade(self) -> tuple[str, ...]:
        if self._started is None or self.service.name == "mixer":
            return ()
        recorded = {s.name: s for s in Decisions.model_validate(self._started.config).sources}
        told: list[str] = []
        for name, source in self._sources.items():
            before = recorded.get(name)
            if before is None or not source.groups:
                continue
            if name in self._unshaped and self.service.name == "sampler":
                same = (before.hooks, before.grader) == (source.hooks, source.grader)
                told.append(
                    f"source {name}: its hooks read columns or are not built in, so that only a run makes its advantages: the recorded "
                    f"ones stand{'' if same else ', which other hooks made'}, and a group without any is in no batch"
                )
            new = [teacher for teacher in source.teachers if teacher not in before.teachers]
            if new:
                told.append(
                    f"source {name}: teacher {new[0]} scored none of its recorded sequences, so that none of its groups is decided"
                )
        return tuple(told)

    def report(self) -> Difference:
        then, now = self._recorded, self._changed
        both = then.advantages.keys() & now.advantages.keys()
        changes = [
            max(
                (abs(a - b) for a, b in zip(then.advantages[s], now.advantages[s], strict=False)), default=0.0
            )
            for s in sorted(both)
            if then.advantages[s] != now.advantages[s]
        ]
        samples = sorted(then.outcomes.keys() | now.outcomes.keys())
        steps = sorted(then.batches.keys() | now.batches.keys())
        ours = self._decided - self._baseline.pending()
        return Difference(
            service=self.service.name,
            run=self.run,
            outcomes=_outcomes(then, now),
            groups=tuple(
                change
                for sample in samples
                for change in [_group(sample, then, now)]
                if change.recorded != change.changed
            ),
            advantages_changed=len(changes),
            largest_advantage_change=max(changes, default=0.0),
            batches=tuple(_batch(step, then.batches.get(step), now.batches.get(step)) for step in steps),
            dispatched=_pairs(Counter(then.dispatched.values()), Counter(now.dispatched.values())),
            dispatched_added=tuple(s for s in now.dispatched if s not in then.dispatched),
            dispatched_removed=tuple(s for s in then.dispatched if s not in now.dispatched),
            stopped=(then.stopped, now.stopped),
            facts=(self._bodies, len(ours - self._places.keys()), len(self._places.keys() - ours)),
            left_out=self._left_out,
            unmade=self._unmade(),
            failed=self._failed,
            steps=self._steps,
            baseline=self._baseline.report(),
        )


def _pure(source: Source) -> bool:
    return built_in(source) and chain(source).pure


def _pairs(then: Counter[str], now: Counter[str]) -> dict[str, tuple[int, int]]:
    return {key: (then[key], now[key]) for key in sorted(then.keys() | now.keys())}


def _outcomes(then: Tally, now: Tally) -> dict[str, dict[str, tuple[int, int]]]:
    sources = sorted({source for tally in (then, now) for source, _ in tally.outcomes.values()})
    return {
        source: _pairs(
            Counter(outcome for of, outcome in then.outcomes.values() if of == source),
            Counter(outcome for of, outcome in now.outcomes.values() if of == source),
        )
        for source in sources
    }


def _group(sample: str, then: Tally, now: Tally) -> GroupChange:
    before, after = then.outcomes.get(sample), now.outcomes.get(sample)
    source = (before or after or ("", ""))[0]
    return GroupChange(sample, source, before[1] if before else "", after[1] if after else "")


def _batch(step: int, then: BatchFigures | None, now: BatchFigures | None) -> BatchChange:
    before = then.samples if then is not None else ()
    after = now.samples if now is not None else ()
    return BatchChange(
        step=step,
        recorded=then,
        changed=now,
        added=tuple(s for s in after if s not in before),
        removed=tuple(s for s in before if s not in after),
    )
