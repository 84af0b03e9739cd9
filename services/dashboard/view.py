"""What a run looks like from its log: a fold of events into what the live view and the final table show.

Promises:
- `fold` is a pure step over events in stream order: no clock, no I/O, so the view of a finished run, of a live one and
  of a replayed one are made by the same code;
- a group is in flight from its first dispatched sequence until it is accepted or rejected, and ready from its
  acceptance until a batch takes it, it grows too old, or its hooks cannot shape it;
- what is rejected is counted by reason and belongs to the step that was yielded next;
- of the limits that people changed, the newest of each holds, whatever order they are read in.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from schemas.config import Decisions
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    LimitChanged,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceQuarantined,
    SequenceScored,
    SequenceVerified,
    SourceShare,
    StepTrained,
    WindowPacked,
)

RATE_WINDOW = timedelta(seconds=10)


@dataclass
class Mean:
    """A running mean, of rewards or of tasks' mean rewards; `value` is None before the first."""

    count: int = 0
    total: float = 0.0

    def add(self, values: tuple[float, ...]) -> None:
        self.count += len(values)
        self.total += sum(values)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class SourceView:
    """One source. `pending` is what the next yielded step will be charged with. `withdrawn`: groups that were accepted, and
    rejected before a batch took them. `fallbacks`: groups that were decided without their grader's answer; `late`: those whose
    answer came after that; `unscored`: sequences that a teacher could not score, counted for each; `quarantined`: sequences that a
    batch is trained without, since their objects are damaged or gone."""

    name: str
    groups: int
    evaluate: int
    in_flight: set[str] = field(default_factory=set)
    accepted: int = 0
    taken: int = 0
    withdrawn: int = 0
    fallbacks: int = 0
    late: int = 0
    unscored: int = 0
    quarantined: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    failed: int = 0
    infra_failures: int = 0
    rewards: Mean = field(default_factory=Mean)
    pending_rejected: Counter[str] = field(default_factory=Counter)
    pending_rewards: Mean = field(default_factory=Mean)
    versions: dict[str, int] = field(default_factory=dict)
    evaluations: dict[int, Mean] = field(default_factory=dict)

    @property
    def ready(self) -> int:
        """Accepted groups that no batch has taken yet."""
        return self.accepted - self.taken - self.withdrawn

    @property
    def before(self) -> Mean | None:
        """Evaluation of the initial policy, version 0."""
        return self.evaluations.get(0)

    @property
    def after(self) -> tuple[int, Mean] | None:
        """(policy version, evaluation) of the newest evaluated policy after the initial one."""
        newest = max(self.evaluations, default=0)
        return (newest, self.evaluations[newest]) if newest else None


@dataclass
class SourceRow:
    """One source in one step."""

    share: SourceShare
    rejected: Counter[str]
    rewards: Mean


@dataclass
class StepRow:
    """One batch, from its yield to its step. `trained` is None until the optimizer step is in the log."""

    step: int
    policy_version: int
    sources: dict[str, SourceRow]
    microbatches: int
    tokens: int = 0
    fetched: int = 0
    windows: int = 0
    trained: StepTrained | None = None


@dataclass
class View:
    """The state of the fold."""

    run: str = ""
    steps: int = 0
    dp: int = 1
    sources: dict[str, SourceView] = field(default_factory=dict)
    rows: dict[int, StepRow] = field(default_factory=dict)
    policy_version: int = 0
    stopped: RunStopped | None = None
    started_at: datetime | None = None
    last_at: datetime | None = None
    events: int = 0
    sequence: int = 0
    dispatched: int = 0
    opened: int = 0
    generated: int = 0
    written: dict[str, int] = field(default_factory=dict)
    recent: deque[tuple[datetime, int]] = field(default_factory=deque)
    limits: dict[tuple[str, str], LimitChanged] = field(default_factory=dict)
    """Those that were changed, by what they are of and its name."""

    @property
    def trained_steps(self) -> int:
        return sum(row.trained is not None for row in self.rows.values())

    @property
    def fetched(self) -> int:
        """Bytes that packers read from the store."""
        return sum(row.fetched for row in self.rows.values())

    @property
    def ended(self) -> int:
        """Sequences that finished or failed."""
        return sum(source.finished + source.failed for source in self.sources.values())

    def seconds(self) -> float:
        """Time from the first event to the last, interruptions included."""
        if self.started_at is None or self.last_at is None:
            return 0.0
        return (self.last_at - self.started_at).total_seconds()

    def rate(self, now: datetime) -> float:
        """Sampled tokens a second, of the sequences that finished in the last `RATE_WINDOW`."""
        return (
            sum(tokens for at, tokens in self.recent if now - at <= RATE_WINDOW) / RATE_WINDOW.total_seconds()
        )

    def source(self, name: str) -> SourceView:
        """The source's view; a source that the configuration does not know is shown all the same."""
        return self.sources.setdefault(name, SourceView(name, 0, 0))


