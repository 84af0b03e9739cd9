"""Throughput of the data path, against what stands below it: raw obstore and memcpy.

    python bench/porter.py [--quick] [--json]

Files are on tmpfs (/dev/shm), so that the figures are of this code, not of a disk. `value` is the median of several
rounds; `against` is the same work without packtrain; `goal` is what a change must not fall below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import LocalStore

from pipeline.batch.windows import pack, plan_window
from pipeline.feed.memfd import SealedWindow, plan_layout, seal
from pipeline.store import ObjectStore
from pipeline.store.payload import encode_payload, read_columns, write_payload
from schemas.config import Store as StoreConfig
from schemas.payload import BLOCK_TOKENS, ContextMeta, PayloadHeader, Span
from schemas.plan import Plan, PlanRows, PlanSequence

Figure = dict[str, Any]
MB = 1e6


def columns_of(rows: int, wide: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A payload's columns; `wide` bytes of routing a token beside them."""
    mask = (np.arange(rows) % 4 != 0).astype(np.uint8)
    mask[0] = 0
    columns: dict[str, np.ndarray[Any, Any]] = {
        "tokens": np.arange(rows, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.full(rows, -0.5, np.float32),
        "policy_version": np.ones(rows, np.int32),
        "segments": np.zeros((1, 5), np.int32),
    }
    if wide:
        columns["routed_experts.L0-3"] = np.random.default_rng(0).integers(0, 128, (rows, wide), np.uint8)
    return columns


async def seconds(rounds: int, work: Callable[[int], Awaitable[object]]) -> float:
    """Median seconds of a round, after one that is not counted."""
    taken: list[float] = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        await work(number)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


async def small_payloads(directory: Path, count: int, rounds: int) -> list[Figure]:
    """Payloads of 1,024 tokens, 16 writers at once: what a rollout of short sequences does."""
    columns = columns_of(1024)
    store = ObjectStore.open(StoreConfig.model_validate({"url": f"file://{directory}/small"}))
    raw = LocalStore(directory / "small-raw", mkdir=True)
    body, _ = encode_payload("x", columns)
    gate = asyncio.Semaphore(16)

    async def one(make: Callable[[], Awaitable[object]]) -> object:
        async with gate:
            return await make()

    headers: list[PayloadHeader] = []

    async def write(number: int) -> None:
        made = await asyncio.gather(
            *[one(lambda i=i: write_payload(store, f"w{number}/{i}", columns)) for i in range(count)]
        )
        headers[:] = [header for header in made if isinstance(header, PayloadHeader)]

    async def write_raw(number: int) -> None:
        await asyncio.gather(
            *[
                one(lambda i=i: obstore.put_async(raw, f"w{number}/{i}", body, mode="create"))
                for i in range(count)
            ]
        )

    names = ["tokens", "loss_mask", "logprobs", "policy_version"]

    async def read(_: int) -> None:
        await asyncio.gather(*[one(lambda h=h: read_columns(store, h, names)) for h in headers])

    async def get(number: int, i: int) -> None:
        await (await obstore.get_async(raw, f"w{number}/{i}")).bytes_async()

    async def read_raw(_: int) -> None:
        await asyncio.gather(*[one(lambda i=i: get(rounds, i)) for i in range(count)])

    figures: list[Figure] = []
    for name, ours, below in (("write", write, write_raw), ("read", read, read_raw)):
        # A payload of 1,024 tokens is as much Python as it is bytes.
        value, against = count / await seconds(rounds, ours), count / await seconds(rounds, below)
        figures.append(figure(f"payload.small.{name}", value, "objects/s", 0.05 * against, against))
    return figures


async def long_payload(directory: Path, blocks: int, rounds: int) -> list[Figure]:
    """One payload with 64 bytes of routing a token: write, read whole, and read one block of one column."""
    columns = columns_of(blocks * BLOCK_TOKENS, wide=64)
    size = sum(column.nbytes for column in columns.values())
    store = ObjectStore.open(StoreConfig.model_validate({"url": f"file://{directory}/long"}))
    raw = LocalStore(directory / "long-raw", mkdir=True)
    body, _ = encode_payload("x", columns)
    headers: dict[int, PayloadHeader] = {}

    async def write(number: int) -> None:
        headers[number] = await write_payload(store, f"w{number}", columns)

    async def write_raw(number: int) -> None:
        await obstore.put_async(raw, f"w{number}", body, mode="create")

    async def read(_: int) -> None:
        await read_columns(store, headers[0], [column.name for column in headers[0].columns])

    async def read_raw(_: int) -> None:
        await (await obstore.get_async(raw, "w0")).bytes_async()

    start = (blocks // 2) * BLOCK_TOKENS

    async def ranged(_: int) -> None:
        await read_columns(store, headers[0], ["tokens"], [Span(start=start, end=start + BLOCK_TOKENS)])

    async def ranged_raw(_: int) -> None:
        await obstore.get_range_async(raw, "w0", start=start, length=4 * BLOCK_TOKENS)

    source, target = np.frombuffer(body, np.uint8), np.empty(len(body), np.uint8)

    async def memcpy(_: int) -> None:
        np.copyto(target, source)

    copied = size / MB / await seconds(rounds, memcpy)
    figures: list[Figure] = []
    for name, ours, below in (("write", write, write_raw), ("read", read, read_raw)):
        value, against = size / MB / await seconds(rounds, ours), size / MB / await seconds(rounds, below)
        figures.append(figure(f"payload.long.{name}", value, "MB/s", 0.1 * against, against))
    value, against = await seconds(rounds * 10, ranged), await seconds(rounds * 10, ranged_raw)
    figures.append(
        figure("payload.range.read", value * 1e6, "us", 10 * against * 1e6, against * 1e6, better="lower")
    )
    figures.append(figure("memcpy", copied, "MB/s", 0.0, copied))
    return figures


async def window(contexts: int, tokens: int, rounds: int) -> list[Figure]:
    """Packing, sealing and mapping one window, against a copy of as many bytes."""
    columns = columns_of(tokens)
    _, header = encode_payload("p", columns)
    spans: list[Span] = []
    for start in range(1, tokens, 4):
        spans.append(Span(start=start, end=min(start + 3, tokens)))
    context = ContextMeta(
        offset=0,
        tokens=tokens,
        generated=int(columns["loss_mask"].sum()),
        loss_spans=tuple(spans),
        min_version=1,
        max_version=1,
    )
    sequences = tuple(
        PlanSequence(source="s", sample="s-0", sequence=f"s-0-{i}", payload=header, contexts=(context,))
        for i in range(contexts)
    )
    rows = PlanRows(
        sequence=tuple(range(contexts)),
        context=(0,) * contexts,
        dp=(0,) * contexts,
        microbatch=(0,) * contexts,
        advantage=(1.0,) * contexts,
        loss_weight=(1.0,) * contexts,
    )
    budget = contexts * tokens
    plan = Plan(
        run="r",
        step=1,
        policy_version=0,
        dp=1,
        microbatches=1,
        token_budget=budget,
        loss_tokens=1,
        sequences=sequences,
        rows=rows,
    )
    planned = plan_window(plan, 0, 0)
    got = [
        {
            name: np.concatenate([columns[name][s.start : s.end] for s in spans])
            for name, spans in read.spans.items()
        }
        for read in planned.reads
    ]
    packed = pack(planned, got)
    layout = plan_layout({}, {name: (array.dtype.name, array.shape) for name, array in packed.items()})
    target = bytearray(layout.size)
    source = bytes(layout.size)

    async def packing(_: int) -> None:
        pack(planned, got)

    async def sealing(_: int) -> None:
        os.close(seal(layout, packed))

    fd = seal(layout, packed)

    async def mapping(_: int) -> None:
        SealedWindow(os.dup(fd)).close()

    async def mapping_raw(_: int) -> None:
        mmap.mmap(fd, layout.size, mmap.MAP_SHARED, mmap.PROT_READ).close()

    async def copying(_: int) -> None:
        target[:] = source

    against = layout.size / MB / await seconds(rounds, copying)
    figures = [
        figure(
            f"window.{name}", layout.size / MB / await seconds(rounds, work), "MB/s", goal * against, against
        )
        for name, work, goal in (("pack", packing, 0.005), ("seal", sealing, 0.05))
    ]
    value, against = await seconds(rounds * 10, mapping), await seconds(rounds * 10, mapping_raw)
    figures.append(figure("window.map", value * 1e6, "us", 20 * against * 1e6, against * 1e6, better="lower"))
    os.close(fd)
    return figures


def figure(name: str, value: float, unit: str, goal: float, against: float, better: str = "higher") -> Figure:
    return {
        "name": f"porter.{name}",
        "value": round(value, 2),
        "unit": unit,
        "goal": round(goal, 2),
        "better": better,
        "against": round(against, 2),
    }


async def measure(quick: bool) -> list[Figure]:
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory(prefix="porter", dir="/dev/shm") as directory:
        return [
            *await small_payloads(Path(directory), 200 if quick else 1000, rounds),
            *await long_payload(Path(directory), 4 if quick else 16, rounds),
            *await window(64, 1024 if quick else 16_384, rounds),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the data path.")
    parser.add_argument(
        "--quick", action="store_true", help="smaller and fewer rounds: seconds, not a minute"
    )
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.quick))
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"{'figure':<28} {'value':>12} {'unit':<10} {'goal':>12} {'against':>12}")
    for row in figures:
        print(
            f"{row['name']:<28} {row['value']:>12.2f} {row['unit']:<10} {row['goal']:>12.2f} {row['against']:>12.2f}"
        )


if __name__ == "__main__":
    main()
