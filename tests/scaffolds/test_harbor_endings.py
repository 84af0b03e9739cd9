"""How trials of the harbor harness end: by the scaffold's exit, by what it printed, and by what became of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engines.base import EngineUnavailable
from pipeline.harnesses.base import InfraFailure
from pipeline.harnesses.scaffolds import pi
from pipeline.harnesses.scaffolds.base import Job, Launch
from tests.scaffolds.plays import in_turn
from tests.scaffolds.policy import call
from tests.scaffolds.solved import SESSION, solved, stand

TASK = "tiny"
LOOK = call("bash", command="ls")
ASKING = """
for n in 1 2 3; do
    python3 -c 'import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1] + "/chat/completions", sys.argv[2].encode(), {"content-type": "application/json"})).read()' \\
        "$1" "{\\"model\\": \\"policy\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$n\\"}]}" || failed=1
done
exit ${failed:-0}
"""
"""Asks for three turns, and fails where one failed."""


@pytest.fixture(autouse=True)
def _pi(installed: Callable[[str], None]) -> None:
    installed("pi")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A task whose verifier wants the file `done`."""
    folder = tmp_path / "tasks" / TASK
    for name, text in {
        "instruction.md": "- Make the file `done`.",
        "task.toml": 'version = "1.0"\n[agent]\nuser = "agent"\n',
        "environment/Dockerfile": "FROM scratch\nWORKDIR /app\nRUN chmod 777 /app\n",
        "tests/test.sh": "test -e /app/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "touch done\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the agent a shell script."""

    def make(text: str, **changed: object) -> None:
        def launch(job: Job) -> Launch:
            argv = ("/bin/sh", "-c", text, "agent", job.url)
            return Launch(argv, job.instruction, {"OURS": "1"}, {".own/file": "of its home"})

        monkeypatch.setattr(pi, "SCAFFOLD", replace(pi.SCAFFOLD, launch=launch, **changed))

    return make


async def test_the_agent_has_a_home_the_instruction_and_its_workdir_as_the_task_s_user(
    script: Callable[..., None], tasks: Path
) -> None:
    script(
        'cat; cat ~/.own/file; echo "$HOME $OURS $EXTRA"; pwd; id -un; stat -c %a ~; echo "$1" >&2; touch done'
    )
    run = await solved({"agent": "pi", "env": {"EXTRA": "2"}}, in_turn("x"), TASK, tasks=tasks)
    assert run.verdict.termination == "completed"
    assert run.verdict.reward == 1.0
    said = "- Make the file `done`.of its home/tmp/.agent 1 2\n/app\nagent\n700\n"
    assert run.kept.text("agent_stdout") == said
    assert f"/s/{SESSION}/***/v1" in run.kept.text("agent_stderr")


@pytest.mark.parametrize(
    ("text", "reason", "reward"),
    [
        ("touch done; exit 3", "agent_crashed", 1.0),
        ("kill -SEGV $$", "agent_crashed", 0.0),
        ("kill -KILL $$", "agent_killed", 0.0),
        ("touch done; sleep 600", "agent_timeout", 1.0),
    ],
)
async def test_an_exit_is_read_and_the_work_verified(
    text: str, reason: str, reward: float, script: Callable[..., None], tasks: Path
) -> None:
    script(text)
    limit = 1.0 if reason == "agent_timeout" else 60.0
    async with stand({"agent": "pi"}, in_turn("x"), TASK, tasks=tasks, agent_s=30) as ready:
        ready.trial = replace(ready.trial, phases=replace(ready.trial.phases, agent_s=limit))
        verdict = await ready.run()
    assert (verdict.termination, verdict.reward) == (reason, reward)


async def test_what_the_scaffold_needs_and_the_task_lacks_is_named(
    script: Callable[..., None], tasks: Path
) -> None:
    script("true", commands=("sh", "no-such-program"))
    with pytest.raises(InfraFailure, match="pi needs no-such-program") as failed:
        await solved({"agent": "pi"}, in_turn("x"), TASK, tasks=tasks)
    assert failed.value.reason == "environment_failed"


async def test_a_session_that_is_lost_is_no_failure_of_the_agent_s(tasks: Path) -> None:
    """pi tries again, gives up, and exits with 0."""
    async with stand(
        {"agent": "pi", "settings": {"retry": {"baseDelayMs": 10, "maxRetries": 1}}},
        in_turn(LOOK),
        TASK,
        tasks=tasks,
    ) as ready:
        gone: list[asyncio.Task[None]] = []

        def lose() -> None:
            if len(ready.wire.calls) == 2 and not gone:
                gone.append(asyncio.create_task(ready.runner.cleanup()))

        ready.policy.on_portion = lose
        with pytest.raises(InfraFailure) as failed:
            await ready.run()
        assert failed.value.reason == "agent_loop_unreachable"
        assert "pi" in ready.kept.text("agent_stdout") or ready.kept.data


async def test_a_closed_session_is_told_from_a_crash(script: Callable[..., None], tasks: Path) -> None:
    script("exit 1")
    async with stand(
        {"agent": "pi", "model_limits": {"context": 1000}}, in_turn("x"), TASK, tasks=tasks
    ) as ready:
        other = replace(ready.trial, session_url=ready.trial.session_url.replace(SESSION, "run-2"))
        ready.trial = other
        with pytest.raises(InfraFailure) as failed:
            await ready.run()
    assert failed.value.reason == "session_lost"


async def test_an_engine_that_stays_away_is_owed_to_the_end(script: Callable[..., None], tasks: Path) -> None:
    """The harness says crashed; that the engine owed the answer is the session's to know."""
    script(ASKING)
    async with stand({"agent": "pi"}, in_turn("x"), TASK, tasks=tasks) as ready:
        ready.policy.trouble = {n: EngineUnavailable("no replica") for n in range(2, 100)}
        verdict = await ready.run()
        assert ready.wire.statuses == [200, 503, 503]
        assert ready.session.owed
    assert verdict.termination == "agent_crashed"


async def test_turns_that_are_used_up_end_the_agent(script: Callable[..., None], tasks: Path) -> None:
    """The session says for which limit."""
    script(ASKING)
    async with stand({"agent": "pi"}, in_turn("x"), TASK, tasks=tasks, max_turns=2) as ready:
        verdict = await ready.run()
        assert ready.wire.statuses == [200, 200, 400]
        assert ready.session.refused == "max_turns"
    assert verdict.termination == "agent_crashed"


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_the_task_s_own_solution_and_nothing(agent: str, reward: float, tasks: Path) -> None:
    run = await solved({"agent": agent}, in_turn("x"), TASK, tasks=tasks)
    assert run.verdict.reward == reward
    assert run.verdict.termination == "completed"
    assert run.wire.exchanges == []
