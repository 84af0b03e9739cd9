"""One task folder of Harbor's format, read and checked. Pure but for reading the folder.

Promises:
- `read` returns what a trial needs of the folder, or all that is wrong with it, each fault with its place and remedy;
- keys that it does not know are Harbor's, and accepted; what would change the task's meaning and is not supported here
  (steps, MCP servers, a GPU, a verifier in a sandbox of its own, ...) is refused by its name, never ignored;
- no value of the host's environment gets into a task: `${NAME:-default}` is its default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.harnesses.scripts import bash

_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
"""Marks of benchmarks against being trained on by accident. Harbor does not show them to agents either."""

Seconds = Field(default=None, gt=0, allow_inf_nan=False)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Network(_Section):
    network_mode: str | None = None


class Agent(_Network):
    timeout_sec: float | None = Seconds
    user: str | int | None = None


class Verifier(_Network):
    timeout_sec: float | None = Seconds
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class Solution(_Section):
    env: dict[str, str] = {}


class Environment(_Network):
    build_timeout_sec: float | None = Seconds
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    allow_internet: bool | None = None


class Config(_Section):
    """Of task.toml what is used here, and what is refused."""

    schema_version: str = "1.0"
    version: str | None = None
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    steps: list[Any] = []


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A sound folder. Sizes are MiB and seconds as task.toml gives them, None where it does not."""

    folder: Path
    instruction: str
    config: Config
    memory_mb: int | None
    storage_mb: int | None
    env: dict[str, str]
    verifier_env: dict[str, str]
    solution_env: dict[str, str]


def read(folder: Path, *, ignore_network: bool = False) -> tuple[TaskFolder | None, list[str]]:
    """The folder, by its resolved path, or None and its faults. `ignore_network`: take a task that asks for a network, which it will not have."""
    faults = [*_files(folder), *_links(folder)]
    instruction = ""
    config = None
    try:
        instruction = _without_canary((folder / "instruction.md").read_text())
        if not instruction.strip():
            faults.append(f"{folder / 'instruction.md'} is empty: write what the agent is to do")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{folder / 'instruction.md'} cannot be read ({error}): write what the agent is to do")
    toml = folder / "task.toml"
    try:
        config = Config.model_validate(tomllib.loads(toml.read_text()))
    except ValidationError as error:
        for one in error.errors(include_url=False):
            place = ".".join(map(str, one["loc"]))
            faults.append(f"{toml}: {place} is {one['input']!r}: {one['msg']}")
    except (OSError, ValueError) as error:
        faults.append(f"{toml} cannot be read: {error}")
    if config is None:
        return None, faults
    faults += [f"{toml}: {fault}" for fault in unsupported(config, ignore_network)]
    sizes: list[int | None] = []
    for name in ("memory", "storage"):
        try:
            sizes.append(_size_mb(config.environment, name))
        except ValueError as error:
            faults.append(f"{toml}: {error}")
    variables: list[dict[str, str]] = []
    for place, given in (
        ("environment", config.environment.env),
        ("verifier", config.verifier.env),
        ("solution", config.solution.env),
    ):
        try:
            variables.append({name: _resolved(f"{place}.env.{name}", value) for name, value in given.items()})
        except ValueError as error:
            faults.append(f"{toml}: {error}")
    if faults:
        return None, faults
    memory_mb, storage_mb = sizes
    env, verifier_env, solution_env = variables
    return TaskFolder(folder, instruction, config, memory_mb, storage_mb, env, verifier_env, solution_env), []


