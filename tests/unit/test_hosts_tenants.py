"""Tenants on one loop: their names, their borders, and the watchdog that names who holds the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Awaitable, Callable

import orjson
import pytest
import uvloop

from pipeline.harnesses.blocking import on_thread
from pipeline.hosts import tenant
from pipeline.hosts.tenant import Tenant, TenantExited
from pipeline.hosts.watchdog import UNKNOWN, Watchdog
from services.process import JsonLines
from tests.log_parts import until

LIMIT_S = 0.1
LOOPS = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
Loop = Callable[[], asyncio.AbstractEventLoop]


def run(loop: Loop, body: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        tenant.install(asyncio.get_running_loop())
        tenant.install(asyncio.get_running_loop())
        await body()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


def hold_the_loop(seconds: float) -> None:
    time.sleep(seconds)


@LOOPS
def test_a_tenant_that_blocks_the_loop_is_named_with_its_stack(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        watchdog = Watchdog(LIMIT_S)
        watchdog.start()

        async def guilty() -> None:
            tenant.enter(Tenant("math-000001-0", "math"))
            # In a task of its own, as agents make them: the name goes with it.
            await asyncio.create_task(inner())

        async def inner() -> None:
            await asyncio.sleep(0)
            hold_the_loop(0.4)

        async def innocent() -> None:
            tenant.enter(Tenant("code-000001-0", "code"))
            await asyncio.sleep(0.05)

        await asyncio.gather(guilty(), innocent())
        await until(lambda: len(caplog.records) == 2)
        hold_the_loop(0.2)  # nobody's
        await until(lambda: len(caplog.records) == 4)
        watchdog.stop()
        assert watchdog.blocks == {"math": 1, UNKNOWN: 1}
        assert watchdog.late_s >= 0.5
        assert watchdog.lag_s(0.0) < 0.05
        assert 0.3 < watchdog.lag_s(1.0) < 5.0

    with caplog.at_level(logging.INFO, "packtrain.host"):
        run(loop, body)
    told = [record.getMessage() for record in caplog.records]
    assert "by math-000001-0, in" in told[0]
    assert "hold_the_loop" in told[0]
    assert "time.sleep(seconds)" in told[0]
    assert caplog.records[0].__dict__["tenant"] == "math-000001-0"
    held = float(told[1].removeprefix("the event loop runs again, math-000001-0 had held it for ").split()[0])
    assert 0.3 < held < 5.0
    assert "by no tenant" in told[2]


@LOOPS
def test_a_block_is_told_while_it_lasts(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        watchdog = Watchdog(LIMIT_S)
        watchdog.start()
        await asyncio.sleep(0)
        deadline = time.monotonic() + 20
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert watchdog.lag_s(1.0) >= LIMIT_S
        watchdog.stop()

    run(loop, body)


async def test_a_long_block_counts_with_all_its_moments() -> None:
    """One second in ten is a tenth of the time, though the loop was late once."""
    watchdog = Watchdog(60.0)
    watchdog.start()
    hold_the_loop(0.6)
    while_held = watchdog.lag_s(0.5)
    await until(lambda: len(watchdog.lags) >= 11)
    watchdog.stop()
    assert while_held > 0.2
    assert sum(lag > 0.04 for lag in watchdog.lags) >= 10
    assert sorted(watchdog.lags)[-1] >= 0.5


@LOOPS
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_a_tenant_that_ends_the_process_ends_its_own_task(loop: Loop, error: BaseException) -> None:
    seen: list[BaseException] = []

    async def body() -> None:
        async def leaves() -> None:
            raise error

        async def guilty() -> None:
            tenant.enter(Tenant("t", "k"))
            try:
                await asyncio.create_task(leaves())
            except TenantExited as found:
                seen.append(found)

        async def innocent() -> int:
            await asyncio.sleep(0.01)
            return 7

        _, other = await asyncio.gather(guilty(), innocent())
        assert other == 7

    run(loop, body)
    assert repr(error) in str(seen[0])


@LOOPS
def test_a_task_that_is_cancelled_before_it_began_leaves_no_warning(
    loop: Loop, recwarn: pytest.WarningsRecorder
) -> None:
    async def body() -> None:
        tenant.enter(Tenant("t", "k"))
        task = asyncio.create_task(asyncio.sleep(1))
        assert "sleep" in repr(task)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run(loop, body)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


async def test_a_cancelled_task_of_a_tenant_is_cancelled() -> None:
    tenant.install(asyncio.get_running_loop())

    async def as_tenant() -> None:
        tenant.enter(Tenant("t", "k"))
        task = asyncio.create_task(asyncio.Event().wait())
        assert tenant.of_task(task) == Tenant("t", "k")
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    await asyncio.create_task(as_tenant())
    assert tenant.current() is None


def test_a_log_line_is_json_also_of_what_is_no_text() -> None:
    record = logging.LogRecord("packtrain.x", logging.ERROR, "x.py", 1, "bad \udc80 name", (), None)
    line = orjson.loads(JsonLines("host", "run").format(record))
    assert (line["message"], line["level"], line["run"]) == ("bad \\udc80 name", "error", "run")


async def test_a_log_line_names_the_tenant_also_on_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("packtrain.test")
    lines: list[dict[str, object]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(orjson.loads(JsonLines("host", "run").format(record)))

    keep = Keep()
    logger.addHandler(keep)
    try:

        async def as_tenant(name: str) -> None:
            tenant.enter(Tenant(name, "k"))
            logger.warning("on the loop")
            await on_thread(logger.warning, "on a thread")
            await asyncio.to_thread(logger.warning, "on another")

        await asyncio.gather(as_tenant("one"), as_tenant("two"))
        logger.warning("nobody")
        logger.warning("of another", extra={"tenant": "three"})
    finally:
        logger.removeHandler(keep)
    told = sorted((str(line.get("tenant")), str(line["message"])) for line in lines)
    messages = ("on a thread", "on another", "on the loop")
    assert told == [("None", "nobody"), *(("one", m) for m in messages), ("three", "of another"), *(("two", m) for m in messages)]  # fmt: skip
