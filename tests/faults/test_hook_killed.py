"""The hook service killed between its sidecars and its fact: restarted it gives the same, and the objects are the first ones."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_header
from schemas.config import Broker
from schemas.facts import SampleShaped
from schemas.keys import sidecar_key
from tests.hook_parts import World, config_of, hooking

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]
SOURCES: dict[str, Any] = {"math": ["grpo", {"kind": "opd", "options": {"teacher": "large", "add": True}}]}
STOPS_BEFORE_ITS_FACT = """
import asyncio, sys
from pathlib import Path
from pipeline.log import Log
from schemas.config import RunConfig
from services.hook import serve
from services.process import run_service

async def publish(self, fact, cause=None):
    print(fact.type, flush=True)
    await asyncio.Event().wait()

Log.publish = publish
config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
asyncio.run(run_service(lambda ctx: serve(ctx, ack_wait_s=1.0), config, "hook"))
"""


async def test_killed_between_its_sidecars_and_its_fact(
    log: Log, store: ObjectStore, broker: Broker, tmp_path: Path
) -> None:
    config = config_of(log.run, broker, f"file://{tmp_path}/objects", SOURCES)
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    world = World(log, store)
    group = await world.group("math", 1, [1.0, 0.0])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOPS_BEFORE_ITS_FACT, str(file), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), 30)
        assert said == b"sample.shaped\n"
    finally:
        process.kill()
        await process.wait()
    # A late answer meanwhile: it must not get into what was begun without it.
    await world.grade(group, [0.0, 1.0], revision=1)
    files = [tmp_path / "objects" / sidecar_key(payload.key, "advantages.0") for payload in group.payloads]
    before = [(each.read_bytes(), each.stat().st_ino) for each in files]
    async with hooking(config, log, store, ack_wait_s=1.0):
        event = await world.fact("sample.shaped", "math", group.sample)
        await world.fact("sample.shaped", "math", f"{group.sample}-r1")
        await world.settled("hook")
    assert isinstance(event.fact, SampleShaped)
    assert event.fact.sidecars == tuple(
        [await read_header(store, sidecar_key(payload.key, "advantages.0")) for payload in group.payloads]
    )
    assert event.fact.advantages[0] > 0 > event.fact.advantages[1]
    assert [(each.read_bytes(), each.stat().st_ino) for each in files] == before
    assert await world.count("sample.shaped") == 2
