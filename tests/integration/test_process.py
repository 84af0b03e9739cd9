"""The process around a service: what it waits for, what it says of itself, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest

from pipeline.log import BrokerUnavailable, Delivery, Log, serve_work
from schemas.config import Broker, Metrics, RunConfig
from schemas.facts import RunStopped, SequenceDispatched
from services.process import Context, log_to_stderr, run_service
from tests.log_parts import dispatched, until
from tests.natsserver import NatsServer, free_port

pytestmark = pytest.mark.timeout(60)
Ask = Callable[[str], Awaitable[tuple[int, str]]]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A service has the process's log to itself."""
    root, before = logging.getLogger(), logging.getLogger().handlers
    yield
    root.handlers = before


def configured(tmp_path: Path, run: str, broker: Broker, bind: str = "") -> RunConfig:
    environment = {"kind": "arithmetic"}
    return RunConfig.model_validate(
        {
            "run": run,
            "directory": str(tmp_path),
            "broker": broker.model_dump(),
            "store": {"url": f"file://{tmp_path}/objects"},
            "metrics": Metrics(bind=bind).model_dump(),
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [{"name": "s", "pool": "p", "groups": 1, "environment": environment}],
        }
    )


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[tuple[Ask, Ask]]:
    """`get`, and `ready`, which waits for `/readyz` to say that."""
    async with aiohttp.ClientSession() as session:

        async def get(path: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, (await answer.text()).strip()

        async def ready(said: str) -> tuple[int, str]:
            found = (0, "no answer")
            try:
                async with asyncio.timeout(20):
                    while not found[1].startswith(said):
                        try:
                            found = await get("/readyz")
                        except aiohttp.ClientError:
                            found = (0, "no answer")
                        await asyncio.sleep(0.02)
            except TimeoutError:
                pytest.fail(f"/readyz never said {said!r}; last {found}")
            return found

        yield get, ready


def lines(told: str) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in told.splitlines()]


async def test_a_service_waits_for_its_broker_and_its_run(
    tmp_path: Path, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server, port, stop = NatsServer(tmp_path / "server"), free_port(), asyncio.Event()
    config = configured(tmp_path, run_name, server.broker, f"127.0.0.1:{port}")
    working, may_end = asyncio.Event(), asyncio.Event()

    async def serve(ctx: Context) -> None:
        await working.wait()
        ctx.health.ready()
        await ctx.stop.wait()
        await may_end.wait()

    running = asyncio.create_task(run_service(serve, config, "sampler", stop=stop))
    try:
        async with asking(port) as (get, ready):
            assert await ready("waiting for broker") == (503, f"waiting for broker {server.broker.url}")
            assert await get("/livez") == (200, "ok")
            server.start()
            begin = f"waiting for run {run_name} to begin: packtrain runs begin"
            assert await ready("waiting for run") == (503, begin)
            log = await Log.connect(server.broker, run_name, "test")
            await log.create()
            await log.close()
            assert await ready("starting") == (503, "starting")
            working.set()
            assert await ready("ok") == (200, "ok")
            server.kill()
            away = (503, f"no connection to broker {server.broker.url}")
            assert await ready("no connection") == away
            assert await get("/livez") == (200, "ok")
            server.start()
            assert await ready("ok") == (200, "ok")
            stop.set()
            assert await ready("stopping") == (503, "stopping")
            may_end.set()
            await running
    finally:
        running.cancel()
        server.stop()
    said = lines(capsys.readouterr().err)
    assert [line["message"] for line in said].count(begin) == 1
    assert {(line["service"], line["run"]) for line in said} == {("sampler", run_name)}


async def test_a_run_that_is_over_is_not_served(
    tmp_path: Path, log: Log, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    await log.publish(RunStopped(run=log.run, reason="completed", steps=1))
    served: list[str] = []

    async def serve(ctx: Context) -> None:
        served.append(ctx.name)

    await asyncio.wait_for(run_service(serve, configured(tmp_path, log.run, broker), "sampler"), 20)
    assert served == []
    assert f"run {log.run} is over: there is nothing to do" in capsys.readouterr().err


async def test_told_to_stop_while_the_run_has_not_begun_it_ends_at_once(
    tmp_path: Path, run_name: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, told = asyncio.Event(), ""

    async def serve(_: Context) -> None:
        raise AssertionError("there is no run")

    def waits() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "to begin" in told

    config = configured(tmp_path, run_name, broker)
    running = asyncio.create_task(run_service(serve, config, "sampler", stop=stop))
    await until(waits)
    stop.set()
    await asyncio.wait_for(running, 5)


async def test_a_broker_that_refuses_is_not_waited_for(tmp_path: Path, run_name: str, broker: Broker) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("no token")
    refused = broker.model_copy(update={"token_file": str(wrong)})

    async def serve(_: Context) -> None:
        raise AssertionError("it is not connected")

    config = configured(tmp_path, run_name, refused)
    with pytest.raises(BrokerUnavailable, match="refused"):
        await asyncio.wait_for(run_service(serve, config, "sampler"), 20)


async def test_what_a_handler_logs_has_the_ids_of_its_fact(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = log_to_stderr("grader", log.run)
    work = await log.work("w", SequenceDispatched.type, ack_wait_s=5.0)
    for number in range(2):
        await log.publish(dispatched(number))
    stop, both = asyncio.Event(), asyncio.Barrier(2)
    tries = 0

    async def in_a_task(sample: str) -> None:
        logger.info("in a task of %s", sample)

    async def handle(delivery: Delivery) -> None:
        nonlocal tries
        tries += 1
        fact = delivery.event.fact
        assert isinstance(fact, SequenceDispatched)
        if delivery.attempt == 1:
            await both.wait()
            await asyncio.create_task(in_a_task(fact.sample))
            await asyncio.to_thread(logging.getLogger("aiohttp").warning, "on a thread of %s", fact.sample)
            logger.info("of step 3 of %s", fact.sample, extra={"step": 3})
            if fact.sample.endswith("1"):
                raise RuntimeError("a fault")
        await delivery.ack()
        if tries == 3:
            stop.set()

    await asyncio.wait_for(serve_work(work, 2, handle, stop), 30)
    logger.info("outside")
    said = lines(capsys.readouterr().err)
    of = {n: {"sample": f"math-00000{n}", "sequence": f"math-00000{n}-0"} for n in range(2)}
    ids = {
        str(line["message"]): {k: line[k] for k in ("sample", "sequence", "step") if k in line}
        for line in said
    }
    for n in range(2):
        assert ids[f"in a task of math-00000{n}"] == of[n]
        assert ids[f"on a thread of math-00000{n}"] == of[n]
        assert ids[f"of step 3 of math-00000{n}"] == {**of[n], "step": 3}
    assert ids["outside"] == {}
    failed = next(line for line in said if line["level"] == "error")
    assert {k: failed[k] for k in ("sample", "sequence")} == of[1]
    assert "RuntimeError: a fault" in str(failed["error"])