def unsupported(config: Config, ignore_network: bool) -> Iterator[str]:
    """What the task asks for that would change its meaning if it were left out."""
    environment, verifier = config.environment, config.verifier
    version = config.version or config.schema_version
    if version.partition(".")[0] not in {"0", "1"}:
        yield f"schema_version {version!r} is newer than 1.x, which is known here"
    if config.steps:
        yield "steps: a task of many steps is not supported; make each step a task"
    if environment.mcp_servers:
        yield "environment.mcp_servers is not supported: give the agent its tools as programs in the workspace"
    if environment.skills_dir:
        yield "environment.skills_dir is not supported: put what it says into instruction.md"
    if environment.healthcheck:
        yield "environment.healthcheck is not supported: a workspace is ready when its Dockerfile's steps have run"
    if environment.workdir:
        yield "environment.workdir is not supported: set WORKDIR in environment/Dockerfile"
    if environment.gpus or environment.tpu:
        yield "environment.gpus and environment.tpu are not supported: workspaces have no accelerator"
    if environment.os.lower() != "linux":
        yield f"environment.os is {environment.os!r}: only linux is supported"
    if verifier.environment is not None or verifier.environment_mode not in (None, "shared"):
        yield "verifier.environment and its mode 'separate' are not supported: the verifier runs in the agent's workspace"
    if verifier.collect:
        yield "verifier.collect is not supported: collect in tests/test.sh"
    if ignore_network:
        return
    wanted = {
        f"{name}.network_mode = {section.network_mode!r}"
        for name, section in (("agent", config.agent), ("verifier", verifier), ("environment", environment))
        if section.network_mode not in (None, "no-network")
    } | ({"environment.allow_internet = true"} if environment.allow_internet else set[str]())
    if wanted:
        yield f"{', '.join(sorted(wanted))}: a workspace reaches no network; take that out, or set the environment's ignore_network to run the task without one"


def _files(folder: Path) -> Iterator[str]:
    test = folder / "tests" / "test.sh"
    scripts = [test, folder / "solution" / "solve.sh"]
    if not test.is_file():
        yield f"{test} is missing: write the verifier, which leaves a reward in /logs/verifier/reward.txt"
    for script in scripts:
        if script.is_file():
            try:
                bash(script, "")
            except ValueError as error:
                yield f"{error}: write a shell script that starts it"
    for name, remedy in (
        ("steps", "make each step a task"),
        ("trajectory.json", "put what it says into instruction.md"),
        ("tests/.harborignore", "remove what it excludes"),
        ("solution/.harborignore", "remove what it excludes"),
    ):
        if (folder / name).exists():
            yield f"{folder / name} is not supported: {remedy}"


def _links(folder: Path) -> Iterator[str]:
    """Links that leave the part of the folder that is copied, and what is neither file nor folder. `folder` is resolved."""
    with os.scandir(folder) as parts:
        for part in parts:
            yield from _entry(part, part.path)


def _entry(entry: os.DirEntry[str], part: str) -> Iterator[str]:
    if entry.is_symlink():
        # Each part is copied by itself, so a link to another part leads nowhere there, or shows the answer.
        if entry.path == part or not Path(entry.path).resolve().is_relative_to(part):
            yield f"{entry.path} is a link that leaves {part}: put the file itself there"
    elif entry.is_dir(follow_symlinks=False):
        with os.scandir(entry) as inside:
            for below in inside:
                yield from _entry(below, part)
    elif not entry.is_file(follow_symlinks=False):
        yield f"{entry.path} is neither a file nor a folder: remove it"


def _size_mb(environment: Environment, name: str) -> int | None:
    """MiB from `memory_mb` or the older `memory = "2G"`. Raises ValueError."""
    new: int | None = getattr(environment, f"{name}_mb")
    old: str | None = getattr(environment, name)
    if old is None:
        return new
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", old.upper())
    size = int(float(match[1]) * _MB[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"environment.{name} is {old!r}: write a size like '512M' or '2G'")
    if new not in (None, size):
        raise ValueError(f"environment.{name} is {old!r} and {name}_mb is {new}: leave one of them out")
    return size


def _resolved(place: str, value: str) -> str:
    match = _TEMPLATE.fullmatch(value)
    if not match:
        return value
    if match[2] is None:
        raise ValueError(
            f"{place} is {value!r}: a task gets nothing of the host's environment; write a value, or a default as in ${{NAME:-default}}"
        )
    return match[2]


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])
