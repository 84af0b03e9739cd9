"""`harbor`: an agent scaffold in a workspace of a task folder, its model calls through the session URL.

Promises:
- the agent runs as the task's user, in the task's workdir, with a home of its own beside it, and sees of the host its own
  program and interpreter, read-only;
- a scaffold that gives up because its session cannot be reached is an `InfraFailure`; one that fails by itself is
  `agent_crashed`, and is verified all the same, since its work may be done;
- the end of what it printed is kept, without the session's secret.

Agents `oracle` and `nop` run the task's own solution, and nothing: they show what a task's verifier says to either.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.harnesses.base import InfraFailure, Trial, Verdict
from pipeline.harnesses.endings import termination
from pipeline.harnesses.environments.base import Environment
from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.lifecycle import folder as as_folder
from pipeline.harnesses.lifecycle import needs_folders, run_in_workspace
from pipeline.harnesses.oracle import oracle
from pipeline.harnesses.scaffolds import NAMES, scaffold
from pipeline.harnesses.scaffolds.base import Job, Places, Scaffold
from pipeline.harnesses.scaffolds.install import FOLDER, Unavailable, mounts, need
from pipeline.harnesses.workspaces.base import Ended, Workspace
from schemas.config import Behaviour

SPECIAL = ("oracle", "nop")
HOME = "/tmp/.agent"  # noqa: S108  # in the workspace, where everybody may write
_ASK_S = 10.0
_PREPARE_S = 60.0
_MISSING = 66
_PREPARE = (
    'home=$1; shift; for c in "$@"; do command -v "$c" >/dev/null || { echo "$c"; exit 66; }; done; '
    'mkdir -p "$home" && chmod 700 "$home" && exec tar -x -f - -C "$home"'
)
"""Run by the agent's user, whose the files are to be."""


class ModelLimits(BaseModel):
    """In tokens. 0: what the session's model list says, and behaviour.max_tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    context: int = Field(default=0, ge=0, description="prompt and answer of one call")
    output: int = Field(default=0, ge=0, description="one answer")


class Options(BaseModel):
    """A `harbor` pool's options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: str = Field(description=f"{', '.join(NAMES)}; or {' or '.join(SPECIAL)}")
    wire: Literal["", "chat", "messages", "responses"] = Field(
        default="", description="protocol that the scaffold speaks; empty: its usual one"
    )
    folder: Path = Field(default=FOLDER, description="where scaffolds are installed")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="the scaffold's own configuration, in its words"
    )
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of the agent")
    model_limits: ModelLimits = ModelLimits()
    log_bytes: int = Field(
        default=256 << 10, ge=1024, le=8 << 20, description="of each output of the agent that is kept"
    )

    @field_validator("agent")
    @classmethod
    def _known(cls, value: str) -> str:
        name = value.replace("_", "-")
        if name not in (*NAMES, *SPECIAL):
            raise ValueError(f"there is no agent {value!r}; there are {', '.join((*NAMES, *SPECIAL))}")
        return name

    @model_validator(mode="after")
    def _speaks(self) -> Options:
        spoken = () if self.agent in SPECIAL else scaffold(self.agent).wires
        if self.wire and self.wire not in spoken:
            raise ValueError(
                f"{self.agent} does not speak {self.wire}; it speaks {', '.join(spoken) or 'to no model'}"
            )
        return self


