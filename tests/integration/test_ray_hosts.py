"""Rollout hosts as actors of a real Ray cluster: one a host whatever the rollouts, started again, and nothing left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker, Pool, RunConfig
from schemas.facts import SequenceFailed, SequenceFinished
from tests.launched import CHAT_ONLY, Launched, check_history, history, kill
from tests.raycluster import RayCluster, ray_cluster
from tests.rollout_stage import KEY, ROOT, Stage, staged, write_config

pytestmark = pytest.mark.timeout(360)  # a whole run, on a machine that may be busy
DEADLINE_S = 90.0
FEW, MANY = 6, 60
SOCKETS = 4
"""Descriptors of one tenant, both its hosts together, at most: its call of the proxy (two ends), the proxy's call of the
engine, and its journal."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
async def stage(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> AsyncIterator[Stage]:
    async with staged(tmp_path, broker, run_name, log, store, lambda prompt: "4") as make:
        stage = make(hosts=2, tenants=2 * MANY, trial_budget_s=120.0, journal_dir="")
        pool = Pool(name="chats", harness="chat", hosts=2, tenants=2 * MANY, resources={"CPU": 0.5})
        update: dict[str, Any] = {"pools": (pool,), "sources": (stage.config.source("sums"),)}
        stage.config = stage.config.model_copy(update=update)
        yield stage


class Driver:
    """`tests.ray_driver` as a process."""

    def __init__(self, config: RunConfig, directory: Path, cluster: RayCluster) -> None:
        self._output = directory / "driver.txt"
        argv = [
            sys.executable,
            "-m",
            "tests.ray_driver",
            str(write_config(config, directory)),
            cluster.address,
        ]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*argv, str(directory)],
                cwd=ROOT,
                env=cluster.environment(),
                stdin=subprocess.PIPE,
                stdout=output,
            )

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._output.read_text().splitlines() if line.startswith("{")]

    def places(self) -> dict[str, tuple[str, int]]:
        found = [line["places"] for line in self.told() if "places" in line]
        return found[-1] if found else {}

    async def started(self, hosts: int) -> dict[str, tuple[str, int]]:
        await until(lambda: len(self.places()) == hosts or self.process.poll() is not None, f"{hosts} hosts")
        assert self.process.poll() is None, self._output.read_text()
        return self.places()


@contextmanager
def driven(config: RunConfig, directory: Path, cluster: RayCluster) -> Iterator[Driver]:
    driver = Driver(config, directory, cluster)
    try:
        yield driver
    finally:
        driver.process.kill()
        driver.process.wait()


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {DEADLINE_S:.0f} s: {what}"
        await asyncio.sleep(0.05)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_actors_and_descriptors_stay_flat_as_rollouts_grow_tenfold(
    stage: Stage, tmp_path: Path, cluster: RayCluster
) -> None:
    stage.engine.gate.clear()
    with driven(stage.config, tmp_path, cluster) as driver:
        places = await driver.started(4)
        names = ["agent-loop-0", "agent-loop-1", "harness-chats-0", "harness-chats-1"]
        assert sorted(places) == names
        seen: list[tuple[list[int], int, int, int]] = []
        for count in (FEW, MANY):
            for member in range(len(stage.engine.prompts), count):
                await stage.dispatch("sums", member)
            await stage.engine.wait_for_prompts(count)
            hosts = sum(descriptors(pid) for _, pid in places.values())
            seen.append(
                (sorted(cluster.hosts()), len(cluster.processes()), descriptors(driver.process.pid), hosts)
            )
        (few, *small), (many, *large) = seen
        assert many == few == sorted(pid for _, pid in places.values()), "one process a host, none a tenant"
        assert large[0] == small[0], "no process of the cluster is a tenant's"
        assert abs(large[1] - small[1]) <= 2, "the driver knows hosts, not tenants"
        assert (large[2] - small[2]) / (MANY - FEW) <= SOCKETS
        assert cluster.actors() == [f"packtrain-{stage.config.run}-{name}" for name in names]

        told = secrets_of(stage.config)
        assert not found_in(told, cluster), (
            "a secret is on the node's disk, in a command line or an environment"
        )

        stage.engine.gate.set()
        finished = 0
        async for event in stage.log.subscribe("sequence.*"):
            assert event.fact.type != "sequence.failed", event.fact
            finished += isinstance(event.fact, SequenceFinished)
            if finished == MANY:
                break
        assert driver.process.stdin is not None
        driver.process.stdin.close()
        assert await asyncio.to_thread(driver.process.wait, 30) == 0
        assert all(line.get("restarts", {}) == {} for line in driver.told())
    await until(lambda: not cluster.hosts(), "no host is left")
    assert not (Path(tempfile.gettempdir()) / f"packtrain-test-{stage.config.run}").exists()


async def test_nothing_is_left_of_a_driver_that_is_killed(
    stage: Stage, tmp_path: Path, cluster: RayCluster
) -> None:
    with driven(stage.config, tmp_path, cluster) as driver:
        places = await driver.started(4)
        os.kill(driver.process.pid, signal.SIGKILL)
    alive = {pid for _, pid in places.values()}
    await until(lambda: not alive & cluster.processes().keys(), "its hosts' processes are gone")
    await until(lambda: not cluster.actors(), "its actors are gone")


STEPS = 1

# One host of each kind, so that without its successor the run would not end; and the fact after which it has work in hand.
VICTIMS = {"harness-chat-0": "sequence.opened", "agent-loop-0": "sequence.verified"}


async def test_ray_restarts_its_workers_and_the_run_ends(tmp_path: Path, cluster: RayCluster) -> None:
    """SIGKILL in mid-run: the run ends as if nothing had been."""
    run = Launched(
        tmp_path,
        CHAT_ONLY + "[agent_loop]\nack_wait_s = 2.0\n",
        command="up",
        environment=cluster.environment(),
    )
    run.start("--ray", cluster.address, "--steps", str(STEPS))
    log = await run.log()
    try:
        for victim, moment in VICTIMS.items():
            async for event in log.subscribe(moment):
                assert event.fact.type == moment
                break
            _, pid = run.actors()[victim]
            assert pid in cluster.hosts()
            kill(pid)
        events = await asyncio.wait_for(history(run, log), 150)
        await check_history(events, ObjectStore.open(load(run.home / "config.toml").store), STEPS)
    finally:
        await log.close()
    assert await asyncio.to_thread(run.finish, 60) == 0, run.told()
    assert run.restarts() == dict.fromkeys(VICTIMS, 1)
    for victim in VICTIMS:
        assert f"{victim} is started again: the process of {victim} on " in run.told()
    ends = Counter(
        event.fact.sequence for event in events if isinstance(event.fact, SequenceFinished | SequenceFailed)
    )
    assert set(ends.values()) == {1}, "a sequence is decided twice"
    await until(lambda: not cluster.hosts() and not cluster.actors(), "no host is left on the cluster")


def secrets_of(config: RunConfig) -> list[bytes]:
    return [Path(config.broker.token_file).read_bytes().strip(), KEY]


def found_in(secrets: list[bytes], cluster: RayCluster) -> list[str]:
    """The files of the cluster, and of its processes, that have one of the secrets."""
    files = [file for file in cluster.directory.rglob("*") if file.is_file()]
    for pid in cluster.processes():
        files += [Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ")]
    return [str(file) for file in files if any(secret in file.read_bytes() for secret in secrets)]
