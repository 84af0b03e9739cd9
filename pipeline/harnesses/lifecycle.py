"""A trial's life in a workspace: start, agent, end of the agent's processes, verification, end of the workspace.

Promises:
- all of it ends within `trial.deadline`; the phases share that time and do not add up past it. Who is late takes it from
  the agent: the verifier's seconds are set aside before the agent begins;
- no process that the agent started lives while its work is verified (but for a task that asks for that), and none of the
  workspace after it, also when the caller is cancelled;
- a verifier that gives no verdict runs again, if there is time; the agent never does;
- what the sandbox or the verifier could not do is an `InfraFailure`, never a reward;
- `trial.took` has the seconds of each phase that began, and `trial.peak_bytes` the workspace's memory, also on failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import urlsplit

from pipeline.harnesses.base import InfraFailure, Trial, Verdict
from pipeline.harnesses.clock import Clock, clocked, close_s
from pipeline.harnesses.environments.folders import FolderEnvironment, FolderTask
from pipeline.harnesses.history import take
from pipeline.harnesses.verifier import VerifierFailed, verify
from pipeline.harnesses.workspaces.base import Ended, EndsProcesses, Mount, Workspace, WorkspaceFailed

Act = Callable[[Workspace, str, float], Awaitable[str]]
"""(workspace, session URL as the agent writes it, seconds) -> termination. It may raise `InfraFailure`."""

_ROOT_S = 20.0
_SPARE = "/var/.packtrain-spare"
_SPARE_BYTES = 4 << 20
"""Of the disk, kept while the agent works and freed for the verifier: an agent that fills the disk is verified all the same."""
_LONGEST_S = 7 * 86400.0
"""Of a trial without a deadline, which is one by hand."""

_SIGNAL_ALL = """
kill -$1 -1 2>/dev/null
for p in /proc/[0-9]*; do
  [ $p = /proc/1 ] || [ $p = /proc/$$ ] || ! read -r s < $p/stat || case ${s##*) } in [ZX]*) ;; *) exit 1 ;; esac
done 2>/dev/null
exit 0
"""
"""Signals every process but pid 1 and itself, and ends with 1 while one is left that is no zombie. It starts no process: the
agent may have left no room for one."""
_POLL_S = 0.05
_DEAD_S = 5.0
"""Within which what was killed is gone."""


async def run_in_workspace(
    trial: Trial, act: Act, mounts: tuple[Mount, ...] = (), *, network: bool = True
) -> Verdict:
    """Runs `act` in a workspace of the trial's task and verifies what it left. `network` False: no program in the workspace
    reaches anything, for an agent that runs outside; `act` gets the session URL as it is. Raises `InfraFailure`.
    """
    try:
        return await _run(trial, act, mounts, network)
    except WorkspaceFailed as error:
        raise InfraFailure("environment_failed", str(error)) from error
    except VerifierFailed as error:
        raise InfraFailure(error.reason, error.detail) from error


async def _run(trial: Trial, act: Act, mounts: tuple[Mount, ...], network: bool) -> Verdict:
    environment, task = folder(trial)
    clock = Clock(trial.phases, task)
    url = trial.session_url
    async with contextlib.AsyncExitStack() as stack:
        with clocked(trial.took, "start"):
            spec = environment.spec(task, trial.name, _peer(url) if network else None, mounts)
            start_s = clock.start_s(_left(trial))
            if start_s <= 0:
                raise InfraFailure("budget_spent", f"{_left(trial):.1f} s are left for all phases")
            workspace = await stack.enter_async_context(
                environment.workspaces.open(replace(spec, start_s=start_s))
            )
        try:
            return await _in(workspace, trial, task, clock, act, workspace.reach(url) if network else url)
        finally:
            with contextlib.suppress(WorkspaceFailed):
                trial.peak_bytes.append(await workspace.peak_bytes())


async def _in(
    workspace: Workspace, trial: Trial, task: FolderTask, clock: Clock, act: Act, url: str
) -> Verdict:
    with clocked(trial.took, "start"):
        # Who is no user there would be told so at each command, and that looks like what a policy did.
        await _may_run(workspace, task.agent_user)
        history = await take(workspace) if task.hide_git else None
        await _as_root(workspace, f"head -c {_SPARE_BYTES} /dev/zero > {_SPARE} || rm -f {_SPARE}")
    left = _left(trial)
    seconds, slack = clock.agent_s(left), clock.slack_s(left)
    if seconds <= 0:
        raise InfraFailure("budget_spent", f"the start left {left:.1f} s, the verifier's included")
    with clocked(trial.took, "agent"):
        reason = await _acted(workspace, act, url, seconds, slack / 2)
        if not task.keep_processes:
            await end_processes(workspace, slack / 4)
    with clocked(trial.took, "verify"):
        await _as_root(workspace, f"rm -f {_SPARE}")
        if history is not None:
            await history.restore(workspace)
        left = _left(trial)
        left -= close_s(left)
        reward = await verify(
            workspace,
            task,
            timeout_s=clock.verify_s(left),
            artefacts=trial.artefacts,
            deadline=time.monotonic() + left,
        )
    return Verdict(reward, reason)


async def _may_run(workspace: Workspace, user: str) -> None:
    ended = await workspace.run(["/bin/bash", "-c", ":"], timeout_s=_ROOT_S, user=user, output_bytes=4096)
    if ended.returncode:
        raise WorkspaceFailed(
            f"user {user or 'of the Dockerfile'} runs no program in the workspace: it {ended.describe()}"
        )


async def _acted(workspace: Workspace, act: Act, url: str, seconds: float, slack_s: float) -> str:
    """The agent's termination. One that does not heed its seconds is stopped."""
    limit = asyncio.timeout(seconds + slack_s)
    try:
        async with limit:
            return await act(workspace, url, seconds)
    except TimeoutError as error:
        if not limit.expired():
            raise InfraFailure("environment", f"the agent met a time-out of its own: {error!r}") from error
        return "agent_timeout"


async def end_processes(workspace: Workspace, grace_s: float) -> None:
    """Ends every process in the workspace: SIGTERM, and SIGKILL for what lives on after `grace_s`. Raises WorkspaceFailed."""
    if isinstance(workspace, EndsProcesses):
        await workspace.end_processes(grace_s)
        return
    for signal, within_s in (("TERM", grace_s), ("KILL", _DEAD_S)):
        until = time.monotonic() + within_s
        ended = await _as_root(workspace, _SIGNAL_ALL, signal)
        while ended.returncode and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
            ended = await _as_root(workspace, _SIGNAL_ALL, "0" if signal == "TERM" else signal)
        if not ended.returncode:
            return
    raise WorkspaceFailed(f"processes of the agent cannot be ended: what should end them {ended.describe()}")


async def _as_root(workspace: Workspace, script: str, *arguments: str) -> Ended:
    return await workspace.run(
        ["/bin/bash", "-c", script, "bash", *arguments],
        timeout_s=_ROOT_S,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        user="root",
        output_bytes=4096,
    )


def folder(trial: Trial) -> tuple[FolderEnvironment, FolderTask]:
    """The trial's environment and task as those of task folders; raises `InfraFailure` where they are not."""
    environment, task = trial.environment, trial.task
    if isinstance(environment, FolderEnvironment) and isinstance(task, FolderTask):
        return environment, task
    raise InfraFailure("environment", needs_folders(environment))


def needs_folders(environment: object) -> str:
    """What is wrong with an environment without task folders; empty where it has them."""
    if isinstance(environment, FolderEnvironment):
        return ""
    return (
        f"the environment {type(environment).__name__} has no task folders, which this harness needs: "
        "use environment.kind harbor, or one with `workspaces` and `spec`"
    )


def _left(trial: Trial) -> float:
    return min(_LONGEST_S, max(0.0, trial.deadline - time.monotonic()))


def _peer(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
