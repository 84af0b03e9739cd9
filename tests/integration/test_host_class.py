"""The host class over a real broker: who gets a tenant, how a host stops, what a tenant may do to the others, and what it tells."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import load
from pipeline.hosts.health import Health
from pipeline.hosts.host import Host, Place
from pipeline.hosts.metrics import BadBind, Measures, serving
from pipeline.hosts.report import SILENT_S, HostReport, Reporter, reports
from pipeline.hosts.waits import SLOTS
from pipeline.log import Delivery, Log, end_tasks
from pipeline.log import pull as pulls
from pipeline.log import serving as loops
from pipeline.log import work as works
from pipeline.log.pull import GROUP
from pipeline.log.snapshot import Snapshots, bucket_name
from schemas.config import Broker
from services.cli import limit
from services.cli import status as statuses
from services.cli.embedded import LaunchError
from services.cli.status import lines, status_of, view, waits
from tests.integration.test_dead_letters import DEMO
from tests.log_parts import dispatched, until

pytestmark = pytest.mark.timeout(60)
Handler = Callable[[Delivery], Awaitable[None]]


class Tenants:
    """What a host's tenants do: they wait until they are let go, each remembered."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[int] = []
        self.ended: list[int] = []

    async def handle(self, delivery: Delivery) -> None:
        self.begun.append(delivery.event.seq)
        await self.go.wait()
        await delivery.ack()
        self.ended.append(delivery.event.seq)


class Running:
    """A host that serves, on a connection of its own."""

    def __init__(self, host: Host, tenants: Tenants, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        self.host = host
        self.tenants = tenants
        self.stop = stop
        self.hurry = hurry
        self.task: asyncio.Task[None]


@asynccontextmanager
async def serving_host(
    broker: Broker,
    run: str,
    name: str,
    capacity: int,
    handler: Handler | None = None,
    drain_s: float = 0.0,
    measures: Measures | None = None,
) -> AsyncIterator[Running]:
    log = await Log.connect(broker, run, name)
    host = Host(log, Place(name, "harness", "swe"), capacity, measures or Measures(), every_s=0.05)
    running = Running(host, Tenants(), asyncio.Event(), asyncio.Event())
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30)
    serve = host.serve(
        work, handler or running.tenants.handle, running.stop, drain_s=drain_s, hurry=running.hurry
    )
    running.task = asyncio.create_task(serve)
    try:
        yield running
    finally:
        running.stop.set()
        running.hurry.set()
        await end_tasks([running.task])
        await log.close()


async def test_the_emptiest_host_is_given_work_first(broker: Broker, log: Log) -> None:
    """Readers that wait already, the busier one first: only their priorities tell them apart."""
    for number in range(3):
        busy, idle = [await Log.connect(broker, log.run, name) for name in ("busy", "idle")]
        readers = [await each.work("loop", "sequence.dispatched", ack_wait_s=30) for each in (busy, idle)]
        tasks: list[asyncio.Task[list[Delivery]]] = []
        for count, (reader, priority) in enumerate(zip(readers, (7, 2), strict=True), 1):
            tasks.append(asyncio.create_task(reader.fetch(1, 10, priority)))
            async with asyncio.timeout(20):
                while (await log.js.consumer_info(log.stream, "loop")).num_waiting != count:
                    await asyncio.sleep(0.01)
        await log.publish(dispatched(number))
        [delivery] = await tasks[1]
        await delivery.ack()
        assert not tasks[0].done()
        await end_tasks(tasks)
        await busy.close()
        await idle.close()


