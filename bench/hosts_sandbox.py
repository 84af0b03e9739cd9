"""How long an overlay workspace takes to start and to go, alone and many at once, against what the kernel takes for bare
namespaces."""

from __future__ import annotations

import asyncio
import time

from capture_world import say
from hosts_world import TASKS, figure
from lag import quantile
from report import Figure

from pipeline.harnesses.workspaces.base import Spec
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces

_BARE = ("unshare", "--fork", "--kill-child", "--mount", "--pid", "--net", "--ipc", "--uts", "true")


async def sandboxes(at_once: tuple[int, ...], count: int) -> list[Figure]:
    """`count` in all, at each of these numbers at once, of the definition of a task that is shipped."""
    figures: list[Figure] = []
    provider = OverlayWorkspaces()

    async def ours(name: str) -> tuple[float, float]:
        began = time.perf_counter()
        async with provider.open(Spec(name=name, definition=TASKS / "csv-report" / "environment")):
            started, ended = time.perf_counter() - began, time.perf_counter()
        return started, time.perf_counter() - ended

    async def bare(_: str) -> tuple[float, float]:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*_BARE)
        if await process.wait():
            raise SystemExit(f"{' '.join(_BARE)} exited with {process.returncode}")
        return time.perf_counter() - began, 0.0

    for width in at_once:
        taken = {bare: list[tuple[float, float]](), ours: list[tuple[float, float]]()}
        for number in range(-1, max(1, count // width)):
            for what, times in taken.items():
                found = await asyncio.gather(
                    *(what(f"bench-{width}-{number + 1}-{place}") for place in range(width))
                )
                # The first round does not count.
                times += found if number >= 0 else []
        starts, stops = (sorted(1000 * each[i] for each in taken[ours]) for i in (0, 1))
        peer = sorted(1000 * each[0] for each in taken[bare])
        say(
            f"{width} sandboxes at once: start {quantile(starts, 0.5):.0f} ms, stop {quantile(stops, 0.5):.0f} ms; bare "
            f"namespaces {quantile(peer, 0.5):.0f} ms"
        )
        figures += [
            figure(f"sandbox.{width}.{what}.p{100 * q:.0f}", quantile(times, q), "ms", 0, quantile(peer, q))
            for what, times in (("start", starts), ("stop", stops))
            for q in (0.5, 0.99)
        ]
    return figures
