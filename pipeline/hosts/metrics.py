"""What a process measures, and whether it serves: `/metrics` for Prometheus, `/livez` and `/readyz`, where `metrics.bind` says.

Promises:
- `/livez` is answered while the event loop turns: a loop that is blocked answers nothing, and whoever asks gives up;
- `/readyz` is 200 with `ok`, or 503 with the one reason that `Health.fault` has;
- names and labels are few: pools, sources and resources, never tenants;
- a scrape reads numbers that are there, it takes no lock that a tenant waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.hosts.health import Health
from pipeline.hosts.histogram import Histogram
from pipeline.hosts.report import HostReport
from pipeline.hosts.requests import Requests
from pipeline.hosts.waits import Waits

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_SHUTDOWN_S = 1.0
BUCKETS_BYTES = tuple(float(1 << n) for n in range(24, 38, 2))


class BadBind(OSError):
    """`metrics.bind` is no address that can be listened on."""


@dataclass
class Measures:
    """Of one process. `hosts` gives the state of each host in it; `address` is where `/metrics` is, empty for nowhere."""

    waits: Waits = field(default_factory=Waits)
    requests: Requests = field(default_factory=Requests)
    hosts: list[Callable[[], HostReport]] = field(default_factory=list[Callable[[], HostReport]])
    phases: dict[tuple[str, str], Histogram] = field(default_factory=dict[tuple[str, str], Histogram])
    peaks: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    grading: dict[tuple[str, str], Histogram] = field(default_factory=dict[tuple[str, str], Histogram])
    grading_cost: dict[str, float] = field(default_factory=dict[str, float])
    removed: Counter[str] = field(default_factory=Counter[str])
    """Objects that the collector removed, by reason."""
    collectors: list[Callable[[], Iterable[Metric]]] = field(
        default_factory=list[Callable[[], "Iterable[Metric]"]]
    )
    """What else a service tells at a scrape: families of its own."""
    address: str = ""

    def trial(self, pool: str, took: Mapping[str, float], peak_bytes: int) -> None:
        """A trial has ended: seconds of its phases, and the most memory that its sandbox used (0: not known)."""
        for phase, seconds in took.items():
            self.phases.setdefault((pool, phase), Histogram(BUCKETS_S)).observe(seconds)
        if peak_bytes:
            self.peaks.setdefault(pool, Histogram(BUCKETS_BYTES)).observe(peak_bytes)

    def graded(self, source: str, outcome: str, seconds: float, cost: float) -> None:
        """A group's tries are over: `outcome` is answer, late or failed; what they took, and cost in the unit of the prices."""
        self.grading.setdefault((source, outcome), Histogram(BUCKETS_S)).observe(seconds)
        self.grading_cost[source] = self.grading_cost.get(source, 0.0) + cost


class MeasuredPool(ThreadPoolExecutor):
    """A loop's default executor, whose queue is measured as `threads`."""

    def __init__(self, waits: Waits, limit: int | None = None) -> None:
        super().__init__(limit, thread_name_prefix="blocking")
        self._waits = waits

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        begun = self._waits.begin("threads")

        def run() -> Any:
            self._waits.end("threads", begun)
            return fn(*args, **kwargs)

        def settle(future: Future[Any]) -> None:
            if future.cancelled():  # before its turn: it never runs
                self._waits.end("threads", begun)

        future: Future[Any] = super().submit(run)
        future.add_done_callback(settle)
        return future


