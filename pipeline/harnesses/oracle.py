"""A task's own solution, run in its workspace: what shows that a task can be solved."""

from __future__ import annotations

from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.scripts import bash
from pipeline.harnesses.workspaces.base import Ended, Workspace

SOLUTION = "/solution"


async def oracle(workspace: Workspace, task: FolderTask, timeout_s: float) -> Ended:
    """Puts solution/ at /solution and runs its solve.sh as the agent's user, in the workdir.

    Raises ValueError when the task has none, or one that is no script of a shell; `WorkspaceFailed`.
    """
    script = task.folder / "solution" / "solve.sh"
    if not script.is_file():
        raise ValueError(f"task {task.name!r} has no solution: {script} is missing")
    argv = bash(script, f"{SOLUTION}/solve.sh")
    await workspace.put(script.parent, SOLUTION)
    return await workspace.run(argv, timeout_s=timeout_s, env=task.solution_env, user=task.agent_user)
