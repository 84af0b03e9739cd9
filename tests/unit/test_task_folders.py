"""Task folders: what is taken from them, in which order, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.harnesses.environments.base import EnvironmentBroken, Outcome, make_environment
from pipeline.harnesses.environments.folders import FolderEnvironment
from pipeline.harnesses.environments.harbor import BrokenTasks, HarborTasks
from pipeline.harnesses.scripts import bash
from pipeline.harnesses.workspaces.base import Limits, Mount
from schemas.config import Environment

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


def folder(root: Path, name: str = "one", toml: str = "", instruction: str = "Do it.\n") -> Path:
    """A sound task folder."""
    path = root / name
    for part in ("environment", "tests", "solution"):
        (path / part).mkdir(parents=True)
    (path / "instruction.md").write_text(instruction)
    (path / "task.toml").write_text(toml)
    (path / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /app\n")
    (path / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (path / "solution" / "solve.sh").write_text("true\n")
    return path


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("three")
    for name in "abc":
        folder(root, name)
    return root


def made(root: Path, seed: int = 7, **options: Any) -> HarborTasks:
    return HarborTasks(seed=seed, options={"tasks": str(root), **options})


def faults(root: Path, **options: Any) -> list[str]:
    with pytest.raises(BrokenTasks) as told:
        made(root, **options)
    assert all(fault in str(told.value) for fault in told.value.faults)
    return told.value.faults


def test_examples_are_sound_and_made_by_their_kind() -> None:
    environment = make_environment(Environment(kind="harbor", options={"tasks": str(EXAMPLES)}))
    assert isinstance(environment, FolderEnvironment)
    assert environment.tools == ()
    tasks = [environment.task(index) for index in range(10)]
    assert len({task.name for task in tasks}) == 10
    for task in tasks:
        assert (task.folder / "solution" / "solve.sh").is_file()
        assert task.prompt == (task.folder / "instruction.md").read_text()
        assert task.expected == ""


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**40), index=st.integers(0, 10**6))
def test_every_epoch_has_every_folder_once(three: Path, seed: int, index: int) -> None:
    one, other = made(three, seed), made(three, seed)
    assert one.task(index) == other.task(index)
    epoch = index - index % 3
    assert {one.task(epoch + i).name for i in range(3)} == {"a", "b", "c"}


def test_orders_differ_between_epochs_and_seeds() -> None:
    tasks = [HarborTasks(seed, {"tasks": str(EXAMPLES)}) for seed in (0, 1)]
    orders = [[t.task(epoch * 10 + i).name for i in range(10)] for t in tasks for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 6
    with pytest.raises(IndexError, match="negative"):
        tasks[0].task(-1)


def test_the_order_of_the_file_system_makes_no_difference(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, iterdir = [made(three).task(i) for i in range(9)], Path.iterdir
    for order in (sorted, lambda paths: sorted(paths, reverse=True)):
        monkeypatch.setattr(Path, "iterdir", lambda path, order=order: iter(order(iterdir(path))))
        assert [made(three).task(i) for i in range(9)] == listed


def test_what_a_folder_says(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        instruction="<!-- the canary of a benchmark -->\n# canary GUID 26b5\n\nFind it.\n",
        toml="""
