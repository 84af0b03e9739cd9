"""Each scaffold, by the harbor harness, solves a task in a workspace: CI plays pi and mini-swe-agent, `make scaffolds` all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.harnesses.scaffolds import NAMES
from tests.scaffolds.install import SCAFFOLDS
from tests.scaffolds.played import check_texts, check_tokens
from tests.scaffolds.solutions import solving
from tests.scaffolds.solved import TASKS, solved

TASK = "csv-report"


@pytest.mark.parametrize("name", NAMES)
async def test_a_scaffold_solves_a_task_and_its_tokens_are_the_sampled_ones(
    name: str, installed: Callable[[str], None]
) -> None:
    installed(name)
    script = (TASKS / TASK / "solution/solve.sh").read_text()
    run = await solved({"agent": name}, solving(name, script), TASK, memory_mb=3072)
    said = f"{run.wire.statuses}\n{run.kept.text('agent_stdout')[-2000:]}\n{run.kept.text('agent_stderr')[-2000:]}"
    assert run.verdict.termination == "completed", said
    assert run.verdict.reward == 1.0, f"{said}\n{run.kept.text('verifier_stdout')}"
    assert set(run.wire.statuses) == {200}
    assert run.labels == ["main"]
    told = [text for _, text in run.policy.turns_of(run.policy.emissions[0].prompt)]
    assert any(run.trial.task.prompt.strip() in text for text in told)
    check_tokens(run)
    check_texts(run)
    posted = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
    assert run.wire.calls[0].path.partition("?")[0].endswith(posted[SCAFFOLDS[name].wires[0]])