class _Collector:
    def __init__(self, service: str, measures: Measures) -> None:
        self._service = service
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        seconds, counts = self._measures.waits.totals(), self._measures.waits.counts()
        waited = CounterMetricFamily(
            "packtrain_wait_seconds", "Seconds waited, by resource", labels=["resource"]
        )
        number = CounterMetricFamily(
            "packtrain_waits", "Waits that are over, by resource", labels=["resource"]
        )
        for resource in seconds:
            waited.add_metric([resource], seconds[resource])
            number.add_metric([resource], counts[resource])
        yield waited
        yield number
        states = [state() for state in self._measures.hosts]
        gauges: dict[str, tuple[str, Callable[[HostReport], float]]] = {
            "tenants": ("Tenants in the host", lambda s: s.tenants),
            "capacity": ("Tenants that it can hold", lambda s: s.capacity),
            "pending": ("Work that waits for any host of the pool", lambda s: s.pending),
            "oldest_tenant_seconds": ("Age of the oldest tenant", lambda s: s.oldest_s),
            "busy_threads": ("Blocking calls under way", lambda s: s.busy_threads),
        }
        for name, (what, read) in gauges.items():
            gauge = GaugeMetricFamily(f"packtrain_host_{name}", what, labels=["pool"])
            for state in states:
                gauge.add_metric([state.pool or state.service], read(state))
            yield gauge
        lag = GaugeMetricFamily(
            "packtrain_loop_lag_seconds", "Lateness of the event loop, last minute", labels=["quantile"]
        )
        blocked = CounterMetricFamily(
            "packtrain_loop_blocked", "Blocks of the loop, by source", labels=["source"]
        )
        ended = CounterMetricFamily(
            "packtrain_host_tenants_ended", "Tenants that have ended", labels=["pool"]
        )
        for state in states:
            lag.add_metric(["0.5"], state.lag_p50_s)
            lag.add_metric(["0.99"], state.lag_p99_s)
            ended.add_metric([state.pool or state.service], state.done)
            for kind, count in state.blocks.items():
                blocked.add_metric([kind], count)
        yield from (lag, blocked, ended)
        phases = HistogramMetricFamily(
            "packtrain_phase_seconds", "Phases of trials", labels=["pool", "phase"]
        )
        for (pool, phase), found in self._measures.phases.items():
            phases.add_metric([pool, phase], found.buckets(), found.sum)
        peaks = HistogramMetricFamily(
            "packtrain_trial_peak_bytes", "Most memory of a trial's sandbox", labels=["pool"]
        )
        for pool, found in self._measures.peaks.items():
            peaks.add_metric([pool], found.buckets(), found.sum)
        yield from (phases, peaks)
        grading = HistogramMetricFamily(
            "packtrain_grading_seconds",
            "From a group's first try to its answer",
            labels=["source", "outcome"],
        )
        for (source, outcome), found in self._measures.grading.items():
            grading.add_metric([source, outcome], found.buckets(), found.sum)
        cost = CounterMetricFamily("packtrain_grading_cost", "What graders' tries cost", labels=["source"])
        for source, spent in self._measures.grading_cost.items():
            cost.add_metric([source], spent)
        yield from (grading, cost)
        removed = CounterMetricFamily(
            "packtrain_objects_removed", "Objects that retention removed, by reason", labels=["reason"]
        )
        for reason, count in self._measures.removed.items():
            removed.add_metric([reason], count)
        yield removed
        yield from self._requests()
        for collect in self._measures.collectors:
            yield from collect()

    def _requests(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        found = self._measures.requests
        seconds = HistogramMetricFamily(
            "packtrain_store_seconds",
            "Operations on the object store, with their tries",
            labels=["operation"],
        )
        for operation, took in found.seconds.items():
            seconds.add_metric([operation], took.buckets(), took.sum)
        moved = CounterMetricFamily(
            "packtrain_store_bytes", "Bytes of objects that were moved", labels=["operation"]
        )
        for operation, number in found.bytes.items():
            moved.add_metric([operation], number)
        retries = CounterMetricFamily(
            "packtrain_store_retries", "Tries after the first", labels=["operation"]
        )
        for operation, number in found.retries.items():
            retries.add_metric([operation], number)
        errors = CounterMetricFamily(
            "packtrain_store_errors", "Operations that gave an error", labels=["operation", "error"]
        )
        for (operation, error), number in found.errors.items():
            errors.add_metric([operation, error], number)
        yield from (seconds, moved, retries, errors)


@asynccontextmanager
async def serving(bind: str, service: str, measures: Measures, health: Health) -> AsyncGenerator[None]:
    """Serves `/metrics`, `/livez` and `/readyz` at `host:port` meanwhile, and says in `measures.address` where the first is;
    nothing for an empty one.

    Raises BadBind.
    """
    if not bind:
        yield
        return
    # Late: a twentieth of a second, for processes that are asked for no metrics.
    from aiohttp import web
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    registry = CollectorRegistry(target_info={"service": service})
    registry.register(_Collector(service, measures))  # pyright: ignore[reportArgumentType]  # has `collect`, all that is asked of one
    ProcessCollector(registry=registry)

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        fault = health.fault()
        return web.Response(text=f"{fault or 'ok'}\n", status=503 if fault else 200)

    application = web.Application()
    application.router.add_get("/metrics", scrape)
    application.router.add_get("/livez", live)
    application.router.add_get("/readyz", ready)
    # Who asks slowly does not hold up a process that ends.
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    host, _, port = bind.rpartition(":")
    try:
        try:
            site = web.TCPSite(runner, host.strip("[]"), int(port))
            await site.start()
        except (OSError, ValueError, OverflowError) as error:
            raise BadBind(
                f"metrics.bind {bind!r}: {error}; use host:port of this machine, port 0 for a free one"
            ) from error
        address = runner.addresses[0]
        measures.address = f"http://{host}:{address[1]}/metrics"
        yield
    finally:
        measures.address = ""
        await runner.cleanup()
