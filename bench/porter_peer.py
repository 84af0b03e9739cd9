"""Put and get of a batch's columns, against TransferQueue's SimpleStorage on the same machine.

TransferQueue runs in a virtual environment of its own (`--peer` makes it) with two storage units. It keeps its columns in the memory
of Ray actors and no durable copy; what is written here is in objects, one for each sequence, checksummed, and survives every process.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from log_server import say
from porter_world import figure, seconds
from report import Figure

from pipeline.batch.layouts import pack_bounds, segments
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns, write_sidecar
from schemas.config import Store as StoreConfig
from schemas.payload import PayloadHeader, Span

HERE = Path(__file__).parent
VENV = HERE.parent / ".venv-transferqueue"
PINS = ("TransferQueue==0.1.11", "tensordict==0.15.3", "ray==2.60.0", "torch==2.13.0", "numpy==2.4.6")
COLUMNS, LENGTH, CP = 9, 8192, 16
WINDOW = 64
"""Sequences of a window."""


def install() -> None:
    """Makes the peer's environment. Raises CalledProcessError."""
    import subprocess

    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PINS], check=True)


async def peer(sequences: int, rounds: int) -> dict[str, float] | None:
    """Median seconds of its put, get, column and window; None where it is not installed, or fails, which is told."""
    python = VENV / "bin" / "python"
    if not python.exists():
        say("no rows against TransferQueue: it is not installed; python bench/porter.py --peer does it")
        return None
    window = min(WINDOW, sequences)
    numbers = (sequences, COLUMNS, LENGTH, window, CP, rounds)
    child = await asyncio.create_subprocess_exec(
        str(python),
        str(HERE / "porter_transferqueue.py"),
        *map(str, numbers),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await child.communicate()
    if child.returncode:
        say(f"no rows against TransferQueue: it ended with {child.returncode}: {errors.decode()[-500:]}")
        return None
    found: dict[str, list[float]] = json.loads(out.decode().strip().splitlines()[-1])
    say(
        f"TransferQueue, without a durable copy: { ({k: round(statistics.median(v), 3) for k, v in found.items()}) }"
    )
    return {what: statistics.median(taken) for what, taken in found.items()}


async def queue(
    stores: dict[str, StoreConfig], sequences: int, rounds: int, against: dict[str, float] | None
) -> list[Figure]:
    """MB/s of what is asked for, by store."""
    rng = np.random.default_rng(0)
    values = rng.random((COLUMNS, sequences, LENGTH), np.float32)
    names = [f"column_{c}" for c in range(COLUMNS)]
    window = min(WINDOW, sequences)
    spans = _spans()
    row = COLUMNS * 4 / 1e6
    size = {
        "put": sequences * LENGTH * row,
        "get": sequences * LENGTH * row,
        "column": sequences * LENGTH * 4 / 1e6,
        "window": window * sum(s.end - s.start for s in spans) * row,
    }
    figures: list[Figure] = []
    for name, config in stores.items():
        store = ObjectStore.open(config)
        headers: list[PayloadHeader] = []

        async def put(
            number: int, store: ObjectStore = store, headers: list[PayloadHeader] = headers
        ) -> None:
            keys = [f"runs/queue{number}/payloads/s/{i:06d}.safetensors" for i in range(sequences)]
            headers[:] = await asyncio.gather(
                *[
                    write_sidecar(store, key, {name: values[c, i] for c, name in enumerate(names)})
                    for i, key in enumerate(keys)
                ]
            )

        def get(
            names: Sequence[str],
            count: int,
            spans: Sequence[Span] | None = None,
            store: ObjectStore = store,
            headers: list[PayloadHeader] = headers,
        ) -> Any:
            async def once(_: int) -> None:
                await asyncio.gather(*[read_columns(store, h, names, spans) for h in headers[:count]])

            return once

        works = {
            "put": put,
            "get": get(names, sequences),
            "column": get(["column_0"], sequences),
            "window": get(names, window, spans),
        }
        for what, work in works.items():
            rate = size[what] / await seconds(rounds, work)
            goals = {"put": 1.0, "get": 3.0, "column": 3.0, "window": 3.0}
            if against is None:
                say(f"queue {what} {name}: {rate:,.0f} MB/s")
                continue
            theirs = size[what] / against[what]
            say(f"queue {what} {name}: {rate:,.0f} MB/s, TransferQueue {theirs:,.0f}")
            figures.append(figure(f"queue.{what}.{name}", rate, "MB/s", goals[what] * theirs, theirs))
    return figures


def _spans() -> list[Span]:
    """What rank 0 of CP has of a row, in the layout of Megatron."""
    mine = segments("megatron", pack_bounds("megatron", [LENGTH], CP, 1), CP, 0)
    return [Span(start=each.start, end=min(each.end, LENGTH)) for each in mine if each.start < LENGTH]
