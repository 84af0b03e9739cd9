"""How evenly hosts are filled, by their priorities against in turn.

Tenants come one by one and live for times of their own; the last host comes late; when that is over and all have ended, as
many tenants come at once as there were on the average.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
from capture_world import child, say
from hosts_world import figure
from report import Figure

from pipeline.log import Log
from schemas.config import Broker
from schemas.facts import SequenceOpened
from schemas.names import attempt_id, sample_id, sequence_id

_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Arrivals:
    """So many tenants a second, of `mean_s` on the average: for `before_s` until the last host is started, for `late_s` in
    which it is filled, and for `steady_s`. Those that come at once live `burst_s`."""

    hosts: int
    a_second: float
    mean_s: float
    before_s: float
    late_s: float
    steady_s: float
    burst_s: float

    @property
    def tenants(self) -> int:
        """At a time, on the average."""
        return int(self.a_second * self.mean_s)


async def balance(broker: Broker, arrivals: Arrivals) -> list[Figure]:
    by_priority, in_turn = [await _spreads(broker, arrivals, priorities) for priorities in (True, False)]
    figures: list[Figure] = []
    for when in by_priority:
        (spread, ratio), (peer_spread, peer_ratio) = by_priority[when], in_turn[when]
        say(
            f"{when}: {spread:.1f} apart by priority, {peer_spread:.1f} in turn; max/mean {ratio:.2f}, {peer_ratio:.2f}"
        )
        figures += [
            figure(f"balance.{when}.spread", spread, "tenants", 0, max(peer_spread, _STEP_S)),
            figure(f"balance.{when}.ratio", ratio, "max/mean", 0, peer_ratio),
        ]
    return figures


async def _spreads(broker: Broker, arrivals: Arrivals, priorities: bool) -> dict[str, tuple[float, float]]:
    """Means of max - min and of max / mean: soon after a host came late, then, and of tenants that came at once."""
    run = f"bench{secrets.token_hex(4)}"
    log = await Log.connect(broker, run, "bench")
    await log.create()
    given = {
        "broker": broker.model_dump(),
        "run": run,
        "capacity": arrivals.tenants,
        "priorities": priorities,
    }
    with ExitStack() as stack:

        async def begin(number: int) -> dict[str, Any]:
            started = child("hosts_sleeper.py", {**given, "name": f"host-{number}"})
            return await asyncio.to_thread(stack.enter_context, started)

        hosts = await asyncio.gather(*map(begin, range(arrivals.hosts - 1)))
        until = asyncio.Event()
        arriving = asyncio.create_task(_arrive(log, arrivals, until))
        await asyncio.sleep(arrivals.before_s)
        hosts.append(await begin(arrivals.hosts - 1))
        joined = hosts[-1]["began"]
        await asyncio.sleep(arrivals.late_s + arrivals.steady_s)
        until.set()
        sent, ended = await arriving, time.monotonic()
        await _all_ended(hosts)
        await log.publish_all(
            [(_tenant(sent + number, arrivals.burst_s), None) for number in range(arrivals.tenants)]
        )
        stored = time.monotonic()
        await asyncio.sleep(arrivals.burst_s)
        known = await _known(hosts)
    await log.close()
    middle = stored + arrivals.burst_s / 2
    return {
        "late": _spread(known, joined, joined + arrivals.late_s),
        "steady": _spread(known, joined + arrivals.late_s, ended),
        "burst": _spread(known, middle, middle + _STEP_S),
    }


async def _arrive(log: Log, arrivals: Arrivals, until: asyncio.Event) -> int:
    """How many have come."""
    began = time.monotonic()
    lives = random.Random(1)  # the same ones for both
    sent = 0
    while not until.is_set():
        due = int((time.monotonic() - began) * arrivals.a_second)
        for number in range(sent, due):
            await log.publish(_tenant(number, lives.expovariate(1 / arrivals.mean_s)))
        sent = due
        await asyncio.sleep(_STEP_S / 4)
    return sent


def _tenant(number: int, seconds: float) -> SequenceOpened:
    sample = sample_id("bench", number)
    sequence = sequence_id(sample, 0)
    return SequenceOpened(
        source="bench",
        sample=sample,
        sequence=sequence,
        attempt=1,
        pool="bench",
        task_index=int(1000 * seconds),
        host="bench-loop",
        base_url="http://127.0.0.1:1",
        session=attempt_id(sequence, 1),
        budget_s=60.0,
    )


async def _all_ended(hosts: list[dict[str, Any]]) -> None:
    while True:
        if not any(each[-1][1] for each in await _known(hosts)):
            return
        await asyncio.sleep(_STEP_S)


async def _known(hosts: list[dict[str, Any]]) -> list[list[list[Any]]]:
    async with aiohttp.ClientSession() as http:

        async def one(host: dict[str, Any]) -> list[list[Any]]:
            async with http.get(host["control"]) as response:
                return (await response.json())["tenants"]

        return await asyncio.gather(*map(one, hosts))


def _spread(known: list[list[list[Any]]], begin: float, end: float) -> tuple[float, float]:
    apart: list[float] = []
    ratios: list[float] = []
    for step in range(max(1, int((end - begin) / _STEP_S))):
        now = begin + step * _STEP_S
        loads = [each[bisect_right(each, now, key=lambda entry: entry[0]) - 1][1] for each in known]
        apart.append(max(loads) - min(loads))
        ratios.append(max(loads) / statistics.mean(loads) if any(loads) else 1.0)
    return statistics.mean(apart), statistics.mean(ratios)
