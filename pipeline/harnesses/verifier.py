"""Runs a task's verifier in the workspace that the agent left, and reads its reward.

Promises:
- the verifier's files come into the workspace only now, in the place of whatever lies there, and a reward file of the agent's
  is removed first;
- the verifier is run by /bin/bash itself, with the environment of the task, never one of the agent's: a `bash` in a folder of
  PATH decides nothing, and folders of PATH that the agent's user may write to are left out, where that user is not root;
- a verdict is what a verifier wrote that came to its end. A missing one (hung, killed, nothing written, no number) makes the
  verifier run again, never the agent; then it raises. A missing verdict is never a reward;
- what is done before a run, and the run, end by the deadline.

The files are Harbor's: tests/ at /tests, the reward in /logs/verifier/reward.json, else in /logs/verifier/reward.txt.
What it does not close: an agent that is root in the workspace can change /bin/bash itself. Give such tasks an `[agent] user`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any, cast

from pipeline.harnesses.base import Artefacts
from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.scripts import bash
from pipeline.harnesses.workspaces.base import Ended, Workspace, WorkspaceFailed
from schemas.facts import MAX_REWARD

TESTS = "/tests"
LOGS = "/logs/verifier"
REWARD_BYTES = 64 << 10
OUTPUT_BYTES = 256 << 10
"""Of the verifier's output that is kept: its end."""
_SETUP_S = 60.0
_LONGEST_S = 7 * 86400.0
"""Without a deadline, which is a verification by hand."""
_KILLED = frozenset({128 + 9, 128 + 15})
_ROOT = frozenset({"", "root", "0"})

# /logs and /tests may be links or files by now: what they lead to is neither removed nor written to. The workdir may be gone.
_CLEAR = """
set -e
if [ -L /logs ] || [ ! -d /logs ]; then rm -f /logs; fi
rm -rf /tests /logs/verifier
mkdir -p /logs/verifier
[ -d "$1" ] || { rm -f "$1"; mkdir -p "$1"; }
"""
_HAND_OVER = """
set -e
chmod -R a+rX /tests
[ -z "$1" ] || chown "$1" /logs/verifier
"""
# As the agent's user: the folders of PATH that it cannot write to, and could not before it said that it cannot.
_KEPT_PATH = """
IFS=:
for folder in $PATH; do [ -w "$folder" ] || [ -O "$folder" ] || kept="$kept:$folder"; done
printf %s "${kept#:}"
"""


