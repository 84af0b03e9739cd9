"""The collector is killed in the middle of removing a batch: what starts after it removes the rest, and nothing else."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Store
from schemas.facts import StepTrained
from schemas.keys import claim_key
from tests.faults.test_collector import POLICY, collecting, expected, keys, removed
from tests.natsserver import NatsServer
from tests.retention_parts import Stored
from tests.unit.signal_world import signal_config

pytestmark = pytest.mark.timeout(120)
REMOVES = 3
DIES = f"""
import asyncio, os, pathlib, signal, sys
import obstore
from pipeline.store import objects
from schemas.config import RunConfig
from services import collector
from services.process import run_service

objects._REMOVED_AT_ONCE = 1
delete, left = obstore.delete_async, {REMOVES}

async def dying(*given):
    global left
    await delete(*given)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

obstore.delete_async = dying
config = RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
asyncio.run(run_service(collector.serve, config, "collector"))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A broker of its own: the run's name is always r."""
    server = NatsServer(tmp_path / "nats", sync="2m")
    server.start()
    yield server
    server.stop()


async def test_what_a_killed_collector_left_is_removed_by_the_next(
    server: NatsServer, store: ObjectStore, tmp_path: Path
) -> None:
    world = Stored(signal_config(steps=2), 11)
    world.run()
    # To the last step, and not to the end of the run, at which a collector ends.
    last = max(at for at, found in enumerate(world.log, 1) if isinstance(found.fact, StepTrained))
    told = world.log[:last]
    config = world.config.model_copy(
        update={"broker": server.broker, "store": Store(url=store.url), "retention": POLICY}
    )
    log = await Log.connect(server.broker, "r", "test")
    await log.create()
    published = await log.publish_all([(found.fact, None) for found in told])
    await store.create(claim_key("r"), orjson.dumps({"log": published[0].event.id}))
    await asyncio.gather(*(store.create(key, b"1") for key in world.written))
    before = await keys(store)
    doomed = expected(told) & before
    assert len(doomed) > REMOVES
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    dying = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIES, str(file), cwd=Path(__file__).parents[2]
    )
    async with asyncio.timeout(60):
        assert await dying.wait() == -signal.SIGKILL
    gone = before - await keys(store)
    assert len(gone) == REMOVES
    assert gone < doomed
    async with collecting(config, log, store):
        assert await removed(store, doomed) == before - doomed
    await log.close()
