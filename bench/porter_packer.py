"""What a packer takes to build a window, and when its rank has the first one of a batch."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from log_server import Server, say
from porter_world import (
    NARROW,
    ROUTED,
    ROUTING,
    columns_of,
    figure,
    in_turn,
    plan_of,
    seconds,
    written,
)
from report import Figure

from pipeline.batch.windows import frame, job_pieces, plan_window, shapes
from pipeline.checksum import crc32c
from pipeline.feed.feed import Feed
from pipeline.feed.wire import socket_path
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns, write_sidecar
from schemas.config import RunConfig
from schemas.config import Store as StoreConfig
from schemas.keys import plan_key
from schemas.plan import Plan
from services.packer.building import IN_FLIGHT
from tests.packer_parts import MICROBATCHES, process, publish_batch, publish_trained

HERE = Path(__file__).parent
LARGE = 6 * IN_FLIGHT
"""Bytes of a window from which what may be in flight is less than a fifth of it."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Contexts of a window and the tokens of each; rounds; of the routing-heavy row the tokens, at cp 16."""

    contexts: int
    tokens: int
    rounds: int
    long: int


async def _built(directory: Path, store: StoreConfig, plan: Plan, how: str, rounds: int) -> dict[str, Any]:
    """What a child says of one window."""
    spec = directory / f"{how}.json"
    spec.write_text(
        json.dumps(
            {
                "store": store.model_dump(mode="json"),
                "plan": plan.model_dump(mode="json"),
                "how": how,
                "rounds": rounds,
            }
        )
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "porter_build.py"), str(spec), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    if child.returncode:
        raise SystemExit(f"porter_build.py {how} ended with {child.returncode}")
    return json.loads(out)


async def packing(directory: Path, name: str, config: StoreConfig, size: Windows) -> list[Figure]:
    """Memory and time of building one window with routing; and of its packing alone, from columns that are in memory."""
    store = ObjectStore.open(config)
    lengths = [size.tokens] * size.contexts
    plan = plan_of(await written(store, "window", lengths, True), 1)
    # Memory is of one window in a fresh process; its time is of later ones, as a packer lives on.
    once = await _built(directory, config, plan, "packer", 1)
    built = await _built(directory, config, plan, "packer", size.rounds + 1)
    copied = once["bytes"] / await seconds(size.rounds, _copying(once["bytes"])) / 1e6
    peak = 1 + once["beside"] / once["bytes"]
    rate = once["bytes"] / statistics.median(built["seconds"][1:]) / 1e6
    # Without ranges and parts: the objects whole beside the window.
    whole = 1 + plan_bytes(plan) / once["bytes"]
    figures = [
        figure(f"packer.memory.{name}", peak, "x", 1.2 if once["bytes"] >= LARGE else 0.0, whole, "lower"),
        figure(f"packer.build.{name}", rate, "MB/s", 0.0, copied),
    ]
    say(f"packer {name}: {once['bytes'] / 1e6:,.0f} MB, {peak:.3f} of it at most, {rate:,.0f} MB/s")
    if name == "files":
        figures.append(await _pack(store, plan, size.rounds))
    return figures


def plan_bytes(plan: Plan) -> int:
    return sum(sequence.payload.bytes for sequence in plan.sequences)


def _copying(size: int) -> Callable[[int], Awaitable[None]]:
    """A copy of as many bytes into a new memfd, as a window is one."""
    source = memoryview(b"\1" * size)

    async def copy(_: int) -> None:
        fd = os.memfd_create("packtrain-bench")
        try:
            at = 0
            while at < size:
                at += os.pwrite(fd, source[at : at + (4 << 20)], at)
        finally:
            os.close(fd)

    return copy


async def _pack(store: ObjectStore, plan: Plan, rounds: int) -> Figure:
    """Writing the window's rows from verified columns into memory that is there, against a copy of as many bytes there."""
    window = plan_window(plan, 0, 0, columns=("routed_experts",))
    got = [
        (job, [await read_columns(store, read.header, read.columns, read.spans) for read in job.reads])
        for job in window.jobs
    ]
    arrays = {name: np.ones(shape, dtype) for name, (dtype, shape) in shapes(window).items()}

    async def pack(_: int) -> None:
        for name, values in frame(window).items():
            arrays[name][...] = values
        for job, columns in got:
            for name, first, values in job_pieces(window, job, columns):
                arrays[name][first : first + len(values)] = values

    size = sum(array.nbytes for array in arrays.values())
    sources = {name: array.copy() for name, array in arrays.items()}

    async def copy(_: int) -> None:
        for name, array in arrays.items():
            array[...] = sources[name]

    packed, copied = (size / 1e6 / each for each in await in_turn(rounds, [pack, copy]))
    return figure("packer.pack", packed, "MB/s", 0.5 * copied, copied)


