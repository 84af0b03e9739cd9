"""Threads of a host for calls that block: how many, who waits, and what a call that never returns costs."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from pipeline.harnesses.blocking import THREADS, Threads, on_thread
from pipeline.hosts.waits import Waits
from tests.log_parts import until


@pytest.fixture
def waits() -> Waits:
    return Waits()


def limited(limit: int, waits: Waits, tell_s: float = 60.0) -> Threads:
    threads = Threads(limit, waits, tell_s)
    THREADS.set(threads)
    return threads


async def test_no_more_calls_at_once_than_the_limit_and_all_in_the_end(waits: Waits) -> None:
    threads = limited(3, waits)
    lock, now, most = threading.Lock(), 0, 0
    go = threading.Event()

    def call(number: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        assert go.wait(20)
        with lock:
            now -= 1
        return number

    calls = [asyncio.create_task(on_thread(call, n)) for n in range(20)]
    await until(lambda: now == 3)
    assert threads.busy == 3
    assert waits.totals()["threads"] > 0
    go.set()
    assert await asyncio.gather(*calls) == list(range(20))
    await until(lambda: threads.busy == 0)
    assert most == 3
    assert waits.counts()["threads"] == 17


async def test_threads_are_kept_and_end_with_their_host(waits: Waits) -> None:
    """To start one holds up the loop where others compute."""
    threads = limited(4, waits)
    used = {await on_thread(threading.get_ident) for _ in range(10)}
    assert len(used) == 1
    threads.close()
    await until(lambda: not used & {thread.ident for thread in threading.enumerate()})


async def test_a_call_that_never_returns_costs_one_thread(waits: Waits) -> None:
    threads = limited(2, waits)
    never = threading.Event()
    stuck = asyncio.create_task(on_thread(never.wait))
    await until(lambda: threads.busy == 1)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert [await on_thread(max, n, 1) for n in range(5)] == [1, 1, 2, 3, 4]
    assert threads.busy == 1
    never.set()
    await until(lambda: threads.busy == 0)


async def test_who_is_cancelled_while_he_waits_takes_no_thread(waits: Waits) -> None:
    threads = limited(1, waits)
    go = threading.Event()
    first = asyncio.create_task(on_thread(go.wait))
    await until(lambda: threads.busy == 1)
    waiting = [asyncio.create_task(on_thread(max, n, 0)) for n in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    go.set()
    # Its turn has come in this very step, and it is cancelled in it.
    await first
    waiting[1].cancel()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found[2:] == [2, 3]
    await until(lambda: threads.busy == 0)
    assert await on_thread(max, 8, 9) == 9


async def test_while_nobody_gets_a_thread_the_oldest_call_is_told(
    waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    limited(1, waits, tell_s=0.05)
    go = threading.Event()

    def verify_for_ever() -> None:
        go.wait(20)

    first = asyncio.create_task(on_thread(verify_for_ever))
    second = asyncio.create_task(on_thread(max, 1, 2))
    with caplog.at_level(logging.WARNING, "packtrain.host"):
        await until(lambda: bool(caplog.records))
    go.set()
    await first
    assert await second == 2
    assert "all 1 threads" in caplog.text
    assert "verify_for_ever" in caplog.text


async def test_who_waits_longest_is_not_disturbed_by_a_turn_that_has_not_begun(waits: Waits) -> None:
    """The moment between a call's end and its successor's begin: all threads are taken, and no call is under way."""
    threads = limited(1, waits, tell_s=0.0)
    await threads._free.acquire()
    second = asyncio.create_task(on_thread(max, 1, 2))
    await asyncio.sleep(0.01)
    threads._free.release()
    assert await second == 2


async def test_what_a_call_raises_is_raised(waits: Waits) -> None:
    limited(1, waits)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await on_thread(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await on_thread(next, iter(()))
