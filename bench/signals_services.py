"""Sampler, grader and hook as processes before a real broker: how fast groups are shaped, how late the last is, what is read.

The grader is `none`, which keeps the rewards. Two sources whose hooks read columns: `code` has length_penalty, grpo and
examples/hooks/likely_tokens.py, `math` is distilled (`opd`) from a teacher whose scores are there at once.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from capture_world import child
from lag import resident
from log_server import Server, say
from report import Figure
from signals_core import STATE
from signals_world import (
    AT_ONCE,
    CONNECT_S,
    MEMBERS,
    TEACHER,
    Group,
    Member,
    configured,
    figure,
    groups_of,
    order,
    started,
    stored,
)

from pipeline.log import Log, end_tasks
from pipeline.signal.hooks import chain
from pipeline.signal.shaping import COLUMN, Gathered, by_token, loss_rows
from pipeline.store import ObjectStore
from schemas.config import RunConfig, Store
from schemas.facts import (
    BatchYielded,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
)

HOOKS = Path(__file__).resolve().parents[1] / "examples" / "hooks"
SHRINK = 16
_SERVICES = ("sampler", "grader", "hook")
_BURST = 256
_TICK_S = 0.01
_WITHIN_S = 600.0
_GATHERED = 64
_MANY = 10_000
"""Sequences of which a process's other few megabytes are no part to speak of."""
_READ = re.compile(r"read (\d+) bytes")
SOURCES = {
    "code": {"hooks": [{"kind": "length_penalty"}, {"kind": "grpo"}, {"kind": "likely_tokens:LikelyTokens"}]},
    "math": {"hooks": [{"kind": "opd", "options": {"teacher": TEACHER}}], "teachers": [TEACHER]},
}


@dataclass(frozen=True, slots=True)
class _Took:
    """All after the first group. Seconds from the first sequence until all groups but one are shaped; from the last sequence until
    its group is shaped; from there to the batch. Bytes by which the sampler grew for a sequence; that the hook service read."""

    seconds: float
    last_s: float
    batch_s: float
    resident: float
    read: int