def fold(view: View, event: Event) -> View:
    """`view` with one more event in it (the same object, changed)."""
    view.events += 1
    view.sequence = event.seq
    view.started_at = view.started_at or event.time
    view.last_at = event.time
    match event.fact:
        case RunStarted() as fact:
            decisions = Decisions.model_validate(fact.config)
            view.run, view.steps, view.dp = fact.run, decisions.steps, decisions.batch.dp
            view.sources = {s.name: SourceView(s.name, s.groups, s.evaluate) for s in decisions.sources}
        case RunStopped() as fact:
            view.stopped = fact
        case SequenceDispatched() as fact:
            source = view.source(fact.source)
            view.dispatched += 1
            source.in_flight.add(fact.sample)
            if source.evaluate:
                source.versions[fact.sample] = fact.min_policy_version
        case SequenceOpened():
            view.opened += 1
        case SequenceVerified() as fact:
            view.source(fact.source).infra_failures += fact.failure is not None
        case SequenceFinished() as fact:
            _finished(view, fact, event.time)
        case SequenceFailed() as fact:
            view.source(fact.source).failed += 1
        case SampleCompleted() as fact:
            _completed(view, fact)
        case SequenceScored() as fact:
            view.source(fact.source).unscored += fact.failure is not None
            if fact.scores is not None:
                _write(view, "sidecars", fact.scores.bytes)
        case SequenceQuarantined() as fact:
            view.source(fact.source).quarantined += 1
        case SampleGraded() as fact:
            source = view.source(fact.source)
            source.late += fact.revision > 0
            source.fallbacks += fact.fallback is not None
            if fact.report is not None:
                _write(view, "reports", fact.report.bytes)
        case SampleShaped() as fact:
            for sidecar in fact.sidecars:
                if sidecar is not None:
                    _write(view, "sidecars", sidecar.bytes)
        case SampleAccepted() as fact:
            source = view.source(fact.source)
            source.in_flight.discard(fact.sample)
            source.accepted += 1
        case SampleRejected() as fact:
            _rejected(view.source(fact.source), fact)
        case BatchYielded() as fact:
            _yielded(view, fact)
        case WindowPacked() as fact:
            if row := view.rows.get(fact.step):
                row.tokens += fact.tokens
                row.fetched += fact.fetched
                row.windows += 1
        case StepTrained() as fact:
            _write(view, "weights", fact.weights.bytes)
            _write(view, "optimizer", fact.optimizer.bytes)
            if row := view.rows.get(fact.step):
                row.trained = fact
        case PolicyPublished() as fact:
            view.policy_version = fact.step
        case LimitChanged() as fact:
            before = view.limits.get((fact.of, fact.name))
            if before is None or fact.number > before.number:
                view.limits[fact.of, fact.name] = fact
        case _:
            pass
    return view


def _write(view: View, kind: str, size: int) -> None:
    view.written[kind] = view.written.get(kind, 0) + size


def _finished(view: View, fact: SequenceFinished, at: datetime) -> None:
    generated = sum(context.generated for context in fact.contexts)
    view.source(fact.source).finished += 1
    view.generated += generated
    _write(view, "payloads", fact.payload.bytes)
    view.recent.append((at, generated))
    while at - view.recent[0][0] > RATE_WINDOW:
        view.recent.popleft()


def _completed(view: View, fact: SampleCompleted) -> None:
    source = view.source(fact.source)
    source.rewards.add(fact.rewards)
    source.pending_rewards.add(fact.rewards)
    if source.evaluate:
        evaluation = source.evaluations.setdefault(source.versions.pop(fact.sample, 0), Mean())
        if fact.rewards:  # a task counts once, however many sequences it was given
            evaluation.add((sum(fact.rewards) / len(fact.rewards),))


def _rejected(source: SourceView, fact: SampleRejected) -> None:
    source.rejected[fact.reason] += 1
    source.pending_rejected[fact.reason] += 1
    if fact.by == "hook" or (fact.reason == "stale" and fact.sample not in source.in_flight):
        # Accepted before, and not shaped, or too old for the batch that would have taken it.
        source.withdrawn += 1
    source.in_flight.discard(fact.sample)


def _yielded(view: View, fact: BatchYielded) -> None:
    _write(view, "plans", fact.plan.bytes)
    rows: dict[str, SourceRow] = {}
    for name, share in fact.sources.items():
        source = view.source(name)
        source.taken += share.groups
        rows[name] = SourceRow(share, source.pending_rejected, source.pending_rewards)
        source.pending_rejected, source.pending_rewards = Counter(), Mean()
    view.rows[fact.step] = StepRow(fact.step, fact.policy_version, rows, fact.microbatches)
