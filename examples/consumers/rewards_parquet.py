"""Writes the rewards of a run as Parquet, one row a finished sequence.

    python examples/consumers/rewards_parquet.py .packtrain/runs/demo/config.toml rewards/
    python -c 'import pyarrow.parquet as pq; print(pq.read_table("rewards/"))'

Begins with the first event, whenever it is started, and ends when the run has stopped; --follow goes on. The directory
holds parts named by the stream sequences of their first and last rows. A part appears whole, and a later start goes on
after the newest: killed at any moment, every row is there once. Give each run a directory of its own.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.log import Log, end_tasks
from schemas.envelope import Event
from schemas.facts import SequenceFinished
from services.cli.reach import broker_of, read_record

ROWS = 10_000
NAMES = ("source", "sample", "sequence", "termination")
SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        *((name, pa.string()) for name in NAMES),
        ("reward", pa.float64()),
        ("tokens", pa.int64()),
        ("policy_version", pa.int64()),  # the oldest among the sampled tokens
    ]
)


def row(event: Event, fact: SequenceFinished) -> dict[str, Any]:
    return {
        **{name: getattr(fact, name) for name in NAMES},
        "seq": event.seq,
        "time": event.time,
        "reward": fact.reward,
        "tokens": sum(context.tokens for context in fact.contexts),
        "policy_version": min((c.min_version for c in fact.contexts if c.generated), default=0),
    }


def write(directory: Path, rows: list[dict[str, Any]]) -> None:
    whole = directory / f"{rows[0]['seq']:012d}-{rows[-1]['seq']:012d}.parquet"
    unfinished = directory / "_unfinished"  # names that begin with _ are no data to Parquet's readers
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), unfinished)
    unfinished.replace(whole)
    print(f"{whole}: {len(rows)} rows", flush=True)


async def ended(log: Log, position: int) -> bool:
    newest = await log.latest("sequence.finished")
    stopped = await log.last("run.stopped", "all", log.run)
    return stopped is not None and (newest is None or newest.seq < position)


async def consume(log: Log, directory: Path, position: int, follow: bool, every_s: float) -> None:
    rows: list[dict[str, Any]] = []
    events = log.subscribe("sequence.finished", start=position)
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            came, _ = await asyncio.wait([coming], timeout=every_s)
            if came and isinstance(fact := (event := coming.result()).fact, SequenceFinished):
                rows.append(row(event, fact))
                position, coming = event.seq + 1, asyncio.ensure_future(anext(events))
            if rows and (not came or len(rows) == ROWS):
                write(directory, rows)
                rows = []
            if not came and not follow and await ended(log, position):
                return
    finally:
        await end_tasks([coming])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path, help="a run's config.toml")
    parser.add_argument("directory", type=Path, help="where the parts go")
    parser.add_argument("--follow", action="store_true", help="go on when the run has stopped")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="a part after S quiet seconds")
    given = parser.parse_args()
    if not given.config.is_file():
        parser.error(f"no file {given.config}")
    config = read_record(given.config)
    given.directory.mkdir(parents=True, exist_ok=True)
    newest = max((int(part.stem.split("-")[1]) for part in given.directory.glob("*.parquet")), default=0)
    async with broker_of(config) as broker:
        log = await Log.connect(broker, config.run, "rewards-parquet", user="reader")
        await consume(log, given.directory, newest + 1, given.follow, given.every)
        await log.close()


if __name__ == "__main__":
    asyncio.run(main())