async def services(server: Server, directory: Path, groups: int) -> list[Figure]:
    members = groups * MEMBERS
    sys.path.append(str(HOOKS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOKS), os.environ.get("PYTHONPATH"))))
    store_url = f"file://{directory}/objects"
    counts = {"code": groups - groups // 2, "math": groups // 2}

    def run() -> RunConfig:
        sources = [{"name": name, "groups": counts[name], **SOURCES[name]} for name in counts]
        return configured(f"b{secrets.token_hex(4)}", server.broker, store_url, sources)

    say(f"the services: {members:,} sequences in {groups:,} groups, of {SHRINK} times fewer tokens")
    config = run()
    store = ObjectStore.open(Store(url=store_url))
    made = await stored(store, groups_of(config, SHRINK))
    named, whole = map(sum, zip(*(_sizes(member) for group in made for member in group), strict=True))
    once = order(made[1:], max(MEMBERS, members // AT_ONCE))
    at_once = await _flow(server, config, directory, made, once, 0)
    for path in (directory / "objects").rglob(f"*.{COLUMN}.0.safetensors"):
        path.unlink()
    rate = len(once) / at_once.seconds
    say(f"  {rate:,.0f} sequences a second; now half as many")
    paced = await _flow(server, run(), directory, made, once, rate / 2)
    gathered = await _gathered(store, config, made)
    return [
        figure("services.rate", rate, "seq/s", 0, gathered, better="higher"),
        figure("services.read", at_once.read / named, "ratio", 1.0, whole / named),
        figure("services.resident", at_once.resident, "B/seq", STATE * (members >= _MANY), whole / members),
        figure("services.last", paced.last_s, "s", 0, paced.seconds),
        figure("services.last.at_once", at_once.last_s, "s", 0, at_once.seconds),
        figure("services.batch", at_once.batch_s, "s", 0, at_once.seconds),
    ]


def _sizes(member: Member) -> tuple[int, int]:
    """Bytes of the columns that its hooks name, and of its objects."""
    headers = {"": member.finished.payload}
    if member.scored is not None and member.scored.scores is not None:
        headers[TEACHER] = member.scored.scores
    return (
        sum(header.column("logprobs").bytes for header in headers.values()),
        sum(header.bytes for header in headers.values()),
    )


async def _flow(
    server: Server,
    config: RunConfig,
    directory: Path,
    groups: Sequence[Group],
    once: Sequence[tuple[float, Member]],
    rate: float,
) -> _Took:
    """`once`: the members of all groups but the first, which is shaped before. `rate`: sequences a second that finish, of the
    middle 80 %; 0: all but the last one at once, and that when the others' groups are shaped."""
    place = directory / config.run
    place.mkdir()
    log = await Log.connect(server.broker, config.run, "bench", CONNECT_S)
    await log.create()
    await log.publish(started(config))
    read = place / "hook.log"
    with ExitStack() as stack:
        given = {"config": config.model_dump(mode="json")}
        pids = {
            name: stack.enter_context(
                child("signals_host.py", given | {"service": name, "log": str(place / f"{name}.log")})
            )["pid"]
            for name in _SERVICES
        }
        await _ready(log)
        async with _watched(log) as seen:
            # What a process does for the first time takes time and memory that no other sequence does.
            await log.publish_all([(m.dispatched, None) for m in groups[0]])
            await log.publish_all([(fact, None) for m in groups[0] for fact in m.facts()])
            await seen.until(1)
            before = resident(pids["sampler"])
            await log.publish_all([(m.dispatched, None) for group in groups[1:] for m in group])
            began = time.monotonic()
            if rate:
                await _publish_by(log, once, rate)
                published = time.monotonic()
                last_s = await seen.until(len(groups)) - published
                seconds, batch_s, held = published - began, 0.0, 0
            else:
                facts = [fact for _, member in once[:-1] for fact in member.facts()]
                await log.publish_all([(fact, None) for fact in facts])
                published = time.monotonic()
                shaped = await seen.until(len(groups) - 1)
                seconds, last_s = shaped - began, shaped - published
                held = resident(pids["sampler"]) - before
                await log.publish_all([(fact, None) for fact in once[-1][1].facts()])
                batch_s = -await seen.until(len(groups)) + await seen.batch()
    await log.close()
    found = _READ.search(read.read_text())
    assert found is not None, f"{read} does not say what the hook service read"
    return _Took(seconds, last_s, batch_s, held / len(once), int(found[1]))


async def _publish_by(log: Log, once: Sequence[tuple[float, Member]], rate: float) -> None:
    """Each when it has finished."""
    first, last = once[len(once) // 10][0], once[9 * len(once) // 10][0]
    unit_s = 0.8 * len(once) / rate / (last - first)
    began, sent = time.monotonic(), 0
    while sent < len(once):
        now = (time.monotonic() - began) / unit_s
        due = sent
        while due < len(once) and once[due][0] <= now and due - sent < _BURST:
            due += 1
        await log.publish_all([(fact, None) for _, member in once[sent:due] for fact in member.facts()])
        if due == sent:
            await asyncio.sleep(_TICK_S)
        sent = due


async def _ready(log: Log) -> None:
    """Until the three services read the log."""
    async with asyncio.timeout(_WITHIN_S):
        while True:
            names = {consumer.name for consumer in await log.js.consumers_info(log.stream)}
            # The sampler's has a name of the broker's making.
            if names >= {"grader", "hook", "hook-graded"} and len(names) > 3:
                return
            await asyncio.sleep(_TICK_S)


class _Seen:
    """When groups were shaped, and the batch was yielded."""

    def __init__(self) -> None:
        self._shaped: list[float] = []
        self._batch = 0.0
        self._changed = asyncio.Event()
        self.failed: BaseException | None = None

    async def shaped(self, log: Log) -> None:
        async for _ in log.subscribe(SampleShaped.type):
            self._shaped.append(time.monotonic())
            self._changed.set()

    async def yielded(self, log: Log) -> None:
        async for _ in log.subscribe(BatchYielded.type):
            self._batch = time.monotonic()
            self._changed.set()

    async def rejected(self, log: Log) -> None:
        async for event in log.subscribe(SampleRejected.type):
            raise SystemExit(f"a group that was to be trained is rejected: {event.fact}")

    async def until(self, groups: int) -> float:
        """When so many were shaped."""
        async with asyncio.timeout(_WITHIN_S):
            while len(self._shaped) < groups:
                self._changed.clear()
                await self._changed.wait()
        return self._shaped[groups - 1]

    async def batch(self) -> float:
        async with asyncio.timeout(_WITHIN_S):
            while not self._batch:
                self._changed.clear()
                await self._changed.wait()
        return self._batch


@asynccontextmanager
async def _watched(log: Log) -> AsyncIterator[_Seen]:
    seen = _Seen()
    watching = [asyncio.create_task(watch(log)) for watch in (seen.shaped, seen.yielded, seen.rejected)]
    try:
        yield seen
    finally:
        await end_tasks(watching)


async def _gathered(store: ObjectStore, config: RunConfig, groups: Sequence[Group]) -> float:
    """Sequences a second of a driver that reads every object whole, and runs the same hooks in its own process; no broker, nothing
    written."""
    some = groups[:: max(1, len(groups) // _GATHERED)]
    began = time.monotonic()
    for group in some:
        await _group(store, config, group)
    return MEMBERS * len(some) / (time.monotonic() - began)


async def _group(store: ObjectStore, config: RunConfig, group: Group) -> None:
    source = config.source(group[0].finished.source)
    rewards = tuple(member.finished.reward for member in group)
    names: dict[str, Any] = {"source": source.name, "sample": group[0].finished.sample}
    sequences = tuple(member.finished.sequence for member in group)
    gathered = Gathered(
        source,
        SampleAccepted(**names, pass_rate=0, mean_reward=0, tokens=0, min_version=0),
        SampleCompleted(**names, sequences=sequences, rewards=rewards, failed=0),
        SampleGraded(**names, grader="none", rewards=rewards),
        tuple(member.finished for member in group),
    )
    columns = await asyncio.gather(*[_columns(store, member) for member in group])
    by_token(chain(source).run(gathered.signal(columns)))


async def _columns(store: ObjectStore, member: Member) -> dict[str, npt.NDArray[Any]]:
    whole = safetensors.numpy.load(await store.get(member.finished.payload.key))
    rows = np.concatenate([np.arange(s.start, s.end) for s in loss_rows(member.finished.contexts)])
    found = {"logprobs": whole["logprobs"][rows]}
    if member.scored is not None and member.scored.scores is not None:
        scores = safetensors.numpy.load(await store.get(member.scored.scores.key))
        found[f"teacher.{TEACHER}.logprobs"] = scores["logprobs"]
    return found
