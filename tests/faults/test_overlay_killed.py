"""A host that is killed with running workspaces: nothing of them runs on, and another host removes their control groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.harnesses.workspaces import cgroups
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces
from tests.workspace_parts import groups, mounts, processes, refusal, roots, spec

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())
ROOT = Path(__file__).resolve().parents[2]
MARK = "overlay-mark-killed"

HOST = f"""
import asyncio, sys
from pathlib import Path
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces
from tests.workspace_parts import spec

async def trial(number, everybody):
    async with OverlayWorkspaces().open(spec(f"killed{{number}}", Path(sys.argv[1]))) as workspace:
        await workspace.run(["bash", "-c", "trap '' TERM HUP; (setsid bash -c 'exec -a {MARK} sleep 600' &)"], timeout_s=60)
        await everybody.wait()
        await workspace.run(["bash", "-c", "exec -a {MARK} sleep 600"], timeout_s=600)

async def main():
    everybody = asyncio.Barrier(5)
    running = [asyncio.create_task(trial(number, everybody)) for number in range(4)]
    await everybody.wait()
    print("running", flush=True)
    await asyncio.gather(*running)

asyncio.run(main())
"""


async def test_a_killed_hosts_workspaces_die_with_it_and_are_swept(tmp_path: Path) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"running\n"
        until(lambda: len(processes(MARK)) >= 8)
        assert len(roots(host.pid)) >= 4
        left = [group for number in range(4) for group in groups(f"killed{number}")]
        assert left
    finally:
        host.send_signal(signal.SIGKILL)
        host.communicate()
    until(lambda: not processes(MARK))
    until(lambda: not roots(host.pid))
    assert mounts() == [MOUNT_POINT]

    async with OverlayWorkspaces().open(spec("living", tmp_path)) as living:
        own = groups("living")
        # Another test's host may have swept some of them by now: only what is left counts.
        await OverlayWorkspaces().sweep()
        assert [group for group in left if Path(group).exists()] == []
        assert groups("living") == own
        assert (await living.run(["echo", "lives"], timeout_s=30)).stdout == b"lives\n"


async def test_what_still_runs_in_a_dead_hosts_group_is_killed(tmp_path: Path) -> None:
    """Also where its pid is another process's by now: the start time tells them apart."""
    stray = subprocess.Popen(["sleep", "600"])
    try:
        for folder in cgroups.find().folders():
            dead = folder / f"{cgroups.PREFIX}{os.getpid()}-1-stray"
            (dead / "run-1").mkdir(parents=True)
            (dead / "run-1" / "cgroup.procs").write_text(str(stray.pid))
        await OverlayWorkspaces().sweep()
        assert stray.wait(10) == -signal.SIGKILL
        assert groups("stray") == []
    finally:
        stray.kill()
        stray.wait()


def until(holds: Callable[[], bool], within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
