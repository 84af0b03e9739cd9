"""How a whole run folds, what its state takes, and how fast a start from a snapshot is."""

from __future__ import annotations

import gc
import secrets
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import orjson
from log_rates import BARE_READERS
from log_server import Figure, Server, aclosing, figure, rates, say
from log_world import Writer
from nats.aio.client import Client

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Core
from pipeline.log import Log
from pipeline.log.snapshot import Snapshots
from schemas.envelope import Event

_TAIL = 100
_STARTS = 9
_STATE = 4096
"""Goal: bytes of state for a sequence in flight."""
_FLAT = 1.2
"""Goal: state at the end of a run over that at a tenth of it."""
_EQUAL = 1.5
"""Goal: a start at the end of a long run over one at that of a short run."""
_SERVICES = ("sampler", "dispatcher")


async def fold(log: Log, cores: Sequence[Core], after: int, until: int, decide: bool = False) -> float:
    """Folds the log's events after `after` up to `until`; seconds it took. `decide`: as a service does, after each."""
    began, told = time.perf_counter(), time.monotonic()
    async with aclosing(log.read(first=after + 1)) as events:
        async for event in events:
            assert isinstance(event, Event), event
            for core in cores:
                core.fold(event)
                if decide:
                    core.decide(event)
            if event.seq == until:
                break
            if event.seq % 1024 == 0 and time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"  {event.seq:,} events folded")
    return time.perf_counter() - began


def bytes_of(core: SamplerCore) -> tuple[int, int]:
    """(bytes of the state as JSON, sequences in flight)."""
    state = core.dump()
    return len(orjson.dumps(state)), sum(len(group["members"]) for group in state["groups"])


def resident() -> int:
    """Bytes of memory that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def traced(log: Log, until: int) -> tuple[int, SamplerCore]:
    """Bytes that a sampler's fold up to an event has allocated and still holds."""
    # Once before, so that what is made only once is not counted.
    await fold(log, [SamplerCore(log.run)], 0, until)
    gc.collect()
    tracemalloc.start()
    core = SamplerCore(log.run)
    await fold(log, [core], 0, until)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held, core


async def save(log: Log, cores: Sequence[Core], seq: int) -> None:
    for name, core in zip(_SERVICES, cores, strict=True):
        size = await Snapshots(log, name, core.STATE_VERSION).save(seq, {"core": core.dump()})
        assert size, f"snapshot of {name} at {seq} was not kept"
        say(f"  snapshot of {name} at {seq:,}: {size:,} bytes")


async def start(log: Log, until: int) -> float:
    """Seconds from nothing to both services' state at the log's head, as `pipeline.log.shell` does it; the connection is
    there already."""
    began = time.perf_counter()
    for name, core in zip(_SERVICES, fresh(log), strict=True):
        snapshot = await Snapshots(log, name, core.STATE_VERSION).load()
        assert snapshot is not None
        core.load(snapshot.state["core"])
        assert (await log.info()).state.first_seq == 1
        assert await log.head() == until
        await fold(log, [core], snapshot.seq, until, decide=True)
    return time.perf_counter() - began


def fresh(log: Log) -> tuple[SamplerCore, MixerCore]:
    return SamplerCore(log.run), MixerCore(log.run)


async def whole_run(server: Server, count: int, early: int, groups: int) -> list[Figure]:
    """Figures of a run of `count` events, and of one of `early`; 2 sources of `groups` groups of 8 a batch."""
    short, long = [await Log.connect(server.broker, f"b{secrets.token_hex(6)}", "bench") for _ in range(2)]
    client = await server.bare()
    try:
        say(f"a run of {early:,} events")
        await short.create()
        writer = Writer(short, groups)
        end = await writer.write(early, whole_steps=True)
        figures = await _state(short, writer, end)
        cores = fresh(short)
        await fold(short, cores, 0, end)
        short_head = await _snapshot(short, writer, cores, end)
        say(f"a run of {count:,} events")
        await long.create()
        writer = Writer(long, groups)
        more, cores, refold = await _long(long, client, writer, count)
        long_head = await _snapshot(long, writer, cores, writer.seq)
        short_rate, long_rate = await rates(
            _STARTS,
            1,
            [lambda: start(short, short_head), lambda: start(long, long_head)],
            "starts, short and long",
        )
        return [
            *figures,
            *more,
            figure(
                "start.snapshot",
                1e3 / long_rate,
                "ms",
                _EQUAL * 1e3 / short_rate,
                1e3 / short_rate,
                better="lower",
            ),
            figure("start.refold", 1e3 / long_rate, "ms", refold * 1e3, refold * 1e3, better="lower"),
        ]
    finally:
        for each in (client, short, long):
            await each.close()


async def _state(log: Log, writer: Writer, end: int) -> list[Figure]:
    """What deciding costs beside folding, and what a sequence in flight takes where most are finished."""
    alone = await fold(log, fresh(log), 0, end)
    deciding = await fold(log, fresh(log), 0, end, decide=True)
    held, core = await traced(log, writer.full)
    size, sequences = bytes_of(core)
    say(f"  {sequences:,} sequences in flight: {held:,} bytes of memory, {size:,} of JSON")
    return [
        figure("fold.deciding", end / deciding, "events/s", 0, end / alone),
        *(
            figure(f"state.{what}", each / sequences, "bytes", _STATE, writer.finished_bytes, better="lower")
            for what, each in (("memory", held), ("json", size))
        ),
    ]


async def _long(
    log: Log, client: Client, writer: Writer, count: int
) -> tuple[list[Figure], tuple[SamplerCore, MixerCore], float]:
    """Figures, the cores at the end, and the seconds of their fold from nothing."""
    began = time.perf_counter()
    end = await writer.write(count, whole_steps=True)
    written = end / (time.perf_counter() - began)
    tenth = next(at for at in writer.ends if at >= end / 10)
    cores = fresh(log)
    taken = await fold(log, cores, 0, tenth)
    before, before_resident = bytes_of(cores[0])[0], resident() / 1e6
    taken += await fold(log, cores, tenth, end)
    after, after_resident = bytes_of(cores[0])[0], resident() / 1e6
    say(f"  written at {written:,.0f}/s, folded in {taken:.1f} s; {len(writer.ends):,} batches forgotten")
    sample = min(end, 20_000)
    bare = sample / min(
        [await read_bare(client.jetstream(), log.stream, sample) for read_bare in BARE_READERS]
    )
    figures = [
        figure("fold.events", end / taken, "events/s", 0, bare),
        figure("fold.seconds", taken, "s", 0, end / bare, better="lower"),
        figure("write.events", written, "events/s", 0, bare),
        figure("state.growth", after, "bytes", _FLAT * before, before, better="lower"),
        figure(
            "state.resident", after_resident, "MB", _FLAT * before_resident, before_resident, better="lower"
        ),
    ]
    return figures, cores, taken


async def _snapshot(log: Log, writer: Writer, cores: Sequence[Core], end: int) -> int:
    """Keeps a snapshot at the end and writes a tail of 100 events after it; the log's head."""
    await save(log, cores, end)
    return await writer.write(end + _TAIL)