async def test_a_host_that_comes_late_is_filled_to_where_the_others_are(broker: Broker, log: Log) -> None:
    """The bound: a tenth of the capacity, and one tenant more, that was asked for at the load before, in each of two hosts."""
    capacity, hosts = 40, 4
    async with AsyncExitStack() as stack:
        running: list[Running] = []

        async def begin() -> None:
            name = f"host-{len(running)}"
            running.append(await stack.enter_async_context(serving_host(broker, log.run, name, capacity)))

        def loads() -> list[int]:
            return [each.host.tenants for each in running]

        for _ in range(hosts - 1):
            await begin()
        await log.publish_all([(dispatched(number), None) for number in range(60)])
        await until(lambda: sum(loads()) == 60)
        assert max(loads()) - min(loads()) <= capacity // 10 + 2
        await begin()
        for number in range(60, 120):
            await log.publish(dispatched(number))
            await until(lambda: sum(loads()) > number, poll_s=0.001)  # noqa: B023  # waited for here
        # In turn it would have got 15 of these, and the others 35 each.
        assert max(loads()) - min(loads()) <= capacity // 10 + 2, loads()
        # Full hosts take no more, and nothing is taken twice.
        await log.publish_all([(dispatched(number), None) for number in range(120, 200)])
        await until(lambda: sum(loads()) == hosts * capacity)
        assert loads() == [capacity] * hosts
        begun = Counter(seq for each in running for seq in each.tenants.begun)
        assert set(begun.values()) == {1}


