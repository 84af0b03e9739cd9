"""The life of trials in real workspaces, and what goes wrong in them, each for real: what the policy does is a verdict, what the
world does is an infra failure, and nothing is left on the machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.harnesses.base import InfraFailure, Trial, Verdict
from pipeline.harnesses.endings import termination
from pipeline.harnesses.lifecycle import run_in_workspace
from pipeline.harnesses.workspaces.base import Ended, Workspace
from tests.lifecycle_parts import PASS, Kept, running, tasks, trial

ALONE = """
for p in /proc/[0-9]*; do
  [ $p = /proc/1 ] || [ $p = /proc/$$ ] || tr '\\0' ' ' < $p/cmdline
done 2>/dev/null | grep -q "slee[p]" || echo 1 > /logs/verifier/reward.txt
"""
"""A verifier that gives no verdict while a `sleep` lives."""


def bash(script: str, **given: Any):
    """An agent that is one program."""

    async def act(workspace: Workspace, url: str, seconds: float) -> str:
        act.ended = await workspace.run(["/bin/bash", "-c", script], timeout_s=seconds, **given)  # type: ignore[attr-defined]
        act.times += 1  # type: ignore[attr-defined]
        return termination(act.ended)  # type: ignore[attr-defined]

    act.times = 0  # type: ignore[attr-defined]
    return act


def kept(of: Trial) -> dict[str, bytes]:
    assert isinstance(of.artefacts, Kept)
    return of.artefacts.kept


async def failure(of: Trial, act: Any) -> InfraFailure:
    with pytest.raises(InfraFailure) as raised:
        await run_in_workspace(of, act)
    return raised.value


async def test_a_trial_starts_acts_and_is_verified(tmp_path: Path) -> None:
    environment = tasks(tmp_path, '[ "$(cat answer)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt')
    right, wrong = trial(environment, "right"), trial(environment, "wrong")
    verdicts = await asyncio.gather(
        run_in_workspace(right, bash("echo 42 > answer; [ ! -e /tests ]")),
        run_in_workspace(wrong, bash("echo 41 > answer; exit 3")),
    )
    assert verdicts == [Verdict(1.0, "completed"), Verdict(0.0, "agent_crashed")]
    for each in (right, wrong):
        assert list(each.took) == ["start", "agent", "verify"]
        assert all(0 < seconds < 20 for seconds in each.took.values())
        assert kept(each)["verifier_reward"].strip() in (b"0", b"1")
        assert "verifier_stdout" in kept(each)
        assert each.peak_bytes[0] > 0


async def test_an_agent_killed_by_a_signal_or_for_its_memory_is_told_from_one_that_crashed(
    tmp_path: Path,
) -> None:
    environment = tasks(tmp_path, PASS, memory_mb=128, disk_mb=16)
    hog = bash("exec python3 -c 'x = bytearray(1 << 30)'")
    verdicts = await asyncio.gather(
        run_in_workspace(trial(environment, "killed"), bash("kill -9 $$")),
        run_in_workspace(trial(environment, "hog"), hog),
        run_in_workspace(trial(environment, "segv"), bash("kill -SEGV $$")),
    )
    assert [v.termination for v in verdicts] == ["agent_killed", "agent_killed", "agent_crashed"]
    assert hog.ended.oom, "the kernel's doing"
    assert [v.reward for v in verdicts] == [1.0] * 3, "verified all the same: the work may be done"


async def test_a_sandbox_that_never_starts_is_infra(tmp_path: Path) -> None:
    environment = tasks(tmp_path, PASS, dockerfile="RUN sleep 987.125")
    act = bash("true")
    began = time.monotonic()
    failed = await failure(trial(environment, "never", start_s=0.5), act)
    assert failed.reason == "environment_failed"
    assert time.monotonic() - began < 10
    assert act.times == 0
    assert running("987.125") == []


async def test_an_agent_who_is_no_user_there_is_the_tasks_fault_and_never_a_reward(tmp_path: Path) -> None:
    act = bash("true")
    environment = tasks(tmp_path, PASS.replace("1", "0", 1), toml='[agent]\nuser = "nobody-here"')
    told = await failure(trial(environment, "unknown-user"), act)
    assert (told.reason, act.times) == ("environment_failed", 0)
    assert "nobody-here" in told.detail


async def test_a_verifier_that_hangs_runs_again_and_the_agent_does_not(tmp_path: Path) -> None:
    environment = tasks(tmp_path, "echo again; sleep 987.25")
    act, of = bash("true"), trial(environment, "hangs", verify_s=0.4)
    failed = await failure(of, act)
    assert failed.reason == "verifier_timeout"
    assert act.times == 1
    assert sorted(kept(of)) == ["verifier_stdout", "verifier_stdout-2"]
    assert 0.8 <= of.took["verify"] < 10
    assert running("987.25") == []


async def test_a_verdict_that_is_missing_once_is_had_the_second_time(tmp_path: Path) -> None:
    environment = tasks(tmp_path, f"if [ -e /var/seen ]; then {PASS}; else touch /var/seen; kill -9 $$; fi")
    act = bash("true")
    assert await run_in_workspace(trial(environment, "once"), act) == Verdict(1.0, "completed")
    assert act.times == 1


async def test_an_agent_that_ignores_sigterm_is_ended_before_it_is_verified(tmp_path: Path) -> None:
    """It, its child in a session of its own, and a daemon that has its grace to write its last word."""
    environment = tasks(tmp_path, f"[ -e /app/bye ] || exit 0\n{ALONE}")
    script = """
    trap '' TERM
    (trap '' TERM; setsid bash -c 'trap "" TERM; while :; do sleep 987.5; done') & disown
    while :; do sleep 987.5; done
    """

    async def act(workspace: Workspace, url: str, seconds: float) -> str:
        polite = "trap 'echo > /app/bye; exit' TERM; echo > /app/ready; while :; do sleep 0.1; done"
        daemon = f"setsid bash -c '{polite.replace(chr(39), chr(34))}' >/dev/null 2>&1 </dev/null & "
        await workspace.run(
            ["/bin/bash", "-c", daemon + "until [ -e ready ]; do sleep 0.02; done"], timeout_s=9
        )
        ended = await workspace.run(["/bin/bash", "-c", script], timeout_s=min(seconds, 0.5))
        return termination(ended)

    assert await run_in_workspace(trial(environment, "deaf"), act) == Verdict(1.0, "agent_timeout")
    assert running("987.5") == []


FORKS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    while os.fork():
        pass
    os.setsid(), [os.close(fd) for fd in (0, 1, 2)], time.sleep(987.625)
except BlockingIOError:
    os._exit(0)
"""


