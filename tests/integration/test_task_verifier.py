"""A task's verifier, in overlay workspaces. All for real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.verifier import VerifierFailed, reward, verify
from pipeline.harnesses.workspaces.base import Ended, Workspace, WorkspaceFailed
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces
from tests.lifecycle_parts import Kept
from tests.workspace_parts import refusal, spec

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.asyncio(loop_scope="module"),
]

PASS = "echo 1 > /logs/verifier/reward.txt"
FIRST = "if mkdir /var/first 2>/dev/null; then {}; else " + PASS + "; fi"
"""A verifier that does something else at its first run in a workspace."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workspace(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workspace]:
    """Of no definition, shared: /app is emptied by who uses it."""
    async with OverlayWorkspaces().open(spec("verified", tmp_path_factory.mktemp("none"))) as opened:
        yield opened


async def sh(workspace: Workspace, script: str, user: str = "root", cwd: str = "") -> str:
    """Output of a script that must succeed."""
    ended = await workspace.run(["/bin/bash", "-ec", script], timeout_s=30, user=user, cwd=cwd)
    assert ended.returncode == 0, ended.describe()
    return ended.stdout.decode()


def task(folder: Path, test: str, first: str = "#!/bin/bash") -> FolderTask:
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text(f"{first}\n{test}\n")
    return FolderTask(0, "", "", name="task", folder=folder)


async def verified(workspace: Workspace, task: FolderTask, timeout_s: float = 20.0) -> tuple[float, Kept]:
    kept = Kept()
    await sh(workspace, "rm -rf /var/first")
    return await verify(workspace, task, timeout_s=timeout_s, artefacts=kept), kept


async def failed(
    workspace: Workspace, task: FolderTask, timeout_s: float = 20.0, deadline: float = float("inf")
) -> tuple[VerifierFailed, Kept]:
    kept = Kept()
    with pytest.raises(VerifierFailed) as told:
        await verify(workspace, task, timeout_s=timeout_s, artefacts=kept, deadline=deadline)
    return told.value, kept


# The reward file.


def ended(returncode: int = 0, stopped: str = "") -> Ended:
    return Ended(returncode, b"said", b"", stopped)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("reward.txt", b"1", 1.0),
        ("reward.txt", b" -0.25\n", -0.25),
        ("reward.json", b'{"reward": 0.5}', 0.5),
        ("reward.json", b'{"speed": 3}', 3.0),
        ("reward.json", b'{"speed": 3, "reward": 2}', 2.0),
    ],
)
async def test_a_reward_is_read(name: str, content: bytes, value: float) -> None:
    assert reward(ended(), (name, content)) == value
    # A verifier's exit status is its own affair, as in Harbor.
    assert reward(ended(1), (name, content)) == value


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("reward.txt", b""),
        ("reward.txt", b"yes"),
        ("reward.txt", b"nan"),
        ("reward.txt", b"-inf"),
        ("reward.txt", b"1e10"),
        ("reward.txt", b"\xff"),
        ("reward.json", b"1"),
        ("reward.json", b"{}"),
        ("reward.json", b'{"reward": "1"}'),
        ("reward.json", b'{"reward": NaN}'),
        ("reward.json", b'{"reward": 1e400}'),
        ("reward.json", b'{"reward": 1, "speed": Infinity}'),
        ("reward.json", b'{"reward": 1' + b"0" * 400 + b"}"),
        ("reward.json", b'{"speed": 1, "size": 2}'),
        ("reward.json", b"[" * 30_000),
    ],
)
async def test_what_is_no_reward_is_never_one(name: str, content: bytes) -> None:
    with pytest.raises(VerifierFailed, match=name) as told:
        reward(ended(), (name, content))
    assert told.value.reason == "bad_reward"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (ended(137, "time"), "verifier_timeout"),
        (ended(137), "verifier_crashed"),
        (ended(143), "verifier_crashed"),
        (ended(137, "output"), "verifier_crashed"),
    ],
)
async def test_one_that_did_not_come_to_its_end_gives_no_verdict(how: Ended, reason: str) -> None:
    with pytest.raises(VerifierFailed) as told:
        reward(how, ("reward.txt", b"1"))
    assert told.value.reason == reason