version = "1.0"
source = "somewhere"
artifacts = ["/app/out"]
[task]
name = "org/one"
[metadata]
anything = { nested = true }
[agent]
timeout_sec = 90
user = 1000
[verifier]
timeout_sec = 30.5
user = "nobody"
env = { MODE = "strict", HOST = "${PATH:-none}" }
[environment]
build_timeout_sec = 45
docker_image = "org/one:1"
cpus = 1.5
memory = "2G"
storage = "512M"
gpus = 0
env = { A = "b" }
[solution]
env = { S = "t" }
""",
    )
    environment = made(tmp_path)
    task = environment.task(3)
    assert (task.name, task.folder, task.index) == ("one", path, 3)
    assert task.prompt == "Find it.\n"
    assert (task.start_s, task.agent_s, task.verify_s) == (45.0, 90.0, 30.5)
    assert (task.agent_user, task.verifier_user) == ("1000", "nobody")
    assert task.limits == Limits(memory_bytes=2 << 30, disk_bytes=512 << 20, cpus=1.5)
    # A variable of the host is not read: PATH is set here.
    assert task.verifier_env == {"MODE": "strict", "HOST": "none"}
    assert (task.env, task.solution_env, task.hide_git) == ({"A": "b"}, {"S": "t"}, True)

    mounts = (Mount(Path("/usr/share"), "/opt/x"),)
    spec = environment.spec(task, "trial-1", ("127.0.0.1", 80), mounts)
    assert (spec.name, spec.peer, spec.mounts, spec.env) == ("trial-1", ("127.0.0.1", 80), mounts, task.env)
    assert (spec.definition, spec.limits, spec.start_s) == (path / "environment", task.limits, 45.0)


def test_what_is_not_said_is_left_to_others(tmp_path: Path) -> None:
    folder(tmp_path)
    environment = made(tmp_path)
    task = environment.task(0)
    assert (task.start_s, task.agent_s, task.verify_s) == (0.0, 0.0, 0.0)
    assert (task.agent_user, task.verifier_user, task.limits) == ("", "", Limits())
    assert environment.spec(task, "t", None, ()).start_s == 60.0


def test_options_take_the_place_of_the_tasks_limits(tmp_path: Path) -> None:
    folder(tmp_path, toml="[environment]\nmemory_mb = 4096\nstorage_mb = 99\ncpus = 8\n")
    environment = made(
        tmp_path, memory_mb=256, disk_mb=64, processes=32, cpus=0.5, hide_git=False, keep_processes=True
    )
    task = environment.task(0)
    assert task.limits == Limits(256 << 20, 64 << 20, 32, 0.5)
    assert not task.hide_git
    assert task.keep_processes


def test_names_choose_folders(tmp_path: Path) -> None:
    for name in ("fix-a", "fix-b", "write-a", ".hidden", "_drafts"):
        folder(tmp_path, name)
    (tmp_path / "README.md").write_text("not a task")
    assert {made(tmp_path).task(i).name for i in range(3)} == {"fix-a", "fix-b", "write-a"}
    chosen = made(tmp_path, names=["fix-*", "fix-a"])
    assert {chosen.task(i).name for i in range(4)} == {"fix-a", "fix-b"}
    (fault,) = faults(tmp_path, names=["fix-*", "gone"])
    assert "'gone'" in fault
    assert "fix-a" in fault


def test_a_folder_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert made(Path("mine")).task(0).folder == tmp_path / "mine" / "one"


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    (folder(tmp_path, "a") / "instruction.md").unlink()
    (folder(tmp_path, "b") / "tests" / "test.sh").unlink()
    folder(tmp_path, "c", toml="[agent\n")
    folder(tmp_path, "d", toml="[agent]\ntimeout_sec = -1\n[environment]\nmemory_mb = 'much'\n")
    folder(tmp_path, "e", instruction="\n")
    (folder(tmp_path, "f") / "environment" / "Dockerfile").unlink()
    (tmp_path / "g").mkdir()
    told = faults(tmp_path)
    for part in (
        "a/instruction.md",
        "b/tests/test.sh",
        "c/task.toml cannot be read",
        "d/task.toml: agent.timeout_sec is -1",
        "d/task.toml: environment.memory_mb is 'much'",
        "e/instruction.md is empty",
        "f/environment/Dockerfile is missing",
        "g/instruction.md",
        "g/task.toml",
        "g/tests/test.sh",
    ):
        assert any(part in fault for fault in told), part


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[[steps]]\nname = 'first'\n", "steps"),
        ("[[environment.mcp_servers]]\nname = 'x'\nurl = 'http://x'\n", "environment.mcp_servers"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ("[environment.tpu]\ntype = 'v6e'\ntopology = '2x2'\n", "environment.tpu"),
        ("[environment]\nos = 'Windows'\n", "environment.os"),
        ("[environment]\nskills_dir = '/skills'\n", "environment.skills_dir"),
        ("[environment]\nworkdir = '/srv'\n", "WORKDIR"),
        ("[environment.healthcheck]\ncommand = 'true'\n", "environment.healthcheck"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "separate"),
        ("[verifier.environment]\ncpus = 1\n", "verifier.environment"),
        ("[[verifier.collect]]\ncommand = 'true'\n", "verifier.collect"),
        ("schema_version = '2.0'\n", "2.0"),
        ("[environment]\nmemory = '2G'\nmemory_mb = 100\n", "memory_mb is 100"),
        ("[environment]\nstorage = 'lots'\n", "'lots'"),
        ("[environment.env]\nKEY = '${OPENAI_API_KEY}'\n", "environment.env.KEY"),
        ("[verifier.env]\nKEY = '${OPENAI_API_KEY}'\n", "verifier.env.KEY"),
        ("[environment]\nallow_internet = true\n", "environment.allow_internet"),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org']\n", "agent.network_mode"),
        ("[verifier]\nnetwork_mode = 'public'\n", "verifier.network_mode"),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_its_name(tmp_path: Path, toml: str, named: str) -> None:
    folder(tmp_path, toml=toml)
    (fault,) = faults(tmp_path)
    assert named in fault
    assert str(tmp_path / "one" / "task.toml") in fault


def test_a_network_can_be_done_without(tmp_path: Path) -> None:
    folder(tmp_path, toml="[environment]\nallow_internet = true\n")
    folder(tmp_path, "two", toml="[environment]\nallow_internet = false\nnetwork_mode = 'no-network'\n")
    assert made(tmp_path, ignore_network=True).task(0).prompt == "Do it.\n"
    assert len(faults(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("trajectory.json", "instruction.md"),
        ("tests/.harborignore", "remove"),
        ("steps/x", "each step"),
    ],
)
def test_files_that_mean_more_than_is_supported(tmp_path: Path, name: str, named: str) -> None:
    path = folder(tmp_path) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    (fault,) = faults(tmp_path)
    assert "not supported" in fault
    assert named in fault


def test_a_dockerfile_that_overlay_cannot_build(tmp_path: Path) -> None:
    path = folder(tmp_path) / "environment" / "Dockerfile"
    path.write_text("FROM a AS b\nFROM c\nCOPY --from=b /x /y\n")
    (fault,) = faults(tmp_path)
    assert str(path) in fault
    assert "line 2" in fault


def test_services_need_an_engine(tmp_path: Path) -> None:
    path = folder(tmp_path) / "environment" / "docker-compose.yaml"
    path.write_text("services: {}\n")
    (fault,) = faults(tmp_path)
    assert str(path) in fault
    assert "harbor:docker" in fault


def test_links_stay_in_the_part_that_is_copied(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tests" / "same.sh").symlink_to("test.sh")
    assert made(tmp_path).task(0).name == "one"
    for name, target in (
        ("environment/passwd", "/etc/passwd"),
        ("environment/answer", "../solution/solve.sh"),
        ("tests/up", ".."),
    ):
        (path / name).symlink_to(target)
        (fault,) = faults(tmp_path)
        assert str(path / name) in fault
        (path / name).unlink()
    os.mkfifo(path / "tests" / "pipe")
    assert "tests/pipe" in faults(tmp_path)[0]
    (path / "tests" / "pipe").unlink()
    shutil.move(path / "solution", tmp_path / "_solution")
    (path / "solution").symlink_to(tmp_path / "_solution")
    assert "solution" in faults(tmp_path)[0]


def test_a_folder_that_is_not_there_or_has_none(tmp_path: Path) -> None:
    assert "no folder" in faults(tmp_path / "gone")[0]
    assert "has no folder" in faults(tmp_path)[0]


def test_options_that_are_not_known(tmp_path: Path) -> None:
    folder(tmp_path)
    with pytest.raises(ValidationError, match="retries"):
        made(tmp_path, retries=1)
    with pytest.raises(ValueError, match="chroot"):
        made(tmp_path, workspaces="chroot")


def test_a_harness_without_workspaces_is_told_which_to_take(tmp_path: Path) -> None:
    folder(tmp_path)
    environment = made(tmp_path)
    task = environment.task(0)
    with pytest.raises(EnvironmentBroken, match="shell or harbor"):
        environment.verify(task, Outcome(""))
    with pytest.raises(EnvironmentBroken, match="shell or harbor"):
        environment.call(task, "bash", "{}")


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("echo 1", ["/bin/bash", "/tests/test.sh"]),
        ("#!/bin/bash -eu", ["/bin/bash", "-eu", "/tests/test.sh"]),
        ("#! /bin/sh", ["/bin/bash", "/tests/test.sh"]),
        ("#!/usr/bin/env bash", ["/bin/bash", "/tests/test.sh"]),
        ("#!/usr/bin/env -S bash -e", ["/bin/bash", "-e", "/tests/test.sh"]),
        ("#!/usr/bin/env python3", None),
        ("#!/usr/bin/perl", None),
        ("#!", None),
    ],
)
def test_scripts_are_run_by_bash(tmp_path: Path, line: str, argv: list[str] | None) -> None:
    path = folder(tmp_path) / "tests" / "test.sh"
    path.write_text(line + "\n")
    if argv is None:
        with pytest.raises(ValueError, match="first line"):
            bash(path, "/tests/test.sh")
        assert "tests/test.sh" in faults(tmp_path)[0]
    else:
        assert bash(path, "/tests/test.sh") == argv
