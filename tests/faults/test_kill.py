"""SIGKILL of any one process in mid-step: the run ends with the same number of steps, and nothing is trained twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.store import ObjectStore
from tests.launched import Launched, check_history, history, kill

pytestmark = pytest.mark.timeout(150)
STEPS = 2

# The process to kill, and the fact after which it has work in hand.
CASES = {
    "broker": "sequence.finished",
    "engine": "sequence.opened",
    "dispatcher": "sequence.dispatched",
    "agent-loop-0": "sequence.opened",
    "harness-chat-0": "sequence.opened",
    "harness-tool-0": "sequence.verified",
    "grader": "sample.completed",
    "sampler": "sample.graded",
    "packer-0": "batch.yielded",
    "packer-1": "window.packed",
    "trainer-0": "window.packed",
    "trainer-1": "batch.consumed",
}


@pytest.mark.parametrize(("victim", "moment"), CASES.items(), ids=CASES)
async def test_sigkill_in_mid_step(victim: str, moment: str, tmp_path: Path) -> None:
    run = Launched(tmp_path)
    run.start()
    log = await run.log()
    try:
        async for event in log.subscribe(moment):
            assert event.fact.type == moment
            break
        pid = await run.pid(victim)
        kill(pid)
        events = await asyncio.wait_for(history(run, log), 120)
        await check_history(events, ObjectStore.open(load(run.home / "config.toml").store), STEPS)
    finally:
        await log.close()
    assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    unit = victim.partition("-")[0] if victim.startswith("trainer") else victim
    assert run.restarts().get(unit) == 1, f"{victim} was to be restarted once; restarts: {run.restarts()}"
