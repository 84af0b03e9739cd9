"""What tenants of one host cost: the loop's lag, memory, and calls a second, against a process for each rollout."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from capture_world import child, say
from hosts_rollout import CALLS
from hosts_world import Stage, figure, staged
from lag import quantile, resident
from report import Figure

from pipeline.log import end_tasks
from schemas.config import Broker

LAG_MS = 100.0
"""At the 99th percentile: what an agent waits for its host beside what it waits for its model, which takes seconds."""
PACE = 200
"""Calls a second that the tenants make while the lag is measured."""
_PROGRAM = Path(__file__).with_name("hosts_rollout.py")
_IDLE_S = 1.0
_POLL_S = 0.1
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """`tenants` of a host, and rollouts at once in `processes`; at least `rollouts` are made for a rate. A model call takes
    `delay_s`, or so long that there are `PACE` a second at most, but for the rates, where it takes nothing."""

    tenants: tuple[int, ...]
    processes: tuple[int, ...]
    delay_s: float
    rollouts: int

    def delay(self, count: int) -> float:
        return max(self.delay_s, count / PACE)


async def tenants(broker: Broker, directory: Path, load: Load) -> list[Figure]:
    figures: list[Figure] = []
    delays = [*map(load.delay, load.tenants), 0.0]
    with child("hosts_model.py", {"delays_s": delays, "calls": CALLS}) as model:
        *slow, fast = model["urls"]
        alone = {count: _processes(fast, count) for count in load.processes}
        for count, url in zip(load.tenants, slow, strict=True):
            pool = {"harness": "tool", "tenants": count}
            async with staged(broker, directory, pool, {"kind": "hosts_rollout:Steps"}) as stage:
                peer = alone[max(each for each in load.processes if each <= count)]
                figures += await _host(stage, count, load, url, fast, peer)
    return figures


async def _host(
    stage: Stage, count: int, load: Load, slow: str, fast: str, peer: tuple[float, float, float]
) -> list[Figure]:
    with stage.host() as host:
        async with aiohttp.ClientSession() as http:
            # What a process loads with its first trials is no tenant's.
            await stage.trials(5, fast)
            await _state(http, host)
            await asyncio.sleep(_IDLE_S)
            idle = await _state(http, host)
            most = [0]
            watching = asyncio.create_task(_resident(host["pid"], most))
            try:
                await stage.trials(count, slow, over_s=load.delay(count))
            finally:
                await end_tasks([watching])
            loaded = await _state(http, host)
            made = max(load.rollouts, count)
            took = await stage.trials(made, fast)
            cpu = 1000 * ((await _state(http, host))["cpu_s"] - loaded["cpu_s"]) / (made * CALLS)
    late = {q: 1000 * quantile(loaded["late"], q) for q in (0.5, 0.99)}
    before = {q: max(0.001, 1000 * quantile(idle["late"], q)) for q in (0.5, 0.99)}
    each, added = most[0] / count / _MIB, (most[0] - idle["resident"]) / count / 1024
    say(
        f"{count} tenants: lag {late[0.5]:.1f}/{late[0.99]:.1f} ms (idle {before[0.5]:.1f}/{before[0.99]:.1f}), host "
        f"{most[0] / _MIB:.0f} MiB, {added:.0f} KiB more a tenant, {made * CALLS / took:.0f} calls/s, {cpu:.1f} ms of CPU a call"
    )
    goal = LAG_MS if count == max(load.tenants) else 0
    return [
        figure(f"tenants.{count}.lag.p50", late[0.5], "ms", 0, before[0.5]),
        figure(f"tenants.{count}.lag.p99", late[0.99], "ms", goal, before[0.99]),
        figure(f"tenants.{count}.memory", each, "MiB", 0, peer[1]),
        figure(f"tenants.{count}.rate", made * CALLS / took, "calls/s", 0, peer[0], "higher"),
        figure(f"tenants.{count}.cpu", cpu, "ms/call", 0, peer[2]),
    ]


def _processes(url: str, count: int) -> tuple[float, float, float]:
    """Calls/s of so many rollouts at once, a new process each; the MiB of one; its milliseconds of CPU for each call."""
    began, before = time.perf_counter(), _cpu_of_children()
    running: Sequence[subprocess.Popen[str]] = [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), f"{url}/s/p{number}/v1"], stdout=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    memory: list[int] = []
    for process in running:
        out, _ = process.communicate(timeout=240)
        if process.returncode:
            raise SystemExit(f"a rollout in its own process exited with {process.returncode}")
        memory.append(int(out))
    took = time.perf_counter() - began
    rate, each = count * CALLS / took, sum(memory) / count / 1024
    cpu = 1000 * (_cpu_of_children() - before) / (count * CALLS)
    say(f"{count} processes: {rate:.1f} calls/s, {each:.0f} MiB each, {cpu:.0f} ms of CPU a call")
    return rate, each, cpu


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _resident(pid: int, most: list[int]) -> None:
    while True:
        most[0] = max(most[0], resident(pid))
        await asyncio.sleep(_POLL_S)


async def _state(http: aiohttp.ClientSession, host: dict[str, Any]) -> dict[str, Any]:
    async with http.get(host["control"]) as response:
        return await response.json()
