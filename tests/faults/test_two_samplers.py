"""Two samplers and two dispatchers at once, one of each killed in mid-run: nothing is decided twice or otherwise."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.store import ObjectStore
from schemas.facts import SequenceDispatched
from tests.launched import Launched, check_history, history
from tests.log_parts import until

pytestmark = pytest.mark.timeout(150)
STEPS = 8
_TWICE = ("sampler", "dispatcher")


def second(run: Launched, name: str) -> subprocess.Popen[bytes]:
    """The service once more, beside the launcher's."""
    argv = [sys.executable, "-P", "-m", "services.cli.main", "service", name]
    with (run.directory / f"second-{name}.log").open("ab") as log:
        return subprocess.Popen([*argv, "--config", str(run.home / "config.toml")], stdout=log, stderr=log)


async def until_started(run: Launched, name: str, times: int) -> None:
    """Both of each have spoken, or the test says nothing: an event does not tell which of them wrote it, their logs do."""
    log = run.directory / f"second-{name}.log"
    await until(lambda: log.read_text().count('"message":"started"') == times, poll_s=0.05)


async def test_two_of_each_decide_as_one(tmp_path: Path) -> None:
    run = Launched(tmp_path)
    run.start("--steps", str(STEPS))
    log = await run.log()
    others = {name: second(run, name) for name in _TWICE}
    try:
        async for _ in log.subscribe("sequence.finished"):
            break
        for name in _TWICE:
            await until_started(run, name, 1)
            others[name].send_signal(signal.SIGKILL)
            others[name].wait()
            others[name] = second(run, name)
        for name in _TWICE:
            await until_started(run, name, 2)
        events = await asyncio.wait_for(history(run, log), 120)
        await check_history(events, ObjectStore.open(load(run.home / "config.toml").store), STEPS)
    finally:
        await log.close()
        for process in others.values():
            process.kill()
            process.wait()
    assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    assert run.restarts() == {}
    for name in _TWICE:
        told = (run.directory / f"second-{name}.log").read_text()
        assert '"level":"error"' not in told, told
    assert any(isinstance(e.fact, SequenceDispatched) for e in events)
