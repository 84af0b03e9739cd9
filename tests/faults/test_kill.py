"""SIGKILL of any process in mid-step: the run ends with the same number of steps, and nothing is trained twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.log import Log
from pipeline.store import ObjectStore
from tests.launched import Launched, check_history, history, kill

pytestmark = pytest.mark.timeout(150)
STEPS = 2

# Processes to kill in one run, in this order, each after the first fact by which it has work in hand.
CASES = (
    {
        "engine": "sequence.opened",
        "harness-tool-0": "sequence.verified",
        "grader": "sample.completed",
        "sampler": "sample.graded",
        "packer-0": "batch.yielded",
        "trainer-0": "window.packed",
    },
    {
        "dispatcher": "sequence.dispatched",
        "harness-chat-0": "sequence.opened",
        "agent-loop-0": "sequence.verified",
        "broker": "sequence.finished",
        "packer-1": "window.packed",
        "trainer-1": "batch.consumed",
    },
)


@pytest.mark.parametrize("victims", CASES, ids=" ".join)
async def test_sigkill_in_mid_step(victims: dict[str, str], tmp_path: Path) -> None:
    run = Launched(tmp_path)
    run.start()
    log = await run.log()
    try:
        await kill_each(run, log, dict(victims))
        events = await asyncio.wait_for(history(run, log), 120)
        await check_history(events, ObjectStore.open(load(run.home / "config.toml").store), STEPS)
    finally:
        await log.close()
    assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    restarted = {name.partition("-")[0] if name.startswith("trainer") else name: 1 for name in victims}
    assert run.restarts() == restarted, "each was to be restarted once, and nothing else"


async def kill_each(run: Launched, log: Log, victims: dict[str, str]) -> None:
    async for event in log.subscribe():
        for victim in [name for name, moment in victims.items() if moment == event.fact.type]:
            del victims[victim]
            kill(await run.pid(victim))
        if not victims:
            return
