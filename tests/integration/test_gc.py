"""`packtrain gc` on a real log and real objects: shown, removed, killed on the way, refused; and what is gone says so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from nats.js.errors import NotFoundError

from pipeline.config import dumps
from pipeline.log import Log
from pipeline.retention.core import CONSUMED, RetentionCore
from pipeline.store import ObjectStore
from schemas.config import Broker, RunConfig
from schemas.config import Store as StoreConfig
from schemas.facts import BatchYielded, SequenceFinished
from schemas.keys import artefact_key, claim_key, plan_key
from services.cli import run_removal
from tests import commands
from tests.commands import PACKTRAIN
from tests.retention_parts import Stored
from tests.unit.signal_world import signal_config

RULES = {"rejected_steps": 1, "consumed_steps": 1, "checkpoint_steps": 1}
LOST = 1500
"""More than a pipe holds lines of."""


@dataclass
class Run:
    """A run that is over, as its launcher left it. doomed: what its policy removes, with the reason."""

    world: Stored
    config: RunConfig
    store: ObjectStore
    directory: Path
    doomed: dict[str, str]

    async def keys(self) -> set[str]:
        return {key async for key, _ in self.store.list("runs/r")}


@pytest.fixture
async def run(broker: Broker, tmp_path: Path) -> AsyncIterator[Run]:
    world = Stored(signal_config(steps=4), 11)
    world.run()
    core = RetentionCore("r")
    for found in world.log:
        core.fold(found)
    config = world.config.model_copy(
        update={
            "broker": broker,
            "directory": str(tmp_path),
            "store": StoreConfig(url=(tmp_path / "objects").as_uri()),
            "retention": world.config.retention.model_copy(update=RULES),
        }
    )
    doomed = core.take(config.retention)
    images = core.images(config.retention)
    assert images is not None
    doomed |= {key: "image" for key in world.written if "/images/" in key and key not in images}
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.toml").write_text(dumps(config))
    log = await Log.connect(broker, "r", "test")
    try:
        await log.create()
        published = await log.publish_all([(found.fact, None) for found in world.log])
        store = ObjectStore.open(config.store)
        for key in world.written:
            await store.create(key, b"1")
        await store.create(claim_key("r"), orjson.dumps({"log": published[0].event.id}))
        yield Run(world, config, store, tmp_path, {k: why for k, why in doomed.items() if k in world.written})
    finally:
        with suppress(NotFoundError):
            await log.js.delete_stream(log.stream)
        await log.close()


def gc(run: Run, *arguments: str, status: int = 0) -> str:
    done = commands.packtrain("gc", "r", "--directory", run.directory, *arguments)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stderr if status else done.stdout


async def test_a_dry_run_shows_and_removes_nothing_and_what_is_killed_goes_on(run: Run) -> None:
    before = await run.keys()
    (table,) = [gc(run)]
    assert f"{len(run.doomed):,} objects" in table
    assert "nothing was: --apply removes them" in table
    for reason in set(run.doomed.values()):
        assert f"{reason} " in table, reason
    assert await run.keys() == before
    assert {
        each["key"]: each["reason"] for each in map(json.loads, gc(run, "--json").splitlines())
    } == run.doomed

    # Of a decided group, and of a step that is yielded, by writers that died; and one that may still be on its way.
    sequence = next(e.fact.sequence for e in run.world.log if isinstance(e.fact, SequenceFinished))
    lost = {artefact_key("r", f"{sequence}-a8", f"x{number}") for number in range(LOST)} | {
        plan_key("r", 1, 7)
    }
    young = artefact_key("r", f"{sequence}-a8", "young")
    root = run.directory / "objects"
    for key in lost | {young}:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"1")
        if key != young:
            then = time.time() - 7200
            os.utime(root / key, (then, then))
    command = [*PACKTRAIN, "gc", "r", "--directory", str(run.directory), "--orphans", "--apply", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        # It stands still when the pipe is full: in the middle.
        first = json.loads(process.stdout.readline())
        os.killpg(process.pid, signal.SIGKILL)
    middle = await run.keys()
    assert first["key"] not in middle
    assert middle & (lost | run.doomed.keys())
    assert before - run.doomed.keys() <= middle
    told = gc(run, "--orphans", "--apply")
    assert "removed" in told
    assert await run.keys() == before - run.doomed.keys() | {young}
    assert "nothing to remove" in gc(run, "--orphans")

    consumed = next(
        e.fact.sequence
        for e in run.world.log
        if isinstance(e.fact, SequenceFinished) and run.doomed.get(e.fact.payload.key) == CONSUMED
    )
    shown = commands.packtrain("payload", "show", consumed, "--directory", run.directory)
    assert shown.returncode == 1
    assert "retention removed it: it is of trained batches" in shown.stderr


async def test_a_place_that_is_another_logs_or_a_log_that_this_release_cannot_read_is_left_alone(
    run: Run, broker: Broker
) -> None:
    before = await run.keys()
    claim = run.directory / "objects" / claim_key("r")
    mine = claim.read_bytes()
    claim.write_bytes(b'{"log":"another"}')
    assert "does not name this log, and nothing was removed" in gc(run, "--apply", status=1)
    claim.write_bytes(mine)
    keeps = run.config.model_copy(
        update={"retention": run.config.retention.model_copy(update=dict.fromkeys(RULES, 0))}
    )
    (run.directory / "runs" / "r" / "config.toml").write_text(dumps(keeps))
    assert "run r keeps everything" in gc(run, "--apply", status=2)
    yielded = [e.fact for e in run.world.log if isinstance(e.fact, BatchYielded)]
    found = [json.loads(line) for line in gc(run, "--consumed-steps", "1", "--json").splitlines()]
    assert {each["key"] for each in found if "/plans/" in each["key"]} == {f.plan.key for f in yielded[:-1]}
    borrowed = run.directory / "runs" / "r" / "borrowed-objects"
    borrowed.touch()
    assert "before its import" in gc(run, "--consumed-steps", "1", "--apply", status=1)
    borrowed.unlink()
    log = await Log.connect(broker, "r", "test")
    await log.js.publish("rl.r.sample.shaped.math.math-000777", b"rubbish")
    await log.close()
    assert "cannot be read" in gc(run, "--consumed-steps", "1", "--apply", status=1)
    assert await run.keys() == before


@pytest.mark.parametrize("borrowed", [False, True])
async def test_a_bucket_forgets_a_run_that_is_removed_but_not_one_whose_objects_stay(
    run: Run, monkeypatch: pytest.MonkeyPatch, borrowed: bool
) -> None:
    ruled: list[tuple[str, str, int]] = []
    monkeypatch.setattr(
        "pipeline.store.expiry.set_expiry", lambda store, name, days: ruled.append((store.url, name, days))
    )
    monkeypatch.setattr(run_removal, "_store", lambda *_: run.store)
    home = run.directory / "runs" / "r"
    bucket = run.config.model_copy(
        update={
            "store": StoreConfig(url="s3://bucket/prefix"),
            "retention": run.config.retention.model_copy(update={"expire_days": 3}),
        }
    )
    (home / "config.toml").write_text(dumps(bucket))
    if borrowed:
        (home / "borrowed-objects").touch()
    before = await run.keys()
    told: list[str] = []
    assert await asyncio.to_thread(run_removal.remove, run.directory, "r", None, lambda _: True, told.append)
    assert not home.exists()
    assert await run.keys() == (before if borrowed else set())
    assert ruled == ([] if borrowed else [("s3://bucket/prefix", "r", 0)]), told
