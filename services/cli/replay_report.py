"""The reports of `packtrain replay` as text. Pure: what is said is what the report holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.replay import Difference, Divergence, Place, Report
from pipeline.replay.tally import BatchFigures
from pipeline.replay.whatif import LIMITS, BatchChange, GroupChange
from schemas.facts import RULES

_SHOWN = 10
_VALUE_CHARS = 160


def rerun_lines(reports: Sequence[Report]) -> Iterator[str]:
    """What each core decided again, the first divergence in full, and the state at the end."""
    for report in reports:
        count = sum(report.compared.values())
        kinds = ", ".join(f"{type_} {n:,}" for type_, n in report.compared.items())
        found = len(report.divergences) + report.more
        verdict = "as recorded" if not found else _counted(found, "divergence")
        yield f"{report.service}: {_counted(count, 'decision')} made again ({kinds or 'none recorded'}): {verdict}"
        for pending in report.pending[:_SHOWN]:
            yield f"  on its way when the log ended: {pending.subject}, decided on {_place(pending.cause)}"
        yield from _rest(len(report.pending), _SHOWN, "on their way")
        yield f"  state: {_state(report)}"
    diverged = [(r, d) for r in reports for d in r.divergences]
    if not diverged:
        yield "no divergence"
        return
    report, first = min(diverged, key=lambda found: found[1].seq)
    yield ""
    yield from _first(report, first)
    others = [(r, d) for r, d in sorted(diverged, key=lambda found: found[1].seq) if d is not first]
    for of, each in others[:_SHOWN]:
        field = f", {each.field}" if each.field else ""
        yield f"  then {of.service}: message {each.seq}, {each.subject}: {each.kind}{field}"
    yield from _rest(len(others) + sum(r.more for r in reports), _SHOWN, "more")
    if any(r.other_rules for r in reports):
        yield f"  likely cause: the run was made by decision rules {report.rules}, this version's are {RULES}"


def _first(report: Report, found: Divergence) -> Iterator[str]:
    where = f"message {found.seq}, {found.subject}"
    cause = f" on {_place(found.cause)}" if found.cause is not None else ""
    match found.kind:
        case "differs":
            yield f"first divergence: {report.service}: {where}: {found.field} differs"
            yield f"  recorded    {_value(found.recorded)}"
            yield f"  recomputed  {_value(found.recomputed)}"
            yield f"  decided{cause}"
        case "never decided":
            yield f"first divergence: {report.service}: {where}: recorded, and never decided"
            yield f"  recorded    {_value(found.recorded)}"
            yield (
                f"  recorded as decided{cause}"
                if cause
                else "  the event that it names as its cause is not before it in the log"
            )
        case "stands twice":
            yield f"first divergence: {report.service}: {where}: a second fact on a subject that is taken"
            yield f"  recorded    {_value(found.recorded)}"
        case "never recorded":
            yield f"first divergence: {report.service}: {found.subject}: decided{cause}, and never recorded, though the run went on"
            yield f"  recomputed  {_value(found.recomputed)}"
        case "fails":
            yield f"first divergence: {report.service}: {where}: the core fails: {_value(found.recomputed)}"


def _state(report: Report) -> str:
    state = report.state
    if report.service == "mixer":
        counts = [f"{name} {n:,}" for name, n in sorted(state["dispatched"].items())]
        ended = ", stopped" if state["stopped"] else ""
        return f"groups dispatched: {', '.join(counts) or 'none'}; batches yielded {state['yielded']}, policy {state['published']}{ended}"
    waiting = [f"{source} {len(samples)}" for source, samples in sorted(state["waiting"].items())]
    return (
        f"batches yielded {state['yielded']}, trained {state['trained']}; groups in flight {len(state['groups'])}, "
        f"waiting for a batch: {', '.join(waiting) or 'none'}"
    )


def difference_lines(differences: Sequence[Difference], changes: Sequence[str]) -> Iterator[str]:
    """What each core would have decided otherwise."""
    yield f"changed: {', '.join(changes) if changes else 'nothing'}"
    for found in differences:
        baseline = found.baseline
        if baseline.divergences:
            yield (
                f"{found.service}: the recording differs from this version's decisions before any change, first at message "
                f"{baseline.divergences[0].seq}: see `packtrain replay` without changes; the figures hold both"
            )
        if found.failed:
            yield f"{found.service}: the core fails with the change, and the figures end there: {_value(found.failed)}"
        if found.left_out:
            yield f"{found.service}: {_counted(found.left_out, 'event')} of sources that the change removes are left out"
        for line in found.unmade:
            yield f"{found.service}: {line}"
        if found.none:
            yield f"{found.service}: no difference: every decision is as recorded"
            continue
        other, added, removed = found.facts
        yield f"{found.service}: {_counted(other, 'decision')} other than recorded, {added:,} added, {removed:,} gone"
        yield from _dispatched(found) if found.service == "mixer" else _sampled(found)
    yield from LIMITS


def _dispatched(found: Difference) -> Iterator[str]:
    for source, (then, now) in found.dispatched.items():
        yield f"  sequences dispatched, {source}: {then:,} -> {now:,}"
    for what, ids in (("added", found.dispatched_added), ("gone", found.dispatched_removed)):
        if ids:
            yield f"  {what}: {_few(ids)}"
    then, now = found.stopped
    if then != now:
        yield f"  the run is over at message {then or '(not in the log)'} -> {now or '(not in the log)'}"


def _sampled(found: Difference) -> Iterator[str]:
    for source, outcomes in found.outcomes.items():
        for outcome, (then, now) in outcomes.items():
            yield f"  groups {outcome}, {source}: {then:,} -> {now:,}"
    yield from _groups(found.groups)
    if found.advantages_changed:
        yield (
            f"  advantages of {_counted(found.advantages_changed, 'group')} change, by at most {found.largest_advantage_change:.6g}"
        )
    for batch in found.batches:
        yield from _batch(batch, found.steps)


def _groups(groups: Sequence[GroupChange]) -> Iterator[str]:
    for group in groups[:_SHOWN]:
        yield f"  {group.sample}: {group.recorded or '(undecided)'} -> {group.changed or '(undecided)'}"
    yield from _rest(len(groups), _SHOWN, "more groups with another outcome")


def _batch(batch: BatchChange, steps: int) -> Iterator[str]:
    then, now = batch.recorded, batch.changed
    if now is None and batch.step > steps:
        yield f"  batch {batch.step}: not in the changed run, which has {_counted(steps, 'step')}"
    elif now is None:
        yield f"  batch {batch.step}: could not have been filled from the recorded rollouts"
    elif then is None:
        yield f"  batch {batch.step}: not in the recording: {_figures(now)}"
    elif then == now:
        yield f"  batch {batch.step}: the same samples"
    else:
        yield f"  batch {batch.step}: {_counted(len(batch.added), 'sample')} added, {len(batch.removed)} removed"
        yield f"    recorded: {_figures(then)}"
        yield f"    changed:  {_figures(now)}"
        for what, ids in (("added", batch.added), ("removed", batch.removed)):
            if ids:
                yield f"    {what}: {_few(ids)}"


def _figures(batch: BatchFigures) -> str:
    behind = f"{sum(batch.staleness) / len(batch.staleness):.2f}" if batch.staleness else "none"
    return (
        f"decided on message {batch.through}, {_counted(len(batch.samples), 'group')}, {batch.sequences} sequences, {batch.tokens:,} tokens "
        f"({batch.loss_tokens:,} with loss), mean reward {batch.mean_reward:.4f}, staleness mean {behind} max {max(batch.staleness, default=0)}"
    )


def _place(at: Place) -> str:
    return f"message {at.seq}, {at.type} {at.id}"


def _value(value: Any) -> str:
    text = json.dumps(value)
    return (
        text
        if len(text) <= _VALUE_CHARS
        else f"{text[:_VALUE_CHARS]}... ({len(text):,} characters; all with --json)"
    )


def _few(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more


def _rest(count: int, shown: int, what: str) -> Iterator[str]:
    if count > shown:
        yield f"  ... {count - shown:,} {what}; all with --json"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
