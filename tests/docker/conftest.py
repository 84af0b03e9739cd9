"""What these tests need: an engine, Compose 2, Harbor, and root, who may enter a container's network."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.harnesses.workspaces.base import Spec
from pipeline.harnesses.workspaces.choose import workspaces
from pipeline.harnesses.workspaces.harbor_environments import HarborEnvironments

HERE = Path(__file__).parent
IMAGE = "python:3.11-slim-bookworm"


@functools.cache
def missing() -> str:
    """What is not there, in one line; empty when all is."""
    if importlib.util.find_spec("harbor") is None:
        return "Harbor is not installed here, and needs Python 3.12: run `make scaffolds-docker`"
    plugins = Path(sys.prefix) / "docker"
    if plugins.is_dir():
        # Put there by install.py, where Docker's client has no Compose of its own.
        os.environ["DOCKER_CONFIG"] = str(plugins)
    for command, what in (
        (["docker", "info"], "no container engine answers"),
        (["docker", "compose", "version"], "the engine's client has no Compose 2"),
        (
            ["docker", "image", "inspect", IMAGE],
            f"the engine does not have the image {IMAGE}, and nothing is pulled",
        ),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{what}: {error}"
        if done.returncode:
            return f"{what}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    return "" if os.geteuid() == 0 else "a container's network is entered by root alone"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and (reason := missing()):
            item.add_marker(pytest.mark.skip(reason=reason))


def left() -> set[str]:
    """Everything of an engine that carries our name."""
    kinds = (("ps", "-a", "--format", "{{.Names}}"), ("network", "ls", "--format", "{{.Name}}"))
    kinds += (("image", "ls", "--format", "{{.Repository}}"), ("volume", "ls", "--format", "{{.Name}}"))
    found: set[str] = set()
    for kind in kinds:
        said = subprocess.run(
            ["docker", *kind], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        found |= {name for name in said.split() if name.startswith("packtrain-")}
    return found


@pytest.fixture(scope="package")
def docker() -> Iterator[HarborEnvironments]:
    made = workspaces("harbor:docker", {})
    assert isinstance(made, HarborEnvironments)
    yield made
    assert left() == set()


def definition(folder: Path, *lines: str) -> Path:
    """The definition of a task's workspace, with these lines in its Dockerfile."""
    where = folder / "task" / "environment"
    where.mkdir(parents=True)
    (where / "Dockerfile").write_text("\n".join([f"FROM {IMAGE}", "WORKDIR /app", *lines, ""]))
    return where


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """Of a workspace that has a user besides root."""
    return Spec("Trial_1-2", definition(tmp_path, "RUN useradd -m agent", "ENV WHERE=image"))
