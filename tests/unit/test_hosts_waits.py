"""What hosts wait for: seconds, shares, and which resource binds."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.hosts.metrics import Histogram
from pipeline.hosts.waits import BINDS, OF_HOST, RESOURCES, SLOTS, Recent, Waits, Window, binding


def window(wall_s: float = 10.0, tenant_s: float = 100.0, **seconds: float) -> Window:
    return Window(wall_s, tenant_s, seconds)


def test_a_wait_that_is_not_over_counts_with_what_it_has_taken() -> None:
    waits = Waits()
    waits.add("store", 1.5)
    begun = waits.begin("engine")
    assert waits.totals(begun + 60.0)["engine"] == pytest.approx(60.0)
    assert waits.counts()["engine"] == 0
    waits.end("engine", begun)
    assert waits.totals(begun + 1e6)["engine"] < 60.0
    assert waits.totals()["store"] == 1.5
    assert waits.counts() == {**dict.fromkeys(RESOURCES, 0), "store": 1, "engine": 1}


def test_waits_of_many_threads_are_all_counted() -> None:
    waits = Waits()

    def add() -> None:
        for _ in range(2000):
            waits.add("threads", 1.0)
            with waits.waiting("broker"):
                pass

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waits.totals()["threads"] == 8000.0
    assert waits.counts()["broker"] == 8000
    assert 0 <= waits.totals(time.monotonic() + 1e9)["broker"] < 1e6


def test_tenants_waits_are_shares_of_their_lives_and_the_hosts_of_the_time() -> None:
    shares = window(engine=50.0, slots=5.0, cpu=1.0).shares()
    assert (shares["engine"], shares["slots"], shares["cpu"]) == (0.5, 0.5, 0.1)
    assert set(Window(0.0, 0.0, {}).shares().values()) == {0.0}


def test_what_two_hosts_waited_is_added() -> None:
    both = window(10, 100, engine=10) + window(10, 300, engine=190, slots=10)
    assert both.shares()["engine"] == 0.5
    assert both.shares()["slots"] == 0.5


@pytest.mark.parametrize(
    ("windows", "resource", "where"),
    [
        ({"agent-loop": window(engine=60, slots=10)}, "engine", "agent-loop"),
        ({"agent-loop": window(engine=10), "pool swe": window(slots=9)}, "slots", "pool swe"),
        ({"agent-loop": window(engine=30), "pool swe": window(sandbox=40, slots=10)}, "sandbox", "pool swe"),
        ({"agent-loop": window(store=19, broker=5)}, "", "agent-loop"),
        ({"pool swe": window(cpu=5, threads=20)}, "cpu", "pool swe"),
        ({}, "", ""),
    ],
    ids=["full for it", "full for nothing else", "the larger", "below the limit", "the loop", "no hosts"],
)
def test_what_binds(windows: dict[str, Window], resource: str, where: str) -> None:
    found = binding(windows)
    assert (found.resource, found.where) == (resource, where)
    named = f"{resource} ({where}): " if resource else "nothing: " if where else "not known: "
    assert found.why().startswith(named)


_seconds = st.floats(0, 1e6)


@given(st.dictionaries(st.sampled_from(RESOURCES), _seconds), st.floats(1, 1e6), st.floats(1, 1e6))
def test_nothing_that_is_waited_for_less_binds(seconds: dict[str, float], wall: float, tenant: float) -> None:
    shares = Window(wall, tenant, seconds).shares()
    found = binding({"x": Window(wall, tenant, seconds)})
    others = {r: share for r, share in shares.items() if r != SLOTS}
    if found.resource == "":
        assert max(shares.values()) < BINDS
    elif found.resource == SLOTS:
        assert max(others.values()) < BINDS <= shares[SLOTS]
    else:
        assert shares[found.resource] == max(others.values()) >= BINDS
    assert shares == {r: seconds.get(r, 0.0) / (wall if r in OF_HOST else tenant) for r in RESOURCES}


def test_a_window_is_of_the_last_seconds_only() -> None:
    recent = Recent(length_s=30.0)
    assert recent.mark(0.0, 0.0, {"engine": 0.0}) == Window(0.0, 0.0, {"engine": 0.0})
    for second in range(2, 202, 2):
        found = recent.mark(second, 4.0 * second, {"engine": min(second, 100)})
    assert (found.wall_s, found.tenant_s, found.seconds["engine"]) == (30.0, 120.0, 0.0)


def test_a_histogram_counts_what_is_not_over_each_bound() -> None:
    histogram = Histogram((1.0, 10.0))
    assert histogram.buckets() == [("1.0", 0), ("10.0", 0), ("+Inf", 0)]
    for value in (0.5, 1.0, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("10.0", 3), ("+Inf", 4)]
    assert histogram.sum == 102.5