# The verifier.


async def test_what_it_gets_and_what_is_kept_of_it(workspace: Workspace, tmp_path: Path) -> None:
    one = task(tmp_path, 'pwd; echo "$MODE"; id -un >&2; cat "$(dirname "$0")/data"; false; ' + PASS)
    (tmp_path / "tests" / "data").write_text("data\n")
    (tmp_path / "tests" / "data").chmod(0o600)
    found, kept = await verified(
        workspace, replace(one, verifier_env={"MODE": "strict"}, verifier_user="nobody")
    )
    assert found == 1.0
    assert kept.kept == {
        "verifier_stdout": b"/app\nstrict\nnobody\ndata\n",
        "verifier_reward": b"1\n",
    }


async def test_options_of_its_first_line_hold(workspace: Workspace, tmp_path: Path) -> None:
    error, _ = await failed(workspace, task(tmp_path, "false; " + PASS, "#!/bin/bash -e"))
    assert error.reason == "no_reward"


async def test_what_the_agent_planted_is_no_verdict(workspace: Workspace, tmp_path: Path) -> None:
    await sh(
        workspace,
        """
        rm -rf /app /home/planted; mkdir -p /home/planted/verifier
        echo 1 | tee /home/planted/verifier/reward.txt /home/planted/test.sh
        echo '{"reward": 1}' > /home/planted/verifier/reward.json
        rm -rf /logs /tests; ln -s /home/planted /logs; ln -s /home/planted /tests; ln -s /nowhere /app
        """,
        cwd="/",
    )
    error, kept = await failed(workspace, task(tmp_path, "ls /tests /logs/verifier; pwd"))
    assert error.reason == "no_reward"
    assert kept.kept["verifier_stdout"] == b"/logs/verifier:\n\n/tests:\ntest.sh\n/app\n"
    # What the links led to is as it was: the verifier's files are not there either.
    assert (
        await sh(workspace, "cat /home/planted/verifier/reward.txt; ls /home/planted")
        == "1\ntest.sh\nverifier\n"
    )


async def test_files_in_the_verifiers_way_are_removed(workspace: Workspace, tmp_path: Path) -> None:
    await sh(workspace, "rm -rf /logs /tests; echo 1 > /logs; echo 1 > /tests", cwd="/")
    assert (await verified(workspace, task(tmp_path, PASS)))[0] == 1.0


async def test_programs_in_the_agents_folders_decide_nothing(tmp_path: Path) -> None:
    one = task(tmp_path, "id -un; cat /tests/none")
    env = {"PATH": "/home/agent/bin:/usr/bin:/bin"}
    async with OverlayWorkspaces().open(replace(spec("shadowed", tmp_path / "none"), env=env)) as other:
        await sh(
            other, "mkdir -p /home/agent/bin; cp /bin/true /home/agent/bin/id; chown -R agent /home/agent"
        )
        await sh(other, "chmod 555 /home/agent/bin", user="agent")
        _, kept = await failed(other, replace(one, agent_user="agent", verifier_user="agent"))
        assert kept.kept["verifier_stdout"].startswith(b"agent\n")
        # That PATH is the task's, and nobody but the task's author writes there.
        _, kept = await failed(other, replace(one, agent_user="nobody"))
        assert kept.kept["verifier_stdout"].startswith(b"cat: ")


async def test_a_shell_of_the_agents_does_not_run_it(workspace: Workspace, tmp_path: Path) -> None:
    """The agent is root here, and the folder is the first one of PATH."""
    shell = "/usr/local/sbin/bash"
    await sh(workspace, f"printf '#!/bin/sh\\n{PASS}\\n' > {shell}; chmod 755 {shell}")
    error, _ = await failed(workspace, task(tmp_path, "echo done", "#!/usr/bin/env bash"))
    assert error.reason == "no_reward"
    await sh(workspace, f"rm {shell}")