async def routing(directory: Path, config: StoreConfig, size: Windows) -> list[Figure]:
    """Rank 0 of cp 16, with 376 expert indices a token, against a rank that fetches int32 indices of whole rows and cuts."""
    store, cp = ObjectStore.open(config), 16
    headers = await written(store, "routed", [size.long], True)
    plan = plan_of(headers, 1, cp)
    ours = await _built(directory, config, plan, "packer", 1)
    wide = columns_of(size.long, True)[ROUTING].astype(np.int32)
    header = await write_sidecar(store, headers[0].key.replace("-a1.", "-a1.wide."), {ROUTING: wide})
    sequence = plan.sequences[0].model_copy(update={"payload": header})
    whole = await _built(directory, config, plan.model_copy(update={"sequences": (sequence,)}), "whole", 1)
    mine = size.long / cp
    return [
        figure(
            "routing.bytes", ours["fetched"] / mine, "B/token", 1.05 * (ROUTED + NARROW), whole["fetched"] / mine, "lower"
        ),
        # The window counts, and all that is held beside it.
        figure(
            "routing.memory",
            (ours["bytes"] + ours["beside"]) / mine,
            "B/token",
            0.0,
            whole["beside"] / mine,
            "lower",
        ),
    ]  # fmt: skip


async def first(
    directory: Path, server: Server, name: str, config: StoreConfig, size: Windows
) -> list[Figure]:
    """From `batch.yielded` until a rank has micro-batch 0, in ms; against fetching its objects whole and copying them once."""
    run = f"first-{name}"
    base = directory / run
    base.mkdir()
    store = ObjectStore.open(config)
    settings = RunConfig.model_validate(
        {
            "run": run,
            "directory": str(base),
            "broker": server.broker.model_dump(),
            "store": config.model_dump(),
            "trainer": {"kind": "external"},
            "batch": {"token_budget": size.contexts * size.tokens},
            "packer": {"socket_dir": str(base / "s"), "columns": ["routed_experts"], "memory_bytes": 8 << 30},
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [{"name": "s", "pool": "p", "groups": 1, "environment": {"kind": "arithmetic"}}],
        }
    )
    (base / "s").mkdir(mode=0o700)
    log = await Log.connect(settings.broker, run, "bench")
    try:
        await log.create()
        taken: list[float] = []
        # Every micro-batch of the same objects: a packer keeps nothing of one for the next.
        mine = await written(store, run, [size.tokens] * size.contexts, True)
        headers = mine * MICROBATCHES
        async with process(settings, base):
            with Feed(socket_path(settings, 0), timeout_s=60) as feed:
                for step in range(1, size.rounds + 2):
                    plan = plan_of(headers, MICROBATCHES).model_copy(
                        update={"run": run, "step": step, "policy_version": step - 1}
                    )
                    body = plan.model_dump_json().encode()
                    ref = await store.create(plan_key(run, step, crc32c(body)), body)
                    asking = asyncio.create_task(asyncio.to_thread(_first, feed, step))
                    began = time.perf_counter()
                    await publish_batch(log, step, ref)
                    taken.append(await asking - began)
                    # What is left of it is no work of the packer's any more.
                    await publish_trained(log, step)
    finally:
        await log.close()

    async def whole(_: int) -> None:
        for body in await asyncio.gather(*[store.get_ranges(h.key, [(0, h.bytes)]) for h in mine]):
            np.frombuffer(body[0], np.uint8).copy()

    against = await seconds(size.rounds, whole)
    return [figure(f"packer.first.{name}", 1e3 * statistics.median(taken[1:]), "ms", 0.0, 1e3 * against, "lower")]  # fmt: skip


def _first(feed: Feed, step: int) -> float:
    batches = feed.batch(step)
    next(batches)
    had = time.perf_counter()
    batches.close()
    return had