class VerifierFailed(Exception):
    """No verdict. `reason`: verifier_timeout, verifier_crashed, no_reward or bad_reward."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


async def verify(
    workspace: Workspace,
    task: FolderTask,
    *,
    timeout_s: float,
    artefacts: Artefacts,
    deadline: float = math.inf,
    attempts: int = 2,
) -> float:
    """The reward. One run takes `timeout_s` at most, all of them end by `deadline` on `time.monotonic`'s clock.

    Artefacts: verifier_stdout (stderr with it) and verifier_reward; of run n after the first verifier_stdout-n, .... Raises
    `VerifierFailed` with the last run's reason, and `WorkspaceFailed`.
    """
    environment = dict(task.verifier_env)
    failed = VerifierFailed("verifier_timeout", "no time was left to run the verifier")
    for attempt in range(1, attempts + 1):
        if _left(deadline) <= 0:
            break
        if attempt == 1 and task.agent_user not in _ROOT and "PATH" not in environment:
            environment["PATH"] = await _path(workspace, task.agent_user, deadline)
        suffix = "" if attempt == 1 else f"-{attempt}"
        try:
            return await _once(workspace, task, environment, timeout_s, deadline, artefacts, suffix)
        except VerifierFailed as error:
            failed = error
    raise failed


async def _once(
    workspace: Workspace,
    task: FolderTask,
    environment: Mapping[str, str],
    timeout_s: float,
    deadline: float,
    artefacts: Artefacts,
    suffix: str,
) -> float:
    await _prepare(workspace, deadline, _CLEAR, workspace.workdir)
    try:
        async with asyncio.timeout(_left(deadline)):
            await workspace.put(task.folder / "tests", TESTS)
    except TimeoutError as error:
        raise VerifierFailed("verifier_timeout", "its files were not brought in within its time") from error
    await _prepare(workspace, deadline, _HAND_OVER, task.verifier_user)
    script = bash(task.folder / "tests" / "test.sh", f"{TESTS}/test.sh")
    ended = await workspace.run(
        # One stream for both outputs keeps them in order.
        ["/bin/bash", "-c", 'exec "$@" 2>&1', "bash", *script],
        timeout_s=min(timeout_s, _left(deadline)),
        env=environment,
        user=task.verifier_user,
        output_bytes=OUTPUT_BYTES,
    )
    await artefacts.save(f"verifier_stdout{suffix}", ended.stdout + ended.stderr)
    found = await _reward_file(workspace)
    if found is not None:
        await artefacts.save(f"verifier_reward{suffix}", found[1])
    return reward(ended, found)


def reward(ended: Ended, found: tuple[str, bytes] | None) -> float:
    """The verdict of a run that ended so and left this reward file, (name, content). Raises `VerifierFailed`."""
    if ended.stopped == "time":
        raise VerifierFailed("verifier_timeout", f"the verifier {ended.describe()}")
    if ended.stopped or ended.returncode in _KILLED:
        raise VerifierFailed("verifier_crashed", f"the verifier {ended.describe()}")
    if found is None:
        raise VerifierFailed(
            "no_reward",
            f"the verifier wrote neither reward.json nor reward.txt in {LOGS}; it {ended.describe()}; "
            f"stdout ends: {ended.stdout[-200:]!r}",
        )
    name, content = found
    try:
        value = _from_json(content) if name.endswith(".json") else float(content)
    except (ValueError, OverflowError, RecursionError) as error:
        raise VerifierFailed("bad_reward", f"{name} holds {content[:100]!r}: {error}") from error
    if not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise VerifierFailed(
            "bad_reward", f"{name} holds {value}: a reward is a finite number of at most {MAX_REWARD:g}"
        )
    return value


def _from_json(content: bytes) -> float:
    # Every number of it, as Harbor does: one that is none makes the whole file a bad one.
    found: Any = json.loads(content)
    if not isinstance(found, dict) or not found:
        raise ValueError("it is no object with a reward")
    rewards = cast(dict[str, Any], found)
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name!r} is no finite number")
    if "reward" in rewards:
        return float(rewards["reward"])
    if len(rewards) > 1:
        raise ValueError(f"it has the rewards {sorted(rewards)} and none is called 'reward'")
    return float(next(iter(rewards.values())))


async def _reward_file(workspace: Workspace) -> tuple[str, bytes] | None:
    for name in ("reward.json", "reward.txt"):
        try:
            return name, await workspace.get(f"{LOGS}/{name}", REWARD_BYTES)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise VerifierFailed("bad_reward", f"{name}: {error}") from error
    return None


def _left(deadline: float) -> float:
    return min(_LONGEST_S, max(0.0, deadline - time.monotonic()))


async def _path(workspace: Workspace, user: str, deadline: float) -> str:
    limit_s = min(_SETUP_S, _left(deadline))
    ended = await workspace.run(["/bin/bash", "-c", _KEPT_PATH], timeout_s=limit_s, user=user)
    if ended.returncode != 0 or ended.stopped:
        raise WorkspaceFailed(f"PATH cannot be told in the workspace: the program {ended.describe()}")
    return ended.stdout.decode(errors="surrogateescape")


async def _prepare(workspace: Workspace, deadline: float, script: str, *arguments: str) -> None:
    limit_s = min(_SETUP_S, _left(deadline))
    ended = await workspace.run(
        ["/bin/sh", "-c", script, "sh", *arguments], timeout_s=limit_s, cwd="/", user="root"
    )
    if ended.returncode != 0 or ended.stopped:
        raise WorkspaceFailed(f"the workspace cannot be made ready for the verifier: it {ended.describe()}")
