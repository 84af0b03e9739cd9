"""Small steps on the way: payloads of short rows, a block out of the middle of a payload, and mapping a window, against what stands below them."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

import numpy as np
import obstore
from obstore.store import LocalStore
from porter_world import columns_of, figure, in_turn
from report import Figure

from pipeline.feed.memfd import SealedWindow, plan_layout, seal
from pipeline.store import ObjectStore
from pipeline.store.payload import encode_payload, read_columns, write_payload
from schemas.config import Store as StoreConfig
from schemas.payload import BLOCK_TOKENS, PayloadHeader, Span

MANY = 200
"""Payloads of 8,192 tokens, all at once."""


async def steps(directory: Path, config: StoreConfig, rounds: int) -> list[Figure]:
    """`config`: of the store of files at `directory`."""
    header = await write_payload(ObjectStore.open(config), "steps", columns_of(2 * BLOCK_TOKENS, False))
    store, raw = ObjectStore.open(config), LocalStore(directory)
    block = [Span(start=BLOCK_TOKENS, end=2 * BLOCK_TOKENS)]
    first = header.column("tokens").offset + 4 * BLOCK_TOKENS

    async def ranged(_: int) -> None:
        await read_columns(store, header, ["tokens"], block)

    async def bare(_: int) -> None:
        await obstore.get_range_async(raw, "steps", start=first, length=4 * BLOCK_TOKENS)

    columns = columns_of(8192, False)
    body, _ = encode_payload("x", columns)
    headers: list[PayloadHeader] = []
    names = [name for name in columns if name != "segments"]

    async def write(number: int) -> None:
        keys = [f"steps{number}/{i}" for i in range(MANY)]
        headers[:] = await asyncio.gather(*[write_payload(store, key, columns) for key in keys])

    async def put(number: int) -> None:
        await asyncio.gather(
            *[obstore.put_async(raw, f"bare{number}/{i}", body, mode="create") for i in range(MANY)]
        )

    async def read(_: int) -> None:
        await asyncio.gather(*[read_columns(store, each, names) for each in headers])

    async def get(_: int) -> None:
        await asyncio.gather(*[_whole(raw, each.key) for each in headers])

    array = np.zeros(1 << 22, np.uint8)
    layout = plan_layout({}, {"tokens": ("uint8", array.shape)})
    fd = seal(layout, {"tokens": array})

    async def mapped(_: int) -> None:
        SealedWindow(os.dup(fd)).close()

    async def map_alone(_: int) -> None:
        mmap.mmap(fd, layout.size, mmap.MAP_SHARED, mmap.PROT_READ).close()

    try:
        times = [1e6 * each for each in await in_turn(rounds, [ranged, bare, mapped, map_alone])]
    finally:
        os.close(fd)
    rates = [MANY / each for each in await in_turn(max(1, rounds // 10), [write, put, read, get])]
    return [
        # As much Python as bytes, for which obstore alone has none.
        figure("payload.write", rates[0], "objects/s", 0.05 * rates[1], rates[1]),
        figure("payload.read", rates[2], "objects/s", 0.05 * rates[3], rates[3]),
        figure("payload.range", times[0], "us", 10 * times[1], times[1], "lower"),
        figure("window.map", times[2], "us", 20 * times[3], times[3], "lower"),
    ]


async def _whole(store: LocalStore, key: str) -> None:
    await (await obstore.get_async(store, key)).bytes_async()
