"""How late a batch is because its groups are graded: beside the rollouts, and by graders that these wait for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from log_server import Server, say
from report import Figure
from signals_world import CONNECT_S, MEMBERS, Group, configured, figure, groups_of, started

from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import RunConfig
from schemas.facts import BatchYielded, SampleCompleted, SampleGraded, SequenceFinished
from services import grader, sampler
from services.process import Context

GRADED = 8
"""Groups of the batch that are graded; as many are not."""
_AT_ONCE = 4
"""Groups that the grader takes at once: of those that complete while it grades one, so many are graded."""
_SLACK = 1.1
"""Time between graded groups over that in which one can be graded."""
_MEMBERS_OVER = 4
"""Groups whose members finish meanwhile."""
_WITHIN_S = 900.0
_SERVICES = {"sampler": sampler.serve, "grader": grader.serve}


class Slow:
    """A grader that takes its time, and keeps the rewards."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seconds: float = options["seconds"]

    async def __call__(self, completed: SampleCompleted) -> tuple[float, ...]:
        await asyncio.sleep(self._seconds)
        return completed.rewards


@dataclass(frozen=True, slots=True)
class _Way:
    """How the groups of `code` are graded. `settings`: of its grader, None for none; `after`: the grader is started when the last
    sequence has finished; `last`: the batch's last group is one of them."""

    settings: Mapping[str, Any] | None = None
    after: bool = False
    last: bool = False


_WAYS = {
    "none": _Way(),
    "none.last": _Way(last=True),
    "wait": _Way({"concurrency": _AT_ONCE}),
    "wait.last": _Way({"concurrency": _AT_ONCE}, last=True),
    "lag": _Way({"concurrency": _AT_ONCE, "policy": "lag"}),
    "in_line": _Way({"concurrency": 1}),
    "after": _Way({"concurrency": _AT_ONCE}, after=True),
}


async def graders(server: Server, directory: Path, latency_s: float) -> list[Figure]:
    """Of a grader that takes so long for a group. The ways go at once, as they mostly wait: each is a run of its own."""
    say(
        f"graders: {GRADED} groups of {2 * GRADED} are graded, {latency_s:g} s each; the longest takes {8.3 * latency_s:.0f} s"
    )
    ends = await asyncio.gather(
        *[_way(server, directory, way, latency_s, number) for number, way in enumerate(_WAYS.values())]
    )
    late, graded = (dict(zip(_WAYS, each, strict=True)) for each in zip(*ends, strict=True))
    say("  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in late.items()))
    delay = {name: late[name] - late["none.last" if way.last else "none"] for name, way in _WAYS.items()}
    in_line, after = (max(delay[name], 1e-3) for name in ("in_line", "after"))
    return [
        figure("grader.none", late["none"], "s", 0, latency_s),
        figure("grader.wait", delay["wait"], "s", latency_s, in_line),
        figure("grader.wait.after", delay["wait"], "s", latency_s, after),
        figure("grader.wait.last", delay["wait.last"], "s", 0, latency_s),
        figure("grader.lag", delay["lag"], "s", latency_s, in_line),
        figure("grader.lag.graded", graded["lag"], "groups", 0, GRADED, better="higher"),
    ]


async def _way(
    server: Server, directory: Path, way: _Way, latency_s: float, number: int
) -> tuple[float, int]:
    """Seconds from the last sequence to the batch, and how many of its groups were graded by then. `number`: of the way, so that
    the batches of no two are made at the same time."""
    await asyncio.sleep(number * latency_s / 20)
    settings = (
        {"kind": "none"}
        if way.settings is None
        else {"kind": "signals_grader:Slow", "options": {"seconds": latency_s}, **way.settings}
    )
    settings |= {"deadline_s": _WITHIN_S}
    sources = [{"name": "code", "groups": GRADED, "grader": settings}, {"name": "math", "groups": GRADED}]
    config = configured(
        f"g{secrets.token_hex(4)}",
        server.broker,
        f"file://{directory}/graded",
        sources[:: -1 if way.last else 1],
    )
    groups = groups_of(config)
    log = await Log.connect(server.broker, config.run, "bench", CONNECT_S)
    await log.create()
    await log.publish(started(config))
    await log.publish_all([(m.dispatched, None) for group in groups for m in group])
    stop = asyncio.Event()
    serving = [asyncio.create_task(_serve("sampler", config, stop))]
    if not way.after:
        serving.append(asyncio.create_task(_serve("grader", config, stop)))
    await _roll(log, groups, latency_s)
    if way.after:
        serving.append(asyncio.create_task(_serve("grader", config, stop)))
    ending = asyncio.create_task(_end(log))
    done, _ = await asyncio.wait({ending, *serving}, timeout=_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    if done != {ending}:
        raise SystemExit(f"no batch after {_WITHIN_S:g} s: {[task for task in done if task is not ending]}")
    stop.set()
    await asyncio.gather(*serving)
    await log.close()
    return ending.result()


async def _serve(name: str, config: RunConfig, stop: asyncio.Event) -> None:
    log = await Log.connect(config.broker, config.run, name, CONNECT_S)
    store = ObjectStore.open(config.store)
    context = Context(config, name, log, store, stop, logging.getLogger("packtrain"))
    try:
        await _SERVICES[name](context)
    finally:
        await log.close()


async def _roll(log: Log, groups: Sequence[Group], latency_s: float) -> None:
    """Finishes the sequences: the groups complete one by one, evenly, graded ones a little less often than they can be graded."""
    every = _SLACK * latency_s / _AT_ONCE / 2
    due = sorted(
        (max(0.0, every * (number + 1 - _MEMBERS_OVER * (1 - (at + 1) / MEMBERS))), number, at)
        for number, at in itertools.product(range(len(groups)), range(MEMBERS))
    )
    began = time.monotonic()
    for when, number, at in due:
        await asyncio.sleep(max(0.0, began + when - time.monotonic()))
        await log.publish_all([(fact, None) for fact in groups[number][at].facts()])


async def _end(log: Log) -> tuple[float, int]:
    """Seconds from the last sequence to the batch, and how many groups were graded by then."""
    graded, last = 0, None
    async for event in log.subscribe():
        match event.fact:
            case SequenceFinished():
                last = event.time
            case SampleGraded(source="code", fallback=None):
                graded += 1
            case BatchYielded():
                assert last is not None
                return (event.time - last).total_seconds(), graded
            case _:
                pass
    raise SystemExit("the log is gone")
