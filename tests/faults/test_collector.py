"""The collector while a run goes on: the store goes away, the collector is ended and starts again, the place is not its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.log import Log, end_tasks
from pipeline.retention.core import RetentionCore
from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from schemas.config import Retention, RunConfig
from schemas.config import Store as StoreConfig
from schemas.envelope import Event
from schemas.facts import StepTrained
from schemas.keys import claim_key
from services import collector
from services.imported import BORROWED
from services.process import Context
from tests.log_parts import until
from tests.natsserver import NatsServer
from tests.retention_parts import Stored
from tests.s3server import S3Server
from tests.unit.signal_world import signal_config

POLICY = Retention(rejected_steps=1, consumed_steps=1, checkpoint_steps=1)


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "s3")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    """Of a broker of its own: the run's name is always r."""
    server = NatsServer(tmp_path / "nats", sync="2m")
    server.start()
    log = await Log.connect(server.broker, "r", "test")
    await log.create()
    yield log
    await log.close()
    server.stop()


@asynccontextmanager
async def collecting(config: RunConfig, log: Log, store: ObjectStore) -> AsyncIterator[Context]:
    """The service, in this process."""
    ctx = Context(config, "collector", log, store, asyncio.Event(), logging.getLogger("packtrain"))
    serving = asyncio.create_task(collector.serve(ctx))
    try:
        yield ctx
        assert not serving.done()
        ctx.stop.set()
        async with asyncio.timeout(20):
            await serving
    finally:
        await end_tasks([serving])


def expected(events: list[Event]) -> set[str]:
    """What goes while these are followed."""
    core, gone = RetentionCore("r"), set[str]()
    for found in events:
        core.fold(found)
        if isinstance(found.fact, StepTrained):
            gone |= core.take(POLICY).keys()
    return gone


async def keys(store: ObjectStore) -> set[str]:
    return {key async for key, _ in store.list("runs/r")}


async def removed(store: ObjectStore, doomed: set[str], deadline_s: float = 60.0) -> set[str]:
    """What is there when all of `doomed` is gone."""
    async with asyncio.timeout(deadline_s):
        while (found := await keys(store)) & doomed:
            await asyncio.sleep(0.05)
    return found


async def test_it_waits_for_the_store_and_goes_on_after_its_end_and_removes_nothing_else(
    s3: S3Server, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collector, "SNAPSHOT_EVERY", 1)
    monkeypatch.setattr(collector, "_SNAPSHOT_COST", 0)
    caplog.set_level(logging.INFO, logger="packtrain")
    world = Stored(signal_config(steps=4), 11)
    world.run()
    trained = [at for at, found in enumerate(world.log, 1) if isinstance(found.fact, StepTrained)]
    store_config = StoreConfig(
        url="s3://retained/some/prefix", endpoint=s3.endpoint, credentials_file=str(s3.credentials_file)
    )
    ensure_bucket(store_config)
    config = world.config.model_copy(update={"store": store_config, "retention": POLICY})
    store = ObjectStore.open(store_config, patience_s=0.3)

    async def publish(first: int, end: int) -> list[Any]:
        return await log.publish_all([(found.fact, None) for found in world.log[first:end]])

    early = await publish(0, trained[1])
    await asyncio.gather(*(store.create(key, b"1") for key in world.written))
    before = await keys(store)
    async with collecting(config, log, store):
        # The place names no log: it may be anybody's.
        await until(lambda: "does not name this log" in caplog.text)
    assert await keys(store) == before
    await store.create(claim_key("r"), orjson.dumps({"log": early[0].event.id}))
    imported = config.model_copy(update={"directory": str(tmp_path)})
    borrowed = tmp_path / "runs" / "r" / BORROWED
    borrowed.parent.mkdir(parents=True)
    borrowed.touch()
    async with collecting(imported, log, store):
        await until(lambda: "before this import" in caplog.text)
    assert await keys(store) - {claim_key("r")} == before
    async with collecting(config, log, store) as ctx:
        doomed = expected(world.log[: trained[1]]) & before
        assert doomed
        assert await removed(store, doomed) - {claim_key("r")} == before - doomed
        await until(lambda: sum(ctx.measures.removed.values()) >= len(doomed))
        s3.stop()
        await publish(trained[1], trained[2])
        await until(lambda: "waiting for the store" in caplog.text)
        s3.start()
        more = expected(world.log[: trained[2]]) & before
        assert more > doomed
        assert await removed(store, more) - {claim_key("r")} == before - more
    # Ended, it goes on from its snapshot.
    monkeypatch.setattr(RetentionCore, "read", _counted(read := []))
    await publish(trained[2], trained[3])
    async with collecting(config, log, store):
        rest = expected(world.log[: trained[3]]) & before
        assert rest > more
        assert await removed(store, rest) - {claim_key("r")} == before - rest
    assert min(read) > 1


def _counted(read: list[int]) -> Any:
    original = RetentionCore.read

    def counted(core: RetentionCore, found: Any) -> None:
        read.append(found.seq)
        original(core, found)

    return counted
