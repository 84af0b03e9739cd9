"""Builds one window: what it reads is written row by row into a sealed memfd, so that little is held beside it.

Promises:
- beside the window there is what is on its way, which the gate bounds over all windows, those of the earliest first;
- while the store is away it waits, and fetches nothing twice that it has written;
- what is cancelled or fails leaves no memory and no descriptor.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline.batch.windows import Array, Job, Read, Window, frame, job_pieces, with_offsets, with_segments
from pipeline.feed.ahead import WindowId
from pipeline.feed.gate import Gate
from pipeline.feed.memfd import Draft
from pipeline.log import end_tasks
from pipeline.store import ObjectStore
from pipeline.store.outage import outlasting
from pipeline.store.payload import read_columns
from pipeline.vision.owners import Encode
from schemas.facts import WindowPacked
from services.packer.steps import Planned, form
from services.process import Context

IN_FLIGHT = 32 << 20
"""Bytes that may be on their way from the store to windows at one time."""
_LONG = 64 << 10
"""Bytes from which writing is worth a thread."""
_M_MMAP_THRESHOLD = -3
"""glibc's malloc.h."""
T = TypeVar("T")


def give_back_memory() -> None:
    """Has this process give the memory of buffers back when it frees them. By itself glibc comes to keep it, in as many places as
    there are threads: several times what is in flight."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 * _LONG)


@dataclass(frozen=True)
class Built:
    """A sealed window, whose descriptor is the caller's to close, and what the log is told of it."""

    fd: int
    fact: WindowPacked


async def build(ctx: Context, planned: Planned, gate: Gate, sized: Callable[[int], None]) -> Built:
    """The window. `sized` is told its exact bytes before any of them exist, and may refuse.

    Raises what `sized` does, ObjectDamaged, ObjectMissing, StoreError, ValueError where payloads contradict the plan, OSError.
    """
    scope = ctx.store.scope()
    window, images = planned.window, planned.images
    at = WindowId(window.step, window.microbatch)

    async def read(reads: Sequence[Read]) -> list[dict[str, Array]]:
        return await outlasting(lambda: _read(scope, reads), ctx.logger)

    if window.segment_reads:
        window = with_segments(window, await read(window.segment_reads))
    if window.offset_reads:
        window = with_offsets(window, await read(window.offset_reads))
    layout = form(window, images)
    sized(layout.size)
    draft = Draft(layout)
    try:
        for name, values in frame(window).items():
            draft.write(name, 0, values)
        work: list[Callable[[], Coroutine[Any, Any, None]]] = [
            _job(scope, window, job, draft, gate, at) for job in window.jobs
        ]
        if images is not None:
            for name, values in images.arrays().items():
                draft.write(name, 0, values)
            work += [
                _image(scope, window.run, each, draft, gate, at) for each in images.encode if not each.blank
            ]
        await _all(work, ctx)
        fd = draft.seal()
    finally:
        draft.close()
    fact = WindowPacked(
        step=window.step,
        microbatch=window.microbatch,
        dp=window.dp,
        cp=window.cp,
        pp=window.pp,
        tokens=window.tokens,
        bytes=layout.size,
        fetched=scope.counters.bytes_read,
    )
    return Built(fd, fact)


def _job(
    store: ObjectStore, window: Window, job: Job, draft: Draft, gate: Gate, at: WindowId
) -> Callable[[], Coroutine[Any, Any, None]]:
    def write(columns: Sequence[dict[str, Array]]) -> None:
        for name, first, values in job_pieces(window, job, columns):
            draft.write(name, first, values)

    async def run() -> None:
        async with gate.entered(at, job.bytes):
            columns = await _read(store, job.reads)
            await _in_thread(job.bytes, write, columns)

    return run


def _image(
    store: ObjectStore, run_id: str, image: Encode, draft: Draft, gate: Gate, at: WindowId
) -> Callable[[], Coroutine[Any, Any, None]]:
    async def run() -> None:
        from pipeline.feed.pixels import fetch_pixels

        size = image.end - image.start
        # The object, its picture as it is decoded, and its pixels.
        async with gate.entered(at, image.item.bytes + 2 * size):
            pixels = np.zeros(image.shape, np.uint8)
            await fetch_pixels(store, run_id, image.item, pixels)
            await _in_thread(size, draft.write, "images.pixels", image.start, pixels.reshape(-1))

    return run


async def _all(work: Sequence[Callable[[], Coroutine[Any, Any, None]]], ctx: Context) -> None:
    """Does all of it, each once: after an outage only what is left."""
    left = dict(enumerate(work))

    async def one(i: int) -> None:
        await left[i]()
        del left[i]

    await outlasting(lambda: _together([one(i) for i in left]), ctx.logger)


async def _read(store: ObjectStore, reads: Sequence[Read]) -> list[dict[str, Array]]:
    return await _together([read_columns(store, read.header, read.columns, read.spans) for read in reads])


async def _together(work: Sequence[Awaitable[T]]) -> list[T]:
    """`asyncio.gather` that leaves nothing running behind a failure."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(task for task in tasks if not task.done())


async def _in_thread(size: int, work: Callable[..., None], *arguments: Any) -> None:
    if size < _LONG:
        work(*arguments)
        return
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(running)
    finally:
        # A thread cannot be cancelled: it is waited for, so that it never writes to a file that is closed.
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