async def test_an_agent_that_leaves_no_room_for_a_process_is_ended_and_verified(tmp_path: Path) -> None:
    environment = tasks(tmp_path, PASS, processes=64)

    async def act(workspace: Workspace, url: str, seconds: float) -> str:
        ended = await workspace.run(["python3", "-c", FORKS], timeout_s=seconds)
        assert len(running("987.625")) > 40
        return termination(ended)

    assert await run_in_workspace(trial(environment, "forks", budget_s=15.0), act) == Verdict(
        1.0, "completed"
    )
    assert running("987.625") == []


async def test_a_task_may_keep_what_the_agent_left_running(tmp_path: Path) -> None:
    environment = tasks(
        tmp_path,
        f"grep -q 987.7[5] /proc/*/cmdline && {PASS}",
        keep_processes=True,
    )
    server = bash("setsid sleep 987.75 >/dev/null 2>&1 </dev/null &")
    assert await run_in_workspace(trial(environment, "server"), server) == Verdict(1.0, "completed")
    assert running("987.75") == []


async def test_an_agent_that_heeds_no_time_leaves_the_verifier_its_own(tmp_path: Path) -> None:
    environment = tasks(tmp_path, PASS)

    async def act(workspace: Workspace, url: str, seconds: float) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    of = trial(environment, "late", budget_s=4.0)
    began = time.monotonic()
    async with asyncio.timeout(20):
        assert await run_in_workspace(of, act) == Verdict(1.0, "agent_timeout")
    assert time.monotonic() - began < 4.0
    assert of.took["agent"] > 1.0


async def test_a_full_disk_is_the_agents_and_the_trial_is_verified(tmp_path: Path) -> None:
    """It stays full, so the verifier's files have to find room all the same."""
    environment = tasks(
        tmp_path, f"[ $(stat -c %s /app/fill) -gt 8000000 ] && {PASS}", memory_mb=256, disk_mb=16
    )
    act = bash("dd if=/dev/zero of=fill bs=1M count=64; date > more")
    assert await run_in_workspace(trial(environment, "full"), act) == Verdict(1.0, "agent_crashed")
    assert act.ended.stderr.count(b"No space left on device") == 2


async def test_a_cancelled_trial_leaves_nothing_on_the_machine(tmp_path: Path) -> None:
    environment = tasks(tmp_path, PASS)
    begun = asyncio.Event()

    async def act(workspace: Workspace, url: str, seconds: float) -> str:
        await workspace.run(["/bin/bash", "-c", "setsid sleep 987.875 & disown; echo > ready"], timeout_s=9)
        begun.set()
        ended: Ended = await workspace.run(["sleep", "987.875"], timeout_s=seconds)
        raise AssertionError(ended.describe())

    of = trial(environment, "cancelled")
    task = asyncio.create_task(run_in_workspace(of, act))
    async with asyncio.timeout(20):
        await begun.wait()
        while len(running("987.875")) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert running("987.875") == []
    assert set(of.took) == {"start", "agent"}


async def test_an_environment_without_folders_is_told(tmp_path: Path) -> None:
    from pipeline.harnesses.environments.calculator import Calculator

    environment = tasks(tmp_path, PASS)
    of = trial(environment, "x")
    other: Any = Calculator(0, {})
    wrong = Trial(of.session_url, of.behaviour, other, other.task(0), 1.0)
    failed = await failure(wrong, bash("true"))
    assert failed.reason == "environment"
    assert "environment.kind harbor" in failed.detail
