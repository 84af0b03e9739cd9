"""The live view of a run: a table that redraws itself on a terminal, plain lines elsewhere.

Shows what `services.dashboard` folded and what the supervisor counted; decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from schemas.envelope import Event
from schemas.facts import (
    BatchReplanned,
    BatchYielded,
    LimitChanged,
    PolicyPublished,
    RunStarted,
    SampleCompleted,
    SequenceQuarantined,
    StepTrained,
)
from services.cli.limit import told
from services.dashboard import Mean, SourceView, StepRow, View

_REDRAW_S = 0.25
_PLAIN_EVERY_S = 10.0


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def counted(count: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def missed(source: SourceView) -> list[str]:
    """Of one source what graders and teachers did not give, or not in time, where there is any."""
    each = (
        ("fallback", source.fallbacks),
        ("late answer", source.late),
        ("unscored sequence", source.unscored),
    )
    return [counted(count, what) for what, count in each if count]


def reasons(rejected: Counter[str]) -> str:
    """`3: all_zero 2, stale 1`, or `0`."""
    detail = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
    return f"{rejected.total()}: {detail}" if detail else "0"


class Screen:
    """Draws a view while the run goes on. A context manager; `tick` redraws until it is cancelled."""

    def __init__(
        self, console: Console, view: View, restarts: Counter[str], causes: Mapping[str, str], plain: bool
    ) -> None:
        self._console = console
        self._view = view
        self._restarts = restarts
        self._causes = causes
        self._told: Counter[str] = Counter()
        self._live = (
            None
            if plain or not console.is_terminal
            else Live(console=console, auto_refresh=False, transient=True)
        )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    async def tick(self) -> None:
        """Redraws, or tells now and then where the run is."""
        since = 0.0
        while True:
            await asyncio.sleep(_REDRAW_S)
            since += _REDRAW_S
            self._tell_restarts()
            if self._live is not None:
                self._live.update(render(self._view, self._restarts, datetime.now(UTC)), refresh=True)
            elif since >= _PLAIN_EVERY_S:
                since = 0.0
                self.line(progress_line(self._view, datetime.now(UTC)))

    def event(self, event: Event) -> None:
        """Tells the few events that a reader of plain lines waits for."""
        if self._live is None and (line := event_line(self._view, event)):
            self.line(line)

    def _tell_restarts(self) -> None:
        for unit in self._restarts - self._told:
            if self._live is None:
                self.line(f"{unit} is started again: {self._causes[unit]}")
        self._told = Counter(self._restarts)

    def line(self, line: str) -> None:
        """Tells something at once, above the live view if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def event_line(view: View, event: Event) -> str | None:
    """One line for an event, or None for the many that are not told one by one."""
    match event.fact:
        case RunStarted() as fact:
            return f"run {fact.run}: {counted(view.steps, 'step')}, sources {', '.join(view.sources)}"
        case BatchYielded() as fact:
            weighed = (
                f"; penalty factors alpha {fact.factors.alpha:.3f}, beta {fact.factors.beta:.3f}"
                if fact.factors
                else ""
            )
            shares = ", ".join(
                f"{name} {counted(share.groups, 'group')}, reward {share.mean_reward:.3f}"
                for name, share in fact.sources.items()
            )
            return f"step {fact.step}: batch yielded ({shares}){weighed}"
        case SequenceQuarantined() as fact:
            return f"step {fact.step}: an object of {fact.sequence} is {fact.reason}: {fact.key}"
        case BatchReplanned() as fact:
            return f"step {fact.step}: batch without {counted(len(fact.without), 'sequence')}: {fact.without[-1]} is left out too"
        case StepTrained() as fact:
            return f"step {fact.step}: trained in {fact.seconds:.1f} s, loss {fact.loss:.4f}, kl {fact.kl:.4f}, {fact.loss_tokens} loss tokens"
        case PolicyPublished() as fact:
            return f"step {fact.step}: policy version {fact.step} published"
        case LimitChanged() as fact:
            return f"{fact.of} {fact.name}: {told(fact.concurrency)} from now on"
        case SampleCompleted() as fact if view.source(fact.source).evaluate:
            source = view.source(fact.source)
            version = max(source.evaluations)
            mean = source.evaluations[version]
            if mean.count == source.evaluate and fact.rewards:
                return f"{source.name}: mean reward {number(mean.value)} on {counted(mean.count, 'task')}, policy version {version}"
    return None


def progress_line(view: View, now: datetime) -> str:
    """Where the run is, in one line."""
    places = [_place(source) for source in view.sources.values()]
    doing = waiting(view) or f"{view.rate(now):.0f} tokens/s"
    return f"step {view.trained_steps}/{view.steps}: {', '.join(places)}; {doing}"


