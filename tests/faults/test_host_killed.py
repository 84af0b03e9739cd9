"""SIGKILL of a harness host that holds fifty trials in the middle of a command: other hosts redo them, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.envelope import Event
from schemas.facts import BatchYielded, SequenceFinished, SequenceVerified
from schemas.plan import Plan
from tests.capture_parts import served
from tests.launched import Launched, check_history, history, kill
from tests.lifecycle_parts import running, tasks
from tests.scaffolds.policy import Scene, call
from tests.scripted_engine import ServedPolicy, attempt, check_trained, small_policy
from tests.workspace_parts import mounts, refusal, roots, workspaces

pytestmark = [pytest.mark.timeout(200), pytest.mark.skipif(bool(refusal()), reason=refusal())]
TENANTS = 100
"""In both hosts together: one of them has fifty or more."""
GROUP = 4
REDONE_S = 30.0


def configuration(engine_url: str, policy: Path, folder: Path) -> str:
    return f"""
run = "killed"
steps = 1
[engine]
url = "{engine_url}"
policy = "{policy}"
[agent_loop]
ack_wait_s = 6.0
trial_budget_s = 600
tenants = {TENANTS}
[batch]
dp = 1
[[pools]]
name = "fifty"
harness = "shell"
hosts = 2
tenants = {TENANTS}
options = {{ command_s = 300, system = "Work." }}
[[sources]]
name = "held"
pool = "fifty"
groups = {TENANTS // GROUP}
group_size = {GROUP}
oversample = 1
[sources.behaviour]
max_tokens = 128
[sources.environment]
kind = "harbor"
options = {{ tasks = "{folder}", memory_mb = 64, disk_mb = 16, processes = 16 }}
"""


@pytest.fixture
def mark() -> str:
    return f"held-{os.getpid()}-{time.monotonic_ns()}"


def holding(mark: str) -> Callable[[Scene], str]:
    """First attempts are held in a command until somebody ends it; later ones are done at once. Every other one is right."""

    def play(scene: Scene) -> str:
        who = attempt(scene)
        answer = 42 if who.member % 2 == 0 else 41
        if who.number > 1:
            return call("bash", command=f"echo {answer} > answer; submit")
        if scene.said:
            return call("bash", command="submit")
        return call("bash", command=f"echo {answer} > answer; exec -a {mark} sleep 600")

    return play


async def test_fifty_trials_of_a_killed_host_are_redone_and_leave_nothing(
    tmp_path: Path, mark: str, record_property: Callable[[str, object], None]
) -> None:
    tasks(tmp_path, '[ "$(cat answer)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt')
    policy = ServedPolicy(holding(mark))
    async with served(policy.application()) as url:
        text = configuration(url, small_policy(tmp_path / "policy"), tmp_path / "tasks")
        with Launched(tmp_path, text, "killed") as run:
            run.start()
            log = await run.log()
            try:
                names = {await run.pid(name): name for name in ("harness-fifty-0", "harness-fifty-1")}
                await until(lambda: len(running(mark)) == TENANTS, 90)
                held = {pid: len(workspaces(pid)) for pid in names}
                assert sum(held.values()) == TENANTS
                victim = max(held, key=held.__getitem__)
                killed_at = time.monotonic()
                kill(victim)
                await until(lambda: len(running(mark)) == TENANTS - held[victim] and not roots(victim), 10)
                redone = await asyncio.wait_for(verdicts(log, 2, held[victim]), REDONE_S)
                record_property("redone_s", round(time.monotonic() - killed_at, 1))
                await until(lambda: not workspaces(victim), 10)
                # The other host's trials go on as if nothing had been.
                for pid in running(mark):
                    os.kill(pid, signal.SIGTERM)
                events = await asyncio.wait_for(history(run, log), 90)
                store = ObjectStore.open(load(run.home / "config.toml").store)
                await check_history(events, store, 1)
            finally:
                await log.close()
            assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    assert run.restarts() == {names[victim]: 1}
    lost = {event.fact.sequence for event in redone if isinstance(event.fact, SequenceVerified)}
    for event in events:
        fact = event.fact
        if isinstance(fact, SequenceVerified):
            assert fact.attempt <= 2
            assert (fact.failure.reason if fact.failure else "") == (
                "harness_lost" if fact.attempt == 1 and fact.sequence in lost else ""
            )
        if isinstance(fact, SequenceFinished):
            assert fact.attempt == (2 if fact.sequence in lost else 1)
    assert {event.producer for event in redone} <= set(names.values())
    assert len(lost) >= 50
    [batch] = [event.fact for event in events if isinstance(event.fact, BatchYielded)]
    assert batch.sources["held"].sequences == TENANTS
    await check_trained(Plan.model_validate_json(await store.get(batch.plan)), store, policy)
    assert running(mark) == []
    assert [left for pid in names for left in (*roots(pid), *workspaces(pid))] == []
    assert mounts() == [MOUNT_POINT]


async def verdicts(log: Log, attempt: int, count: int) -> list[Event]:
    """The first `count` verdicts on such attempts."""
    found: list[Event] = []
    async for event in log.subscribe("sequence.verified"):
        if isinstance(event.fact, SequenceVerified) and event.fact.attempt == attempt:
            found.append(event)
            if len(found) == count:
                break
    return found


async def until(holds: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not come true in {within_s} s"
        await asyncio.sleep(0.05)