async def test_hosts_with_and_without_priorities_are_served_beside_each_other(
    broker: Broker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host of an older version, or one whose connection is to an older broker."""

    def has_priorities(client: Client) -> bool:
        return not str(client.options["name"]).startswith("old")

    monkeypatch.setattr(works, "has_priorities", has_priorities)
    monkeypatch.setattr(pulls, "has_priorities", has_priorities)
    async with serving_host(broker, log.run, "old", 2) as old:
        await log.publish(dispatched(1))
        await until(lambda: len(old.tenants.begun) == 1)
        # It declares the priorities; the other is refused, takes them away, and both are served in turn.
        async with serving_host(broker, log.run, "new", 2) as new:
            await log.publish_all([(dispatched(number), None) for number in range(2, 5)])
            await until(lambda: old.host.tenants == new.host.tenants == 2)


async def test_a_durable_of_an_older_version_is_given_priorities(log: Log) -> None:
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30)
    answer = await log._client.request(f"$JS.API.CONSUMER.INFO.{log.stream}.loop")
    assert f'"priority_groups":["{GROUP}"]'.encode() in answer.data
    await work.close()


@pytest.mark.parametrize("how", ["ends", "hurry", "too late"])
async def test_told_to_stop_a_host_lets_its_tenants_end_or_hands_them_back(
    broker: Broker, log: Log, how: str
) -> None:
    drain_s = 0.2 if how == "too late" else 30.0
    async with serving_host(broker, log.run, "first", 40, drain_s=drain_s) as first:
        await log.publish_all([(dispatched(number), None) for number in range(2)])
        await until(lambda: first.host.tenants == 2)
        first.stop.set()
        await until(lambda: first.host.state == "draining")
        async with serving_host(broker, log.run, "second", 40) as second:
            await log.publish(dispatched(2))
            # What comes while it drains is another's, which asked later than it.
            await until(lambda: second.tenants.begun == [3])
            if how == "ends":
                assert not first.task.done()
                first.tenants.go.set()
            elif how == "hurry":
                first.hurry.set()
            async with asyncio.timeout(10):
                await first.task
            if how == "ends":
                assert (first.tenants.ended, second.tenants.begun) == ([1, 2], [3])
                async with asyncio.timeout(10):
                    while (await log.js.consumer_info(log.stream, "loop")).num_ack_pending != 1:
                        await asyncio.sleep(0.02)
            else:
                await until(lambda: sorted(second.tenants.begun) == [1, 2, 3])
                assert first.tenants.ended == []
        assert first.host.state == "stopped"


async def test_what_a_service_closes_with_its_last_tenant_does_not_wait_for_the_last_report(
    broker: Broker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a broker that is slow may hold up for seconds, while others come for what was handed back."""
    told: list[str] = []

    async def put(self: Reporter, report: HostReport, within_s: float = 1.0) -> bool:
        told.append(report.state)
        return True

    async def handle(_: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.append("tenant ended")

    monkeypatch.setattr(Reporter, "put", put)
    host = Host(log, Place("host", "agent-loop"), 2, Measures(), every_s=600.0)
    stop, hurry = asyncio.Event(), asyncio.Event()
    work = await log.work("loop", "sequence.dispatched", ack_wait_s=30)
    serve = host.serve(work, handle, stop, drain_s=60, hurry=hurry, over=lambda: told.append("over"))
    serving = asyncio.create_task(serve)
    await log.publish(dispatched(1))
    await until(lambda: host.tenants == 1)
    stop.set()
    await until(lambda: "draining" in told)
    hurry.set()
    await serving
    assert told == ["serving", "draining", "tenant ended", "over", "stopped"]


def deep(n: int) -> int:
    return deep(n + 1) + 1


async def in_a_task_of_its_own() -> None:
    async def leave() -> None:
        sys.exit(5)

    await asyncio.create_task(leave())


ERRORS: dict[str, Callable[[], Awaitable[None]]] = {}


def error(function: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    ERRORS[function.__name__] = function
    return function


@error
async def raises() -> None:
    raise ValueError("no")


@error
async def leaves() -> None:
    sys.exit(3)


@error
async def recurses() -> None:
    deep(0)


@error
async def fills_memory() -> None:
    raise MemoryError


@error
async def interrupts() -> None:
    raise KeyboardInterrupt


@error
async def cancels_itself() -> None:
    raise asyncio.CancelledError


ERRORS["a_task_of_its_own_leaves"] = in_a_task_of_its_own


async def test_whatever_one_tenant_raises_costs_its_own_delivery(
    broker: Broker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_BACKOFF_S", (0.01,))
    innocent = Tenants()
    attempts: Counter[int] = Counter()

    async def handle(delivery: Delivery) -> None:
        number = delivery.event.seq - 1
        if number % 2:
            await innocent.handle(delivery)
            return
        attempts[number] += 1
        if delivery.attempt == 1:
            await list(ERRORS.values())[number // 2]()
        await delivery.ack()

    async with serving_host(broker, log.run, "host", 64, handle) as running:
        await log.publish_all([(dispatched(number), None) for number in range(2 * len(ERRORS))])
        await until(lambda: len(innocent.begun) == len(ERRORS) and sum(attempts.values()) == 2 * len(ERRORS))
        assert set(attempts.values()) == {2}
        innocent.go.set()
        await until(lambda: len(innocent.ended) == len(ERRORS))
        assert not running.task.done()
        async with asyncio.timeout(10):
            while (await log.js.consumer_info(log.stream, "loop")).num_ack_pending:
                await asyncio.sleep(0.02)


async def report_of(log: Log, name: str, wanted: Callable[[HostReport], bool]) -> HostReport:
    async with asyncio.timeout(20):
        while True:
            found = [r for r in (await reports(log))[0] if r.host == name and wanted(r)]
            if found:
                return found[0]
            await asyncio.sleep(0.02)


async def test_hosts_tell_what_they_do_and_status_says_who_is_silent_and_what_binds(
    broker: Broker, log: Log
) -> None:
    at = b'{"host":"h","service":"harness","time":"2026-01-01T00:00:00Z"'
    assert HostReport.model_validate_json(at + b"}").host == "h"
    assert await reports(log) == ([], 0)
    # Snapshots have the bucket too, and neither is in the other's way.
    assert await Snapshots(log, "fold", 1).save(0, {"a": 1}) > 0
    assert await reports(log) == ([], 0)
    config = load(DEMO)
    pool = config.pools[0].model_copy(update={"name": "swe", "hosts": 3})
    config = config.model_copy(update={"run": log.run, "pools": (pool,)})
    async with serving_host(broker, log.run, "harness-swe-0", 2) as running:
        await log.publish_all([(dispatched(number), None) for number in range(5)])
        # Full, with work that waits: for more than a fifth of the window, after a while.
        full = await report_of(
            log, "harness-swe-0", lambda r: r.tenants == 2 and r.window().shares()["slots"] > 0.3
        )
        assert (full.capacity, full.pending, full.oldest, full.state) == (2, 3, "math-000000-0", "serving")
        assert full.rss_bytes > 1 << 20
        assert 0 <= full.lag_p50_s <= full.lag_p99_s
        gone = full.model_copy(
            update={"host": "harness-swe-1", "time": datetime.now(UTC) - timedelta(seconds=SILENT_S + 60)}
        )
        assert await Reporter(log).put(gone)
        bucket = await log.js.key_value(bucket_name(log.run))
        for number, hostile in enumerate(
            (b"{}", at + b',"state":"[/]"}', at + b',"pool":"[/red]"}', at[:-2] + b'"}', at + b',"up_s":NaN}')
        ):
            await bucket.put(f"host.stranger-{number}", hostile)
        found, unreadable = await reports(log)
        # What else this machine has to do, cores and disk, is not what is looked for.
        found = [r.model_copy(update={"waits": {SLOTS: r.waits.get(SLOTS, 0.0)}}) for r in found]
        row = limit.Row("pool", "swe", 16, 0, 1)
        none = limit.Row("source", "math", 0, 0, 0)
        status = status_of(config, found, unreadable, datetime.now(UTC), [row, none])
        silent = {row.host: row.silent_s for row in status.rows if row.silent}
        assert set(silent) == {"agent-loop-0", "harness-swe-1", "harness-swe-2"}
        assert silent["harness-swe-2"] is None
        assert (silent["harness-swe-1"] or 0) > SILENT_S
        assert (status.binding.resource, status.binding.where) == ("slots", "pool swe")
        told = lines(status)
        assert {line["host"]: line["silent"] for line in told[:-1]}["harness-swe-0"] is False
        assert (told[-1]["binding"], told[-1]["unreadable"]) == ("slots", 5)
        assert told[-1]["limits"] == [{"of": "pool", "name": "swe", "concurrency": 16}]
        shown = [str(part) for part in view(status).renderables[1:]]
        assert shown[0].startswith("5 reports cannot be read")
        assert shown[-2] == "limit: pool swe: 16 at once, no limit in the configuration"
        assert shown[-1].startswith("binding: slots (pool swe): ")
        assert "slots" in waits(full.window().shares())
        running.tenants.go.set()
    stopped = await report_of(log, "harness-swe-0", lambda r: r.state == "stopped")
    after = status_of(config, [stopped], 0, datetime.now(UTC) + timedelta(hours=1))
    assert not next(row for row in after.rows if row.host == "harness-swe-0").silent
    assert (await Snapshots(log, "fold", 1).load()) is not None


async def test_a_broker_that_goes_away_is_one_line(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: Log) -> None:
        raise NoRespondersError

    monkeypatch.setattr(statuses, "reports", away)
    with pytest.raises(LaunchError, match=r"does not answer: .*is nats-server running"):
        await statuses.look(load(DEMO), log)


async def test_metrics_are_served_where_the_configuration_says(broker: Broker, log: Log) -> None:
    measures = Measures()
    with pytest.raises(BadBind, match=r"metrics\.bind '203\.0\.113\.1:1'"):
        async with serving("203.0.113.1:1", "harness-swe-0", measures, Health()):
            pass
    measures.trial("swe", {"start": 0.3, "agent": 20.0}, 300 << 20)
    async with (
        serving("127.0.0.1:0", "harness-swe-0", measures, Health()),
        serving_host(broker, log.run, "harness-swe-0", 3, measures=measures) as running,
        aiohttp.ClientSession() as session,
    ):
        await log.publish(dispatched(1))
        await until(lambda: running.host.tenants == 1)
        assert (await report_of(log, "harness-swe-0", lambda r: bool(r.metrics))).metrics == measures.address
        async with session.get(measures.address) as response:
            text = await response.text()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["packtrain_host_tenants", "swe"] == 1
    assert found["packtrain_host_capacity", "swe"] == 3
    assert found["packtrain_loop_lag_seconds", "0.99"] >= 0
    assert found["packtrain_wait_seconds_total", "cpu"] >= 0
    assert found["packtrain_phase_seconds_bucket", "30.0", "agent", "swe"] == 1
    assert found["packtrain_phase_seconds_bucket", "10.0", "agent", "swe"] == 0
    assert found["packtrain_trial_peak_bytes_sum", "swe"] == 300 << 20
    assert found["process_resident_memory_bytes",] > 1 << 20
    assert measures.hosts == []
    assert measures.address == ""