@pytest.mark.parametrize(
    "trouble",
    ["kill -9 $$", "sleep 60", "exit 1", "echo nan > /logs/verifier/reward.txt", PASS + "; kill -9 $$"],
)
async def test_a_missing_verdict_makes_it_run_again(
    workspace: Workspace, tmp_path: Path, trouble: str
) -> None:
    test = 'echo "run $(ls -d /var/first 2>/dev/null)"; ' + FIRST.format("rm -rf /tests; " + trouble)
    found, kept = await verified(
        workspace, task(tmp_path, test), timeout_s=1.0 if "sleep" in trouble else 20.0
    )
    assert found == 1.0
    assert kept.kept["verifier_stdout"] == b"run \n"
    assert kept.kept["verifier_stdout-2"] == b"run /var/first\n"
    assert kept.kept["verifier_reward-2"] == b"1\n"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("trap '' TERM; sleep 60 & wait", "verifier_timeout"),
        ("kill -9 $$", "verifier_crashed"),
        ("echo done", "no_reward"),
        ("mkdir /logs/verifier/reward.txt", "no_reward"),
        ("head -c 70000 /dev/zero > /logs/verifier/reward.json", "bad_reward"),
    ],
)
async def test_no_verdict_after_all_is_told_by_its_reason(
    workspace: Workspace, tmp_path: Path, test: str, reason: str
) -> None:
    error, kept = await failed(workspace, task(tmp_path, test), timeout_s=0.5 if "sleep" in test else 20.0)
    assert error.reason == reason
    assert {"verifier_stdout", "verifier_stdout-2"} <= set(kept.kept)


async def test_all_runs_end_by_the_deadline(workspace: Workspace, tmp_path: Path) -> None:
    one = task(tmp_path, "sleep 60")
    began = time.monotonic()
    error, kept = await failed(workspace, one, deadline=began + 0.5)
    assert time.monotonic() - began < 15
    assert (error.reason, list(kept.kept)) == ("verifier_timeout", ["verifier_stdout"])
    error, kept = await failed(workspace, one, deadline=time.monotonic())
    assert (error.reason, kept.kept) == ("verifier_timeout", {})


class Slow:
    """A workspace whose programs, or whose files, never come to an end."""

    workdir = "/app"

    def __init__(self, what: str) -> None:
        self._what = what
        self.limits: list[float] = []

    async def run(self, argv: list[str], *, timeout_s: float, **_: object) -> Ended:
        self.limits.append(timeout_s)
        if self._what == "run":
            await asyncio.sleep(timeout_s)
            return Ended(137, b"", b"", "time")
        return Ended(0, b"/usr/bin", b"")

    async def put(self, source: Path, target: str) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("what", ["run", "put"])
async def test_what_is_done_before_a_run_ends_by_the_deadline_too(tmp_path: Path, what: str) -> None:
    slow = Slow(what)
    of = replace(task(tmp_path, PASS), agent_user="agent")
    async with asyncio.timeout(20):
        with pytest.raises((VerifierFailed, WorkspaceFailed)):
            await verify(
                slow,  # type: ignore[arg-type]
                of,
                timeout_s=20.0,
                artefacts=Kept(),
                deadline=time.monotonic() + 0.3,
            )
    assert all(limit <= 0.3 for limit in slow.limits)


async def test_the_end_of_a_long_output_is_kept(workspace: Workspace, tmp_path: Path) -> None:
    _, kept = await verified(workspace, task(tmp_path, "yes | head -c 1000000; echo last; " + PASS))
    assert len(kept.kept["verifier_stdout"]) <= 256 << 10
    assert kept.kept["verifier_stdout"].endswith(b"y\nlast\n")
