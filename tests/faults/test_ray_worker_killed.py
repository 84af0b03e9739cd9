"""SIGKILL of Ray's worker processes in mid-run: Ray restarts the hosts, and the run ends as if nothing had been."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.store import ObjectStore
from schemas.facts import SequenceFailed, SequenceFinished
from tests.launched import CHAT_ONLY, Launched, check_history, history, kill
from tests.raycluster import ray_cluster

pytestmark = pytest.mark.timeout(150)
STEPS = 1

# One host of each kind, so that without its successor the run would not end; and the fact after which it has work in hand.
VICTIMS = {"harness-chat-0": "sequence.opened", "agent-loop-0": "sequence.verified"}


async def test_ray_restarts_its_workers_and_the_run_ends(tmp_path: Path) -> None:
    with ray_cluster() as cluster:
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
            events = await asyncio.wait_for(history(run, log), 90)
            await check_history(events, ObjectStore.open(load(run.home / "config.toml").store), STEPS)
        finally:
            await log.close()
        assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
        assert run.restarts() == dict.fromkeys(VICTIMS, 1)
        for victim in VICTIMS:
            assert f"{victim} is started again: the process of {victim} on " in run.told()
        ends = Counter(
            event.fact.sequence
            for event in events
            if isinstance(event.fact, SequenceFinished | SequenceFailed)
        )
        assert set(ends.values()) == {1}, "a sequence is decided twice"
        deadline = time.monotonic() + 20
        while cluster.hosts() or cluster.actors():
            assert time.monotonic() < deadline, "hosts are left on the cluster"
            await asyncio.sleep(0.05)
