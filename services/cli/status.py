"""`packtrain status`: the hosts of a run as they say of themselves, which of them are silent, and which resource binds.

Promises:
- every host that the configuration has is told: one that never reported, or not for `SILENT_S`, is silent, and how long;
- of a service or pool whose hosts are named by their machines, as in a deployment, those are told that have reported: how many
  there should be, the deployment knows;
- what binds is said of the hosts that are not silent, by `pipeline.hosts.waits.binding`; the limits that hold beside it, for a
  pool or a source that is held back by its own waits for no resource;
- it reads, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from nats.errors import Error as NatsError
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from pipeline.hosts.report import EVERY_S, SILENT_S, HostReport, reports
from pipeline.hosts.waits import RESOURCES, Binding, Window, binding
from pipeline.log import Log
from schemas.config import RunConfig
from services.cli import limit
from services.cli.embedded import LaunchError
from services.cli.reach import LogView, find_run, open_log
from services.cli.runs import host_places
from services.cli.summary import size
from services.cli.where import Where

_TOLD = 0.01
"""A share of waits that is worth a word."""


@dataclass(frozen=True)
class Row:
    """A host that should be there, or is; `silent_s`: since when it has not been heard of, None for never, 0 for a host that is
    there (or has said that it stopped)."""

    host: str
    service: str
    pool: str
    report: HostReport | None
    silent_s: float | None

    @property
    def silent(self) -> bool:
        return self.silent_s != 0


@dataclass(frozen=True)
class Status:
    run: str
    rows: tuple[Row, ...]
    unreadable: int
    binding: Binding
    limits: tuple[limit.Row, ...] = ()
    """Those that there are."""


def expected(config: RunConfig, found: Sequence[HostReport] = ()) -> dict[str, tuple[str, str]]:
    """Name to (service, pool) of every host that should be there, or has reported."""
    # How many there should be stands in no log.
    places = [] if isinstance(config, LogView) else host_places(config)
    numbered = {place.name: (place.service, place.pool) for place in places}
    reported = {report.host: (report.service, report.pool) for report in found}
    by_machine = {kind for host, kind in reported.items() if host not in numbered}
    return {host: kind for host, kind in numbered.items() if kind not in by_machine} | reported


def status_of(
    config: RunConfig,
    found: Sequence[HostReport],
    unreadable: int,
    now: datetime,
    limits: Sequence[limit.Row] = (),
) -> Status:
    """What the reports, and the limits that hold, come to at that time. Pure."""
    known = {report.host: report for report in found}
    rows: list[Row] = []
    windows: dict[str, Window] = {}
    for name, (service, pool) in expected(config, found).items():
        report = known.get(name)
        row = Row(name, service, pool, report, None if report is None else 0.0)
        if report is not None and report.state != "stopped":
            if report.age_s(now) > SILENT_S:
                row = replace(row, silent_s=report.age_s(now))
            else:
                where = f"pool {pool}" if pool else service
                before = windows.get(where)
                windows[where] = report.window() if before is None else before + report.window()
        rows.append(row)
    there = tuple(row for row in limits if row.concurrency)
    return Status(config.run, tuple(rows), unreadable, binding(windows), there)


def lines(status: Status) -> list[dict[str, Any]]:
    """JSON objects: one a host, and the last one what binds."""
    out: list[dict[str, Any]] = []
    for row in status.rows:
        said = row.report.model_dump(mode="json") if row.report is not None else {}
        shares = row.report.window().shares() if row.report is not None else {}
        out.append(
            {**said, "host": row.host, "service": row.service, "pool": row.pool, "shares": shares}
            | {"silent": row.silent, "silent_s": row.silent_s}
        )
    found = status.binding
    last = {"run": status.run, "binding": found.resource, "where": found.where, "share": found.share}
    limits = [{"of": row.of, "name": row.name, "concurrency": row.concurrency} for row in status.limits]
    return [*out, {**last, "why": found.why(), "unreadable": status.unreadable, "limits": limits}]


def view(status: Status) -> Group:
    """For people."""
    table = Table(
        "host", "state", "tenants", "pending", "oldest", "lag p50/p99", "blocked", "cpu", "memory", "waits",
        box=None, pad_edge=False,
    )  # fmt: skip
    for row in status.rows:
        said = row.report
        if said is None:
            table.add_row(row.host, "[red]never reported[/red]")
            continue
        state = f"[red]silent for {row.silent_s:.0f} s[/red]" if row.silent_s else said.state
        table.add_row(
            row.host,
            state,
            f"{said.tenants}/{said.capacity}",
            str(said.pending),
            f"{said.oldest_s:.0f} s" if said.tenants else "",
            f"{1000 * said.lag_p50_s:.0f}/{1000 * said.lag_p99_s:.0f} ms",
            str(sum(said.blocks.values()) or ""),
            f"{100 * said.cpu:.0f} %",
            size(said.rss_bytes),
            waits(said.window().shares()),
        )
    silent = [row.host for row in status.rows if row.silent]
    told = [f"limit: {row.line()}" for row in status.limits]
    told.append(f"binding: {status.binding.why()}")
    if silent:
        told.insert(0, f"silent: {', '.join(silent)}")
    if status.unreadable:
        told.insert(0, f"{status.unreadable} reports cannot be read: another version of packtrain wrote them")
    return Group(table, *told)


def waits(shares: Mapping[str, float]) -> str:
    """The resources that are waited for, most first."""
    found = sorted(((shares.get(r, 0.0), r) for r in RESOURCES), reverse=True)
    return ", ".join(f"{r} {100 * share:.0f} %" for share, r in found if share >= _TOLD)


def show(
    where: Where,
    as_json: bool,
    watch: bool,
    console: Console,
    write: Callable[[str], None],
) -> None:
    """Prints the status of a run, once or until Ctrl-C. Raises ConfigError, LaunchError, BrokerUnavailable."""
    found = find_run(where)
    try:
        asyncio.run(_show(found, as_json, watch, console, write))
    except KeyboardInterrupt:
        return


async def _show(
    config: RunConfig, as_json: bool, watch: bool, console: Console, write: Callable[[str], None]
) -> None:
    async with open_log(config) as log:
        if not watch:
            _print(await look(config, log), as_json, console, write)
            return
        if as_json:
            while True:
                _print(await look(config, log), as_json, console, write)
                await asyncio.sleep(EVERY_S)
        with Live(view(await look(config, log)), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(EVERY_S)
                live.update(view(await look(config, log)), refresh=True)


async def look(config: RunConfig, log: Log) -> Status:
    """The run's status now. Raises LaunchError when the broker goes away meanwhile."""
    try:
        found, unreadable = await reports(log)
        limits = await limit.rows(config, log)
    except (NatsError, OSError, TimeoutError) as error:
        said = str(error) or type(error).__name__
        raise LaunchError(
            f"broker {config.broker.url} does not answer: {said}; is nats-server running there?"
        ) from error
    return status_of(config, found, unreadable, datetime.now(UTC), limits)


def _print(status: Status, as_json: bool, console: Console, write: Callable[[str], None]) -> None:
    if as_json:
        for line in lines(status):
            write(orjson.dumps(line).decode())
    else:
        console.print(view(status))