def absolute(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their paths made absolute: hosts may be started from anywhere."""
    return {**options, "folder": str(Path(options.get("folder", FOLDER)).absolute())}


class HarborHarness:
    """`options`: see `Options`; raises pydantic's ValidationError."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = Options.model_validate(options)
        self._scaffold: Scaffold | None = (
            None if self.options.agent in SPECIAL else scaffold(self.options.agent)
        )

    def check(self, environment: Environment, behaviour: Behaviour) -> None:
        """Raises ValueError for a source that it cannot run here, with the remedy."""
        if said := needs_folders(environment):
            raise ValueError(said)
        if self._scaffold is None:
            return
        if behaviour.system:
            raise ValueError(
                f"behaviour.system is set, and {self._scaffold.name} has a system prompt of its own: leave it out"
            )
        try:
            need(self._scaffold, self.options.folder)
        except Unavailable as error:
            raise ValueError(str(error)) from error

    async def run(self, trial: Trial) -> Verdict:
        """Raises `InfraFailure`."""
        if self._scaffold is None:
            return await run_in_workspace(trial, self._without_model(trial), network=False)
        try:
            shown, places = mounts(self._scaffold, self.options.folder, HOME)
        except Unavailable as error:
            raise InfraFailure("environment", str(error)) from error
        context = self.options.model_limits.context or await _context(trial.session_url)
        found = self._scaffold

        async def act(workspace: Workspace, url: str, seconds: float) -> str:
            return await self._act(found, trial, places, context, workspace, url, seconds)

        return await run_in_workspace(trial, act, shown)

    async def _act(
        self,
        found: Scaffold,
        trial: Trial,
        places: Places,
        context: int,
        workspace: Workspace,
        url: str,
        seconds: float,
    ) -> str:
        began = time.monotonic()
        _, task = as_folder(trial)
        launch = found.launch(
            Job(
                task.prompt,
                url,
                self.options.wire or found.wires[0],
                trial.behaviour,
                context,
                self.options.model_limits.output or trial.behaviour.max_tokens,
                places,
                self.options.settings,
            )
        )
        await _prepare(workspace, found, task, launch.files)
        ended = await workspace.run(
            launch.argv,
            timeout_s=max(0.1, seconds - (time.monotonic() - began)),
            env={"HOME": places.home, "TERM": "dumb", "LANG": "C.UTF-8", **launch.env, **self.options.env},
            user=task.agent_user,
            stdin=launch.stdin.encode(),
            output_bytes=self.options.log_bytes,
        )
        await _keep(trial, ended)
        reason = termination(ended)
        said = found.fault(ended.stdout.decode(errors="replace")) if reason == "completed" else ""
        if reason == "agent_crashed" or said:
            # Whoever lost its model is not to blame.
            await _context(trial.session_url)
            return "agent_crashed"
        return reason

    def _without_model(self, trial: Trial) -> Any:
        _, task = as_folder(trial)

        async def act(workspace: Workspace, url: str, seconds: float) -> str:
            if self.options.agent == "nop":
                return "completed"
            try:
                ended = await oracle(workspace, task, seconds)
            except ValueError as error:
                raise InfraFailure("environment", str(error)) from error
            await _keep(trial, ended)
            return termination(ended)

        return act


async def _prepare(workspace: Workspace, found: Scaffold, task: FolderTask, files: Mapping[str, str]) -> None:
    ended = await workspace.run(
        ["/bin/sh", "-c", _PREPARE, "prepare", HOME, *found.commands],
        timeout_s=_PREPARE_S,
        cwd="/",
        user=task.agent_user,
        stdin=archive(files),
    )
    if ended.returncode == _MISSING:
        missing = ended.stdout.decode(errors="replace").strip()
        raise InfraFailure(
            "environment_failed",
            f"{found.name} needs {missing}, which the task's image lacks: install it there",
        )
    if ended.returncode:
        raise InfraFailure("environment_failed", f"the agent's home: {ended.describe()}")


def archive(files: Mapping[str, str]) -> bytes:
    """A tar of the files and the folders that they are in."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        folders = {str(part) for path in files for part in PurePosixPath(path).parents if part.name}
        for path in sorted({*files, *folders}):
            entry = tarfile.TarInfo(path)
            data = files.get(path, "").encode()
            entry.size, entry.mode = len(data), 0o600
            if path in folders:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


async def _keep(trial: Trial, ended: Ended) -> None:
    secret = urlsplit(trial.session_url).path.split("/")[-2:][0].encode()
    for name, data in (("agent_stdout", ended.stdout), ("agent_stderr", ended.stderr)):
        if data:
            await trial.artefacts.save(name, data.replace(secret, b"***") if secret else data)


async def _context(session_url: str) -> int:
    """The session's context in tokens, by its model list. Raises `InfraFailure` when the session cannot be reached."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as client,
            client.get(f"{session_url}/models") as answer,
        ):
            if answer.status in (404, 410):
                raise InfraFailure("session_lost", f"the session answers {answer.status}")
            answer.raise_for_status()
            return int((await answer.json())["data"][0]["max_model_len"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise InfraFailure("agent_loop_unreachable", type(error).__name__) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InfraFailure("protocol", f"the session's model list cannot be read: {error!r}") from error