def _place(source: SourceView) -> str:
    """Of one source; what went wrong so far is told when something did."""
    ready = f" {source.ready}/{source.groups} ready" if source.groups else ""
    rejected = Counter({reason: n for reason, n in source.rejected.items() if reason != "evaluation"})
    wrong = [
        *([f"{reasons(rejected)} rejected"] if rejected else []),
        *([counted(source.infra_failures, "failed attempt")] if source.infra_failures else []),
        *([f"{counted(source.failed, 'sequence')} failed"] if source.failed else []),
        *([f"{counted(source.quarantined, 'sequence')} quarantined"] if source.quarantined else []),
        *missed(source),
    ]
    told = f" ({'; '.join(wrong)})" if wrong else ""
    return f"{source.name}{ready} {len(source.in_flight)} in flight{told}"


def waiting(view: View) -> str | None:
    """What the run has not had yet while it starts; None once a sequence has ended."""
    if view.ended:
        return None
    if not view.dispatched:
        return "starting: no sequence is dispatched yet"
    if not view.opened:
        return "starting: no agent-loop host has opened a sequence yet"
    return "waiting for the first sequence to finish: harness hosts and engine may still start"


def render(view: View, restarts: Counter[str], now: datetime) -> RenderableType:
    """The whole view at a moment."""
    if not view.run:
        return Text("starting ...")
    head = Text.assemble(
        ("run ", "dim"), (view.run, "bold"), ("  step ", "dim"), f"{view.trained_steps}/{view.steps}",
        ("  policy ", "dim"), f"v{view.policy_version}", ("  tokens/s ", "dim"), f"{view.rate(now):,.0f}",
        ("  events ", "dim"), f"{view.events:,}",
    )  # fmt: skip
    restarted = ", ".join(f"{name} {count}" for name, count in sorted(restarts.items()) if count) or "none"
    parts = [head, sources_table(view), steps_table(view), Text(f"restarts: {restarted}", style="dim")]
    if wanting := [f"{s.name} {', '.join(missed(s))}" for s in view.sources.values() if missed(s)]:
        parts.append(Text(f"graders and teachers: {'; '.join(wanting)}", style="dim"))
    if quarantined := [f"{s.name} {s.quarantined}" for s in view.sources.values() if s.quarantined]:
        parts.append(Text(f"sequences quarantined: {', '.join(quarantined)}", style="red"))
    if view.limits:
        limits = ", ".join(
            f"{of} {name} {told(fact.concurrency)}" for (of, name), fact in view.limits.items()
        )
        parts.append(Text(f"limits changed: {limits}", style="dim"))
    if doing := waiting(view):
        parts.insert(1, Text(doing, style="yellow"))
    return Group(*parts)


def sources_table(view: View) -> Table:
    """Groups of every source: in flight, filling the next batch, accepted, rejected; and rewards."""
    table = Table(
        "source",
        "in flight",
        "batch",
        "accepted",
        "rejected",
        "reward",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for source in view.sources.values():
        table.add_row(
            source.name,
            str(len(source.in_flight)),
            _fill(source) if not source.evaluate else "evaluation",
            str(source.accepted),
            reasons(Counter({r: n for r, n in source.rejected.items() if r != "evaluation"})),
            number(_latest(source).value),
        )
    return table


def _fill(source: SourceView) -> str:
    full = min(source.ready, source.groups)
    return (
        f"{'#' * full}{'.' * (source.groups - full)} {source.ready}/{source.groups}"
        if source.groups <= 16
        else f"{source.ready}/{source.groups}"
    )


def _latest(source: SourceView) -> Mean:
    if source.evaluate:
        return source.after[1] if source.after else source.before or Mean()
    return source.pending_rewards if source.pending_rewards.count else source.rewards


def steps_table(view: View, most: int = 5) -> Table:
    """The newest steps."""
    table = Table(
        "step", "reward", "loss", "kl", "grad norm", "seconds", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for row in list(view.rows.values())[-most:]:
        done = row.trained
        table.add_row(
            str(row.step),
            number(_reward(row)),
            *(
                (number(done.loss, 4), number(done.kl, 4), number(done.grad_norm, 2), number(done.seconds, 1))
                if done
                else (f"{row.windows} windows packed", "", "", "")
            ),
        )
    return table


def _reward(row: StepRow) -> float | None:
    """Mean over all verified sequences behind the step, of every source; of the batch alone when that is all there is."""
    total = Mean()
    for source in row.sources.values():
        total.count += source.rewards.count
        total.total += source.rewards.total
    return total.value
