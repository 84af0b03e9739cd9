"""The end of a run: what every step and source gave, what went through broker and store, and where it all lies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from schemas.config import RunConfig
from schemas.names import stream_name
from services.cli.embedded import is_embedded
from services.cli.live import counted, missed, number, reasons
from services.dashboard import View


def size(count: float) -> str:
    """Bytes for people: `1.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show(
    console: Console,
    view: View,
    broker: tuple[int, int],
    restarts: Counter[str],
    config: RunConfig,
    resumed: bool,
) -> None:
    """Prints everything that is told when a run has ended. `broker` is (messages, bytes) of the run's stream; `resumed`
    whether the run had been interrupted."""
    console.print(steps(view))
    for line in (*evaluations(view), *totals(view, broker, restarts, resumed), *paths(config)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def steps(view: View) -> Table:
    """One row per step and source. `reward` is the batch's; `all` is of every verified sequence since the last batch."""
    table = Table(title=f"run {view.run}", title_justify="left")
    for name in (
        "step",
        "source",
        "accepted",
        "rejected",
        "reward",
        "all",
        "tokens",
        "staleness",
        "loss",
        "kl",
        "seconds",
    ):
        table.add_column(name, justify="left" if name in ("source", "rejected") else "right", overflow="fold")
    for row in view.rows.values():
        done = row.trained
        for i, (name, source) in enumerate(row.sources.items()):
            table.add_row(
                str(row.step) if i == 0 else "",
                name,
                str(source.share.groups),
                reasons(source.rejected),
                number(source.share.mean_reward),
                number(source.rewards.value),
                str(source.share.tokens),
                str(source.share.max_staleness),
                *(
                    (number(done.loss, 4), number(done.kl, 4), number(done.seconds, 1))
                    if done and i == 0
                    else ("", "", "")
                ),
                end_section=i == len(row.sources) - 1,
            )
    return table


def evaluations(view: View) -> list[str]:
    """Held-out reward before the first and after the last step, a line per evaluation source."""
    lines: list[str] = []
    for source in view.sources.values():
        if source.evaluate:
            before, after = source.before, source.after
            told = f"before {number(before.value if before else None)} ({counted(before.count if before else 0, 'task')})"
            if after is not None:
                told += f", after {number(after[1].value)} ({counted(after[1].count, 'task')}, policy version {after[0]})"
            lines.append(f"held out, {source.name}: mean reward {told}")
    return lines


def totals(view: View, broker: tuple[int, int], restarts: Counter[str], resumed: bool) -> list[str]:
    """What the run cost. Time and rate are of wall time since `run.started`: the log does not tell when nobody worked."""
    messages, through = broker
    written = ", ".join(f"{kind} {size(count)}" for kind, count in sorted(view.written.items()))
    seconds = view.seconds()
    rate = view.generated / seconds if seconds else 0.0
    finished = sum(source.finished for source in view.sources.values())
    failed = sum(source.failed for source in view.sources.values())
    restarted = ", ".join(f"{name} {count}" for name, count in sorted(restarts.items()) if count)
    lines = [
        f"{counted(view.trained_steps, 'step')} in {seconds:.1f} s{' since the run began, interruptions included' if resumed else ''}; "
        f"{counted(finished, 'sequence')} finished, {failed} failed; "
        f"{view.generated:,} tokens sampled ({rate:,.0f}/s)",
        f"through the broker: {messages:,} events, {size(through)}",
        f"through the store: {size(sum(view.written.values()))} written ({written}), {size(view.fetched)} fetched by packers",
    ]
    if wanting := [f"{s.name} {', '.join(missed(s))}" for s in view.sources.values() if missed(s)]:
        lines.append(f"graders and teachers: {'; '.join(wanting)}")
    if restarted:
        lines.append(f"restarted: {restarted}")
    return lines


def paths(config: RunConfig) -> list[str]:
    """Where log, payloads and process logs are."""
    home = Path(config.directory) / "runs" / config.run
    log = Path(config.directory) / "nats" if is_embedded(config) else config.broker.url
    return [
        f"event log: stream {stream_name(config.run)} in {log}",
        f"payloads:  {config.store.url}/runs/{config.run}/payloads",
        f"services:  {home / 'logs'}",
    ]
