"""The ranks of a run as one service: one that is killed, the end of the run, and being told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from pipeline.log import Log  # after importorskip
from pipeline.store import ObjectStore
from schemas.config import Metrics, RunConfig
from schemas.facts import RunStopped, StepTrained
from tests.integration.test_places import Spawned, ending
from tests.integration.test_trainer import first, packing
from tests.log_parts import until
from tests.natsserver import free_port
from tests.packer_parts import yield_batch

pytestmark = pytest.mark.timeout(150)
RANKS = 2


def children(pid: int) -> dict[int, int]:
    """Process of each rank of a gang, by its number."""
    found: dict[int, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            argv = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "--index" in argv:
            found[int(argv[argv.index("--index") + 1])] = int(child)
    return found


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def answer(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as got:
        return got.status, await got.text()


@pytest.fixture
def gang_config(packer_config: RunConfig) -> RunConfig:
    metrics = Metrics(bind=f"127.0.0.1:{free_port()}")
    return packer_config.model_copy(update={"metrics": metrics, "steps": 1})


async def test_ranks_start_again_as_one_train_and_end_with_the_run(
    gang_config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    await yield_batch(log, store, 1)
    port = int(gang_config.metrics.bind.rpartition(":")[2])
    with ending([Spawned(gang_config, tmp_path / "gang", "trainer")]) as (gang,):
        await until(lambda: len(children(gang.process.pid)) == RANKS, poll_s=0.02)
        before = children(gang.process.pid)
        os.kill(before[1], signal.SIGKILL)
        told = await gang.says("start again")
        assert told == "rank 1 ended with signal SIGKILL; all 2 ranks start again"
        async with packing(gang_config, log, store):
            await first(log, StepTrained, 1)
            assert gone(before[0]), "the ranks live and die together"
            for rank in range(RANKS):
                assert f'service="trainer-{rank}"' in (await answer(port + rank, "/metrics"))[1]
            assert (await answer(port, "/readyz"))[0] == 200
            await log.publish(RunStopped(run=log.run, reason="completed", steps=1))
            assert await asyncio.to_thread(gang.process.wait, 40) == 0, gang.written()
    assert sum("start again" in line for line in gang.said()) == 1


async def test_a_gang_that_is_told_to_stop_leaves_no_rank(
    gang_config: RunConfig, log: Log, tmp_path: Path
) -> None:
    with ending([Spawned(gang_config, tmp_path / "gang", "trainer")]) as (gang,):
        await until(lambda: len(children(gang.process.pid)) == RANKS, poll_s=0.02)
        ranks = children(gang.process.pid)
        assert await gang.stopped() == 0, gang.written()
    assert all(gone(pid) for pid in ranks.values())
