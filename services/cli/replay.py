"""`packtrain replay`: a run's decisions made again, offline, and compared with the recorded ones; or made otherwise."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from pipeline.config import load
from pipeline.replay import (
    SERVICES,
    BadChange,
    Difference,
    Report,
    Rerun,
    Service,
    WhatIf,
    change,
    read_setting,
)
from pipeline.replay.rerun import first_difference
from pipeline.replay.whatif import LIMITS
from schemas.config import Decisions
from schemas.facts import RULES, RunStarted
from services.cli.embedded import BadInput
from services.cli.events import note_skipped
from services.cli.options import FAILED
from services.cli.recording import Recording, open_recording, read_until
from services.cli.replay_report import difference_lines, rerun_lines
from services.cli.where import Where

_ALL = ("mixer", "sampler")
"""The sampler's decisions hold the yield's."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    where: Where
    file: Path | None = None
    until: str | None = None
    service: str | None = None
    settings: Sequence[str] = ()
    config: Path | None = None


def show(request: Request, as_json: bool, write: Callable[[str], None], note: Callable[[str], None]) -> int:
    """Writes the report; returns the exit status: 1 when a decision diverged. A difference that a change makes is none.

    Raises BadInput, ConfigError, LaunchError, BrokerUnavailable.
    """
    if request.service is not None and request.service not in SERVICES:
        raise BadInput(f"no service {request.service!r} to replay; services: {', '.join(SERVICES)}")
    return asyncio.run(_show(request, as_json, write, note))


async def _show(
    request: Request, as_json: bool, write: Callable[[str], None], note: Callable[[str], None]
) -> int:
    until = read_until(request.until)
    names = (request.service,) if request.service is not None else _ALL
    services = [SERVICES[name] for name in names]
    async with open_recording(request.where, request.file, until) as recording:
        started = await recording.started()
        if request.settings or request.config is not None:
            status, whole, lines = await _difference(recording, services, request, started)
        else:
            status, whole, lines = await _rerun(recording, services, started)
        if as_json:
            told = {"run": recording.run, "skipped": dict(recording.skipped), **whole}
            write(orjson.dumps(told).decode())
        else:
            for line in lines:
                write(line)
        note_skipped(recording.skipped, note)
        return status


_SHOWN = 80
"""Characters of a changed value, at most."""
_Told = tuple[int, dict[str, Any], Iterable[str]]
"""Exit status, the report as JSON values (orjson takes dataclasses), and as text."""


async def _rerun(recording: Recording, services: Sequence[Service], started: RunStarted) -> _Told:
    reports = await _reports(recording, services)
    events, last = max(report.events for report in reports), max(report.last for report in reports)
    head = f"run {recording.run}, {events:,} events up to message {last}, rules {started.rules}"
    whole = {"rules": started.rules, "code_rules": RULES, "reports": [_report(r) for r in reports]}
    status = FAILED if any(report.divergences for report in reports) else 0
    return status, whole, (head, *rerun_lines(reports))


async def _difference(
    recording: Recording, services: Sequence[Service], request: Request, started: RunStarted
) -> _Told:
    try:
        recorded = Decisions.model_validate(started.config).model_dump(mode="json")
    except ValidationError as error:
        raise BadInput(
            f"run.started of run {recording.run} holds no configuration that this version reads: "
            f"{json.dumps(str(error))[:300]}"
        ) from error
    changed = _changed(request, started.config)
    changes = list(_changes(recorded, changed.model_dump(mode="json")))
    found = await _differences(recording, services, changed)
    whole = {
        "changes": changes,
        "limits": " ".join(LIMITS),
        "differences": [
            {**_plain(d), "unfilled": d.unfilled, "baseline": _report(d.baseline)} for d in found
        ],
    }
    return 0, whole, difference_lines(found, changes)


async def _reports(recording: Recording, services: Sequence[Service]) -> list[Report]:
    reruns = [Rerun(recording.run, service) for service in services]
    async for event in recording.events():
        for rerun in reruns:
            rerun.feed(event)
    return [rerun.report() for rerun in reruns]


async def _differences(
    recording: Recording, services: Sequence[Service], changed: Decisions
) -> list[Difference]:
    whatifs = [WhatIf(recording.run, service, changed) for service in services]
    async for event in recording.events():
        for whatif in whatifs:
            whatif.index(event)
    async for event in recording.events():
        for whatif in whatifs:
            whatif.feed(event)
    return [whatif.report() for whatif in whatifs]


def _changed(request: Request, recorded: dict[str, Any]) -> Decisions:
    if request.config is not None:
        recorded = load(request.config).decisions()
    try:
        return change(recorded, [read_setting(text) for text in request.settings])
    except BadChange as error:
        raise BadInput("\n".join(f"--set {line}" for line in str(error).splitlines())) from error


def _changes(before: Any, after: Any, path: str = "") -> Iterable[str]:
    """Every value that differs, as `path: before -> after`, sources by name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            inner = f"{path}.{key}" if path else key
            yield from _changes(before.get(key), after.get(key), inner)
    elif path == "sources":
        named = [{source["name"]: source for source in side} for side in (before, after)]
        yield from _changes(named[0], named[1], path)
    elif first_difference(before, after) is not None:
        # Keys of an environment's options are anybody's.
        yield f"{json.dumps(path)[1:-1]}: {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    text = "(none)" if value is None else orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _report(report: Report) -> dict[str, Any]:
    return {**_plain(report), "other_rules": report.other_rules}


def _plain(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
