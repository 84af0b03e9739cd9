"""`packtrain runs list`: every run of a broker, what became of it, and when it was last heard of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError
from rich.table import Table

from pipeline.config import ConfigError
from pipeline.log import BrokerUnavailable, connect
from pipeline.log.connection import Denied
from pipeline.log.publish import decode_raw
from schemas.config import Broker, RunConfig
from schemas.envelope import Event, Invalid, Unknown
from schemas.facts import ALL, RunStarted, RunStopped, StepTrained
from schemas.names import BadName, checked_name, stream_name, subject_filter
from services.cli.embedded import is_embedded
from services.cli.launcher import find_launcher
from services.cli.reach import IMPORTING, READER, embedded_broker, home_of, read_record, records
from services.cli.summary import size

_AT_ONCE = 64
_CONNECT_S = 3.0
_STRANGERS = 100
"""Messages that are no events, or others, at most, that an event is looked for behind: it is a list, not a search."""


@dataclass(frozen=True)
class Row:
    """One run. `last` is the type and `time` the ISO 8601 time of its newest fact; None or 0: not known."""

    run: str
    state: str
    steps: int | None = None
    wanted: int | None = None
    events: int = 0
    bytes: int = 0
    last: str | None = None
    time: str | None = None
    broker: str = ""


def state_of(stopped: str | None, running: bool, importing: bool, began: bool) -> str:
    """What became of a run: `stopped` is the reason in its run.stopped."""
    if stopped is not None:
        return stopped
    if running:
        return "running"
    if importing:
        return "import unfinished"
    return "unfinished" if began else "not begun"


def ordered(rows: Sequence[Row]) -> list[Row]:
    """The newest last; what has no facts comes first."""
    return sorted(rows, key=lambda row: (row.time or "", row.run))


def table(rows: Sequence[Row]) -> Table:
    """For people."""
    shown = Table("run", "state", "steps", "events", "bytes", "last fact", "at", box=None, pad_edge=False)
    for row in rows:
        steps = "" if row.wanted is None else f"{row.steps or 0}/{row.wanted}"
        time = (row.time or "").replace("T", " ")[:19]
        events = f"{row.events:,}" if row.events else ""
        shown.add_row(
            row.run, row.state, steps, events, size(row.bytes) if row.bytes else "", row.last or "", time
        )
    return shown


def as_line(row: Row) -> str:
    """One JSON object."""
    return json.dumps(asdict(row))


async def list_runs(directory: Path, given: Broker | None) -> list[Row]:
    """The runs of a broker, or of a directory: those of its embedded broker, and those that it has records of.

    Raises BrokerUnavailable for a given broker; one that a record names and that does not answer is the state of its runs.
    """
    if given is not None:
        return ordered(await _of_broker(given, directory))
    embedded, elsewhere = _recorded(directory)
    rows: list[Row] = []
    if embedded or (directory / "nats").is_dir():
        async with embedded_broker(directory) as broker:
            rows = await _of_broker(broker, directory)
    found = {row.run for row in rows}
    rows += [Row(run, "no log") for run in embedded if run not in found]
    answers = await asyncio.gather(
        *(_of_records(broker, runs, directory) for broker, runs in elsewhere.items())
    )
    return ordered(rows + [row for answer in answers for row in answer])


def _recorded(directory: Path) -> tuple[list[str], dict[Broker, list[str]]]:
    """Recorded runs: those of the embedded broker, and the others by broker."""
    embedded: list[str] = []
    elsewhere: dict[Broker, list[str]] = {}
    for path in records(directory):
        try:
            config: RunConfig = read_record(path)
        except ConfigError:
            embedded.append(path.parent.name)
            continue
        if is_embedded(config):
            embedded.append(config.run)
        else:
            elsewhere.setdefault(config.broker, []).append(config.run)
    return embedded, elsewhere


async def _of_records(broker: Broker, runs: Sequence[str], directory: Path) -> list[Row]:
    try:
        rows = {row.run: row for row in await _of_broker(broker, directory, runs)}
    except BrokerUnavailable:
        return [Row(run, f"broker {broker.url} not reachable", broker=broker.url) for run in runs]
    return [rows.get(run, Row(run, "no log", broker=broker.url)) for run in runs]


async def _of_broker(broker: Broker, directory: Path, only: Sequence[str] | None = None) -> list[Row]:
    client = await connect(broker, "runs", _CONNECT_S, READER)
    try:
        js = client.jetstream(timeout=_CONNECT_S)
        streams = [(run, info) for run, info in (await _streams(js)).items() if only is None or run in only]
        limit = asyncio.Semaphore(_AT_ONCE)
        running = find_launcher(directory)

        async def look(run: str, info: StreamInfo) -> Row:
            async with limit:
                importing = (home_of(directory, run) / IMPORTING).is_file()
                try:
                    return await _row(
                        js, run, info, running is not None and running.run == run, importing, broker
                    )
                except Denied:
                    # Which runs there are its user is told; of those that it was not made for, no more than that.
                    return Row(
                        run,
                        "not allowed",
                        events=info.state.messages,
                        bytes=info.state.bytes,
                        broker=broker.url,
                    )

        return await asyncio.gather(*(look(run, info) for run, info in streams))
    except Denied as error:
        raise BrokerUnavailable(f"broker {broker.url}: {error}") from error
    except (NatsError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise BrokerUnavailable(f"broker {broker.url} does not serve JetStream: {reason}") from error
    finally:
        await client.close()


async def _streams(js: JetStreamContext) -> Mapping[str, StreamInfo]:
    """The streams of runs, by run. JetStream lists 256 at a time."""
    found: dict[str, StreamInfo] = {}
    offset = 0
    while page := await js.streams_info(offset):
        offset += len(page)
        for info in page:
            name = info.config.name or ""
            try:
                run = checked_name(name.removeprefix("RL_"), "run")
                if name == stream_name(run):
                    found[run] = info
            except BadName:
                continue
    return found


async def _row(
    js: JetStreamContext, run: str, info: StreamInfo, running: bool, importing: bool, broker: Broker
) -> Row:
    started, stopped, trained, last = await asyncio.gather(
        _first(js, run, subject_filter(run, RunStarted.type, ALL, run)),
        _first(js, run, subject_filter(run, RunStopped.type, ALL, run)),
        _newest(js, run, subject_filter(run, StepTrained.type)),
        _newest(js, run, subject_filter(run)),
    )
    fact = started.fact if isinstance(started, Event) else None
    end = stopped.fact if isinstance(stopped, Event) else None
    step = trained.fact if isinstance(trained, Event) else None
    wanted = fact.config.get("steps") if isinstance(fact, RunStarted) else None
    reason = end.reason if isinstance(end, RunStopped) else None
    return Row(
        run=run,
        state=state_of(reason, running, importing, fact is not None),
        steps=step.step if isinstance(step, StepTrained) else 0,
        wanted=wanted if isinstance(wanted, int) else None,
        events=info.state.messages,
        bytes=info.state.bytes,
        last=last.fact.type
        if isinstance(last, Event)
        else (last.type if isinstance(last, Unknown) else None),
        time=last.time.isoformat() if isinstance(last, Event) else None,
        broker=broker.url,
    )


async def _first(js: JetStreamContext, run: str, subject: str) -> Event | Unknown | None:
    """The fact on a subject: the first event there, whatever else somebody wrote on it."""
    after = 0
    for _ in range(_STRANGERS):
        try:
            raw = await js.get_msg(stream_name(run), seq=after + 1, subject=subject, next=True)
        except NotFoundError:
            return None
        found = decode_raw(raw)
        if not isinstance(found, Invalid):
            return found
        after = found.seq
    return None


async def _newest(js: JetStreamContext, run: str, subjects: str) -> Event | Unknown | None:
    """The newest event on subjects, below what is none."""
    beginning = f"{subjects.rstrip('*>.')}."
    try:
        raw = await js.get_last_msg(stream_name(run), subjects)
        for _ in range(_STRANGERS):
            if (raw.subject or "").startswith(beginning):
                found = decode_raw(raw)
                if not isinstance(found, Invalid):
                    return found
            if not raw.seq or raw.seq == 1:
                break
            raw = await js.get_msg(stream_name(run), seq=raw.seq - 1)
    except NotFoundError:
        pass
    return None
