"""Tasks of examples/tasks in Harbor's docker environment: solved by their own solutions, and by agent scaffolds."""

from __future__ import annotations

import time

import pytest

from pipeline.harnesses.base import Phases, Trial, resolve
from pipeline.harnesses.environments.base import make_environment
from pipeline.harnesses.workspaces.harbor_environments import HarborEnvironments
from schemas.config import Behaviour, Environment
from tests.docker.conftest import left
from tests.scaffolds.install import missing
from tests.scaffolds.played import check_texts, check_tokens
from tests.scaffolds.solutions import solving
from tests.scaffolds.solved import TASKS, Kept, solved
from tests.scaffolds.wire import keep_bodies

DOCKER = "harbor:docker"
TASK = "csv-report"

pytestmark = pytest.mark.usefixtures("docker")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "task" in metafunc.fixturenames:
        metafunc.parametrize("task", sorted(path.name for path in TASKS.iterdir() if path.is_dir()))


@pytest.mark.timeout(300)
async def test_a_solution_passes_and_nothing_fails(task: str, docker: HarborEnvironments) -> None:
    options = {"tasks": str(TASKS), "names": [task], "workspaces": DOCKER}
    environment = make_environment(Environment(kind="harbor", options=options))
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        kept = Kept()
        trial = Trial(
            session_url="http://127.0.0.1:9/s/x/v1",
            behaviour=Behaviour(max_tokens=100),
            environment=environment,
            task=environment.task(0),
            agent_s=100,
            name=f"{task}-{agent}",
            deadline=time.monotonic() + 250,
            phases=Phases(100, 100, 60),
            artefacts=kept,
        )
        verdict = await resolve("harbor", {"agent": agent}).run(trial)
        print(f"{task} {agent}: {verdict} { ({k: round(v, 1) for k, v in trial.took.items()}) }")
        assert verdict.reward == reward, kept
    assert left() == set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["pi", "mini-swe-agent"])
async def test_a_scaffold_solves_a_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_bodies(monkeypatch)
    if reason := missing(name):
        pytest.skip(reason)
    script = (TASKS / TASK / "solution/solve.sh").read_text()
    run = await solved({"agent": name}, solving(name, script), TASK, workspaces=DOCKER)
    said = f"{run.wire.statuses}\n{run.kept.text('agent_stdout')[-2000:]}\n{run.kept.text('agent_stderr')[-2000:]}"
    assert (run.verdict.termination, run.verdict.reward) == ("completed", 1.0), said
    print(f"{name}: { ({k: round(v, 1) for k, v in run.trial.took.items()}) } {run.trial.peak_bytes}")
    check_tokens(run)
    check_texts(run)
    assert left() == set()
