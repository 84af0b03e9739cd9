"""How evenly four hosts are filled, by their priorities against in turn.

Tenants come one by one and live for times of their own; the fourth host comes late; when that is over and all have ended, as
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

HOSTS = 4
_START_S = 3.0
"""For the processes to be there before the first tenant comes."""
_AFTER_S = 2.0
"""A host that comes late is not yet balanced so long."""
_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Arrivals:
    """So many tenants a second, of `mean_s` on the average, for `late_s` before and after the last host comes."""

    a_second: float
    mean_s: float
    late_s: float

    @property
    def tenants(self) -> int:
        """At a time, on the average."""
        return int(self.a_second * self.mean_s)


async def balance(broker: Broker, arrivals: Arrivals) -> list[Figure]:
    by_priority, in_turn = [await _spreads(broker, arrivals, priorities) for priorities in (True, False)]
    figures: list[Figure] = []
    for when in by_priority:
        (spread, ratio), (peer_spread, peer_ratio) = by_priority[when], in_turn[when]
        say(f"{when}: {spread:.1f} apart by priority, {peer_spread:.1f} in turn; max/mean {ratio:.2f}, {peer_ratio:.2f}")
        figures += [
            figure(f"balance.{when}.spread", spread, "tenants", 0, peer_spread),
            figure(f"balance.{when}.ratio", ratio, "max/mean", 0, peer_ratio),
        ]
    return figures


async def _spreads(broker: Broker, arrivals: Arrivals, priorities: bool) -> dict[str, tuple[float, float]]:
    """Means of max - min and of max / mean: soon after a host came late, then, and of tenants that came at once."""
    run = f"bench{secrets.token_hex(4)}"
    log = await Log.connect(broker, run, "bench")
    await log.create()
    began = time.monotonic() + _START_S
    joined = began + arrivals.late_s
    given = {"broker": broker.model_dump(), "run": run, "capacity": arrivals.tenants, "priorities": priorities}
    with ExitStack() as stack:
        hosts: list[dict[str, Any]] = []
        for number in range(HOSTS):
            at = joined if number == HOSTS - 1 else began - 0.5
            hosts.append(stack.enter_context(child("hosts_sleeper.py", {**given, "name": f"h{number}", "at": at})))
        if time.monotonic() > began:
            raise SystemExit(f"{HOSTS} hosts did not start within {_START_S} s: the machine is too busy for this")
        sent = await _arrive(log, arrivals, began, joined + arrivals.late_s)
        ended = time.monotonic()
        known = await _known(hosts)
        while sum(each[-1][1] for each in known):
            await asyncio.sleep(0.1)
            known = await _known(hosts)
        burst_s = 3.0
        at_once = [(_tenant(sent + number, burst_s), None) for number in range(arrivals.tenants)]
        await log.publish_all(at_once)
        stored = time.monotonic()
        await asyncio.sleep(burst_s - 0.5)
        known = await _known(hosts)
    await log.close()
    return {
        "late": _spread(known, joined, joined + _AFTER_S),
        "steady": _spread(known, joined + _AFTER_S, ended),
        "burst": _spread(known, stored + burst_s / 2, stored + burst_s / 2 + _STEP_S),
    }


async def _arrive(log: Log, arrivals: Arrivals, began: float, until: float) -> int:
    """How many have come."""
    lives = random.Random(1)  # noqa: S311  # the same ones for both
    sent = 0
    while (now := time.monotonic()) < until:
        due = int(max(0.0, now - began) * arrivals.a_second)
        for number in range(sent, due):
            await log.publish(_tenant(number, lives.expovariate(1 / arrivals.mean_s)))
        sent = max(sent, due)
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
