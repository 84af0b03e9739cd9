"""The tasks of examples/tasks: their own solution is worth 1, doing nothing is worth 0, each in an overlay workspace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pipeline.harnesses.environments.harbor import HarborTasks
from pipeline.harnesses.history import take
from pipeline.harnesses.oracle import oracle
from pipeline.harnesses.verifier import verify
from tests.lifecycle_parts import Kept
from tests.workspace_parts import refusal

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

TASKS = Path(__file__).parents[2] / "examples" / "tasks"
AT_ONCE = 4
ANSWER = b"price += max(150"
"""Of git-regression, in a commit before the last."""


async def rewards(
    tasks: HarborTasks, index: int, slots: asyncio.Semaphore
) -> tuple[str, float, float, bytes]:
    """(name, reward of doing nothing, reward of the solution, what the verifier said of it): in one workspace."""
    task = tasks.task(index)
    kept = Kept()
    async with slots, tasks.workspaces.open(tasks.spec(task, f"example-{index}", None, ())) as workspace:
        nothing = await verify(workspace, task, timeout_s=60, artefacts=Kept())
        leaks = task.name == "git-regression"
        assert not leaks or ANSWER in (await workspace.run(["git", "log", "-p"], timeout_s=30)).stdout
        history = await take(workspace)
        assert history.paths == (("app/.git",) if leaks else ())
        if leaks:
            log = (await workspace.run(["git", "log", "-p"], timeout_s=30)).stdout
            assert log.count(b"Start of the task") == 1
            assert ANSWER not in log
        done = await oracle(workspace, task, timeout_s=60)
        assert done.returncode == 0, (task.name, done.describe())
        await history.restore(workspace)
        solved = await verify(workspace, task, timeout_s=60, artefacts=kept, deadline=time.monotonic() + 60)
    return task.name, nothing, solved, kept.kept["verifier_stdout"]


async def test_solutions_pass_and_nothing_fails() -> None:
    tasks = HarborTasks(0, {"tasks": str(TASKS)})
    slots = asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(*(rewards(tasks, index, slots) for index in range(10)))
    assert {name: (nothing, solved) for name, nothing, solved, _ in found} == {
        path.name: (0.0, 1.0) for path in TASKS.iterdir() if path.is_dir()
    }, found


async def test_a_task_without_a_solution_says_so(tmp_path: Path) -> None:
    task = HarborTasks(0, {"tasks": str(TASKS)}).task(0)
    with pytest.raises(ValueError, match=r"solve\.sh is missing"):
        await oracle(None, type(task)(0, "", "", name="x", folder=tmp_path), 1.0)  # type: ignore[arg-type]  # not reached
