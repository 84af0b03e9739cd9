"""The numbers of a run as Prometheus families. Pure: from what was folded and seen to names, labels and values.

Promises:
- every family has the label `run`; the others are sources, pools, work consumers, reasons and kinds: their number is that of the
  configuration, never that of samples, sequences or hosts;
- what is not known yet (the loss before the first step) is left out, not told as 0;
- times are those of the events, in seconds since 1970: how long ago something was is for who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, get_args

from schemas.facts import SampleRejected
from services.dashboard.totals import Totals
from services.dashboard.view import SourceView, StepRow
from services.dashboard.watching import Watch

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_Found = tuple[tuple[str, ...], float]
_Reading = Callable[[SourceView], int]
_REASONS: tuple[str, ...] = get_args(SampleRejected.model_fields["reason"].annotation)
_STATES = ("running", "completed", "cancelled")


class _Families:
    """Makes families of one run."""

    def __init__(self, run: str) -> None:
        self._run = run

    def gauge(self, name: str, what: str, labels: tuple[str, ...], found: Iterable[_Found]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily(f"packtrain_{name}", what, labels=("run", *labels)), found)

    def counter(self, name: str, what: str, labels: tuple[str, ...], found: Iterable[_Found]) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily(f"packtrain_{name}", what, labels=("run", *labels)), found)

    def _filled(self, family: Metric, found: Iterable[_Found]) -> Metric:
        for labels, value in found:
            family.add_metric([self._run, *labels], value)  # pyright: ignore[reportAttributeAccessIssue]  # both kinds have it, their base has not
        return family


def run_families(run: str, totals: Totals, skipped: Mapping[str, int]) -> Iterator[Metric]:
    """Of what was folded; `skipped`: messages that were no event for the reader, by kind."""
    make = _Families(run)
    yield from _progress(make, totals, skipped)
    yield from _step(make, totals)
    yield from _sequences(make, totals)
    yield from _groups(make, totals)
    yield from _batch(make, totals)
    yield from _bytes(make, totals)


def _progress(make: _Families, totals: Totals, skipped: Mapping[str, int]) -> Iterator[Metric]:
    view = totals.view
    state = view.stopped.reason if view.stopped else "running"
    yield make.gauge(
        "run_state", "1 for what the run is", ("state",), (((s,), float(s == state)) for s in _STATES)
    )
    yield make.gauge("run_steps", "Steps that the run is to take", (), _one(view.steps))
    yield make.gauge(
        "run_step", "Newest step that was trained", (), _one(totals.trained.step if totals.trained else 0)
    )
    yield make.gauge("run_batch", "Newest batch that was decided", (), _one(max(view.rows, default=0)))
    yield make.gauge("run_batch_consumed", "Newest batch that every rank has read", (), _one(totals.consumed))
    yield make.gauge("run_policy_version", "Newest published policy", (), _one(view.policy_version))
    for name, what, at in (
        ("started", "the first event", view.started_at),
        ("last_event", "the newest event", view.last_at),
        ("last_step", "the newest trained step", totals.trained_at),
    ):
        yield make.gauge(f"run_{name}_timestamp_seconds", f"Time of {what}", (), _time(at))
    yield make.counter("run_events", "Events that were folded", (), _one(view.events))
    yield make.counter(
        "run_skipped",
        "Messages that were no event for the dashboard, by kind",
        ("kind",),
        (((kind,), skipped.get(kind, 0)) for kind in ("unknown", "invalid")),
    )
    yield make.gauge(
        "run_limit",
        "Concurrency limits that people changed; 0 is none",
        ("of", "name"),
        ((key, fact.concurrency) for key, fact in view.limits.items()),
    )


def _step(make: _Families, totals: Totals) -> Iterator[Metric]:
    last = totals.trained
    for name, what, value in (
        ("loss", "Objective of the newest step, per loss token", last and last.loss),
        ("kl", "Mean logprob(rollout) - logprob(trainer) of the newest step, in nats", last and last.kl),
        ("grad_norm", "Norm of the gradients of the newest step, before clipping", last and last.grad_norm),
        ("step_seconds", "Seconds that the newest step took", last and last.seconds),
        ("step_loss_tokens", "Tokens of the newest step that carried loss", last and last.loss_tokens),
    ):
        yield make.gauge(f"run_{name}", what, (), _one(value))
    yield make.counter("run_trainer_seconds", "Seconds of all steps", (), _one(totals.step_seconds))
    yield make.counter(
        "run_loss_tokens", "Tokens of all steps that carried loss", (), _one(totals.loss_tokens)
    )


def _sequences(make: _Families, totals: Totals) -> Iterator[Metric]:
    view = totals.view
    yield make.counter("run_sampled_tokens", "Sampled tokens of finished sequences", (), _one(view.generated))
    yield make.counter("run_attempts", "Attempts at sequences that were opened", (), _one(view.opened))
    yield make.counter(
        "run_sequences_dispatched",
        "Sequences that were sent out",
        ("source",),
        (((name,), totals.dispatched[name]) for name in view.sources),
    )
    yield make.counter(
        "run_sequences_finished",
        "Sequences that have finished",
        ("source",),
        (((name,), source.finished) for name, source in view.sources.items()),
    )
    failures = ("source", "kind", "reason")
    yield make.counter(
        "run_sequences_failed",
        "Sequences whose attempts all failed, by how the last one did",
        failures,
        ((tuple(key.split(" ")), number) for key, number in totals.sequences_failed.items()),
    )
    yield make.counter(
        "run_infra_failures",
        "Attempts that failed for the world's faults, whatever the reason",
        ("source",),
        (((name,), _infra(totals, name)) for name in view.sources),
    )
    yield make.counter(
        "run_attempts_failed",
        "Attempts that failed, as harness hosts tell: infra is retried, model is kept",
        failures,
        ((tuple(key.split(" ")), number) for key, number in totals.attempts_failed.items()),
    )
    yield from _of_sources(
        make,
        totals,
        ("run_unscored", "Sequences that a teacher could not score, for each", lambda s: s.unscored),
        (
            "run_quarantined",
            "Sequences that are trained in no step: objects damaged or gone",
            lambda s: s.quarantined,
        ),
    )


def _of_sources(make: _Families, totals: Totals, *counters: tuple[str, str, _Reading]) -> Iterator[Metric]:
    sources = totals.view.sources.items()
    for name, what, read in counters:
        yield make.counter(name, what, ("source",), [((key,), read(source)) for key, source in sources])


def _groups(make: _Families, totals: Totals) -> Iterator[Metric]:
    sources = totals.view.sources
    yield make.gauge(
        "run_groups_in_flight",
        "Groups that were sent out and are not decided",
        ("source",),
        (((name,), len(source.in_flight)) for name, source in sources.items()),
    )
    yield make.gauge(
        "run_groups_ready",
        "Accepted groups that no batch has taken",
        ("source",),
        (((name,), source.ready) for name, source in sources.items()),
    )
    yield from _of_sources(
        make,
        totals,
        ("run_groups_accepted", "Groups that were accepted", lambda s: s.accepted),
        ("run_groups_taken", "Groups that batches took", lambda s: s.taken),
        ("run_grading_fallbacks", "Groups decided without their grader's answer", lambda s: s.fallbacks),
        ("run_grading_late", "Groups whose grader answered after that", lambda s: s.late),
    )
    yield make.counter(
        "run_groups_rejected",
        "Groups that will not be trained, by reason",
        ("source", "reason"),
        # All of them, from the start: a count that appears as 1 is no increase to Prometheus.
        (((name, reason), s.rejected[reason]) for name, s in sources.items() for reason in _REASONS),
    )
    newest = {name: max(s.evaluations.items()) for name, s in sources.items() if s.evaluations}
    yield make.gauge(
        "run_evaluation_reward",
        "Mean reward of the source's newest evaluation, so far",
        ("source",),
        (((name,), mean.value) for name, (_, mean) in newest.items() if mean.value is not None),
    )
    yield make.gauge(
        "run_evaluation_version",
        "Policy version of that evaluation",
        ("source",),
        (((name,), version) for name, (version, _) in newest.items()),
    )


def _batch(make: _Families, totals: Totals) -> Iterator[Metric]:
    rows = totals.view.rows
    newest: StepRow | None = rows[max(rows)] if rows else None
    shares = {name: row.share for name, row in newest.sources.items()} if newest else {}
    for name, what, attribute in (
        ("reward", "Mean graded reward of the source's groups in the newest batch", "mean_reward"),
        (
            "staleness",
            "Versions between the policy and the oldest token in the newest batch",
            "max_staleness",
        ),
        ("batch_groups", "Groups in the newest batch", "groups"),
        ("batch_sequences", "Sequences in the newest batch", "sequences"),
        ("batch_tokens", "Tokens in the newest batch", "tokens"),
        ("batch_loss_tokens", "Tokens that carry loss in the newest batch", "loss_tokens"),
    ):
        found = [((source,), float(getattr(share, attribute))) for source, share in shares.items()]
        yield make.gauge(f"run_{name}", what, ("source",), found)
    microbatches = newest.microbatches if newest else None
    yield make.gauge(
        "run_batch_microbatches", "Micro-batches of a rank, newest batch", (), _one(microbatches)
    )


def _bytes(make: _Families, totals: Totals) -> Iterator[Metric]:
    yield make.counter(
        "run_written_bytes",
        "Bytes of objects that facts name, by kind",
        ("kind",),
        (((kind,), size) for kind, size in totals.view.written.items()),
    )
    yield make.counter("run_windows", "Windows that packers built", (), _one(totals.windows))
    yield make.counter("run_window_tokens", "Tokens of these windows", (), _one(totals.window_tokens))
    yield make.counter(
        "run_fetched_bytes", "Bytes that packers read from the store", (), _one(totals.fetched)
    )


def watched_families(run: str, watch: Watch, seq: int) -> Iterator[Metric]:
    """Of what was seen at the broker; `seq`: of the newest message that was folded."""
    make = _Families(run)
    known = watch.messages >= 0
    behind = max(0, watch.head - seq)
    yield make.gauge(
        "run_behind_events",
        "Messages of the log that are not folded yet",
        (),
        _one(behind if known else None),
    )
    yield make.gauge(
        "log_messages", "Messages in the run's stream", (), _one(watch.messages if known else None)
    )
    yield make.gauge("log_bytes", "Bytes of the run's stream", (), _one(watch.bytes if known else None))
    queues = {name: queue for name, queue in watch.queues.items() if queue is not None}
    for name, what, attribute in (
        ("pending", "Facts that wait for a reader", "pending"),
        ("unacked", "Facts that readers have in hand", "unacked"),
        ("readers", "Requests for work that wait: none while every reader is full", "readers"),
        ("redelivered", "Facts in hand that were given before", "redelivered"),
    ):
        found = [((consumer,), float(getattr(queue, attribute))) for consumer, queue in queues.items()]
        yield make.gauge(f"work_{name}", what, ("consumer",), found)
    yield make.gauge(
        "work_declared",
        "Whether a service ever came for this work",
        ("consumer",),
        (((consumer,), float(queue is not None)) for consumer, queue in watch.queues.items()),
    )
    yield make.gauge(
        "run_dead_letters",
        "Dead letters that nobody retried or dropped, by reader",
        ("reader",),
        (((reader,), number) for reader, number in watch.letters.items()),
    )
    yield make.gauge(
        "hosts",
        "Rollout hosts, as their reports say; silent: no report for 10 s, told for ten minutes",
        ("service", "pool", "state"),
        watch.hosts.items(),
    )


def _one(value: float | None) -> list[_Found]:
    return [] if value is None else [((), float(value))]


def _time(at: datetime | None) -> list[_Found]:
    return [] if at is None else [((), at.timestamp())]


def _infra(totals: Totals, source: str) -> int:
    return sum(n for key, n in totals.attempts_failed.items() if key.startswith(f"{source} infra "))
