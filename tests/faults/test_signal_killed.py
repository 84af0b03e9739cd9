"""examples/signal.toml with its services killed at random: it ends, and nothing is decided, scored, shaped or trained twice.

Each is killed once, upon some fact by which it may have work in hand. Which is up to a seed that is printed; PACKTRAIN_SEED sets it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from pipeline.config import load
from pipeline.log import Log
from pipeline.store import ObjectStore
from tests.launched import Launched, check_history, history, kill
from tests.signal_example import check_signal, example

pytestmark = pytest.mark.timeout(240)
STEPS = 2
MOMENTS = {
    "grader": {"sample.completed arithmetic": 3, "sample.completed drill": 3, "sample.graded arithmetic": 3},
    "teacher": {"sequence.finished calculator": 16, "sequence.scored calculator": 16},
    "hook": {"sample.accepted calculator": 3, "sample.shaped calculator": 3},
    "sampler": {"sequence.scored": 16, "sample.graded": 5, "sample.shaped": 5, "batch.yielded": 1},
    "agent-loop-0": {"sequence.opened": 16, "sequence.finished": 16},
    "packer-0": {"batch.yielded": 2, "window.packed": 2},
}
"""Facts, of a source, upon which a service may be killed, and how often each comes at least."""


async def test_killed_at_random(tmp_path: Path) -> None:
    seed = int(os.environ.get("PACKTRAIN_SEED") or secrets.randbits(32))
    random = Random(seed)
    victims = {}
    for victim, moments in MOMENTS.items():
        moment = random.choice(sorted(moments))
        victims[victim] = (moment, random.randint(1, moments[moment]))
    print(f"PACKTRAIN_SEED={seed}: {victims}")
    with Launched(tmp_path, example(STEPS), "signal") as run:
        run.start()
        log = await run.log()
        try:
            await kill_each(run, log, dict(victims))
            events = await asyncio.wait_for(history(run, log), 150)
        finally:
            await log.close()
        assert await asyncio.to_thread(run.finish, 60) == 0, run.told()
    await check_history(events, ObjectStore.open(load(run.home / "config.toml").store), STEPS)
    check_signal(events)
    assert run.restarts() == dict.fromkeys(victims, 1), "each was to be restarted once, and nothing else"


async def kill_each(run: Launched, log: Log, victims: dict[str, tuple[str, int]]) -> None:
    seen: Counter[str] = Counter()
    async for event in log.subscribe():
        kinds = {event.fact.type, f"{event.fact.type} {getattr(event.fact, 'source', '')}"}
        seen.update(kinds)
        for victim in [
            name for name, (kind, count) in victims.items() if kind in kinds and seen[kind] == count
        ]:
            del victims[victim]
            kill(await run.pid(victim))
        if not victims:
            return
