"""The shell harness: the policy works in the task's workspace by one tool, `bash`, until it submits.

Promises:
- the agent's loop runs here, its commands in the workspace, which has no network at all;
- each command is a new login shell in the workdir: variables and `cd` do not live on, files and background processes do
  (one that holds the command's output open is waited for);
- a command that runs over `command_s` is killed with all that it started, and the policy is told what it printed until
  then: a slow command ends no trial;
- `submit` ends the trial as completed, alone or in a command (`make test && submit`), and so does an answer without a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.capture.messages import Tool
from pipeline.harnesses.agent import Agent, Said
from pipeline.harnesses.base import Trial, Verdict
from pipeline.harnesses.environments.base import Environment
from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.lifecycle import folder, needs_folders, run_in_workspace
from pipeline.harnesses.workspaces.base import Ended, Workspace
from schemas.config import Behaviour

TOOL = Tool(
    name="bash",
    description="Runs a command by bash in the task's workspace; answers what it printed.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
)
SYSTEM = (
    "You work in a Linux workspace by the tool bash. Every command runs in a new shell that starts in the folder of the task: "
    "cd and variables do not last, files do. Send a program that is to run on to the background, with its output in a file. "
    "When the task is done and you have checked it, run the command: submit"
)
_READ = 4 << 20
"""Bytes of a command's output that are read at most, the end of it."""


class Options(BaseModel):
    """Options of the harness."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command_s: float = Field(60.0, gt=0, description="seconds that one command may take")
    output_bytes: int = Field(
        16 << 10,
        ge=256,
        le=1 << 20,
        description="of a command's output, the policy sees: its begin and its end",
    )
    system: str = Field(SYSTEM, description="the system prompt where the behaviour gives none")


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    command: str = Field(max_length=100_000)


class ShellHarness:
    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = Options.model_validate(options or {})
        self._agent = Agent()

    def check(self, environment: Environment, behaviour: Behaviour) -> None:
        """Raises ValueError for a source that it cannot run."""
        if wrong := needs_folders(environment):
            raise ValueError(wrong)

    async def run(self, trial: Trial) -> Verdict:
        _, task = folder(trial)
        # Each trial's own, so that no file of a task can hold it.
        mark = f"submitted-{secrets.token_hex(8)}"

        async def act(workspace: Workspace, url: str, seconds: float) -> str:
            async def call(name: str, arguments: str) -> Said:
                return await self._call(workspace, task, mark, name, arguments)

            return await self._agent.converse(
                trial, (TOOL,), call, seconds=seconds, system=self._options.system
            )

        return await run_in_workspace(trial, act, network=False)

    async def _call(
        self, workspace: Workspace, task: FolderTask, mark: str, name: str, arguments: str
    ) -> Said:
        if name != TOOL.name:
            return Said(f"error: there is no tool {name!r}; the tool is {TOOL.name!r}")
        try:
            command = _Arguments.model_validate_json(arguments).command
        except ValidationError as error:
            return Said(f"error: bad arguments: {error.errors()[0]['msg']}")
        if "\0" in command:
            return Said("error: bad arguments: the command holds a null character")
        ended = await workspace.run(
            ["/bin/bash", "-lc", script(command, mark)],
            timeout_s=self._options.command_s,
            user=task.agent_user,
            output_bytes=_READ,
        )
        output = ended.stdout.decode(errors="replace")
        if submitted(output, mark):
            return Said("", done=True)
        return Said(told(ended, output, self._options.output_bytes))


def script(command: str, mark: str) -> str:
    """What bash is given: both outputs in their order, and `submit` as a command of this trial."""
    half = len(mark) // 2
    return (
        f"exec 2>&1\nsubmit() {{ printf '\\n%s%s\\n' '{mark[:half]}' '{mark[half:]}'; }}\nexport -f submit\n"
        f"{command}\n"
    )


def submitted(output: str, mark: str) -> bool:
    """Whether a line of the output is the mark."""
    # First as a whole: an output may have two million lines.
    return mark in output and any(line.rstrip() == mark for line in output.splitlines())


def told(ended: Ended, output: str, most: int) -> str:
    """What the policy is told of a command: its output, cut in the middle to about `most` bytes, and how it ended."""
    said = cut(output, most)
    if ended.stopped == "time":
        notes = f"[stopped: the command ran over its limit of time, {ended.seconds:.0f} s]"
    elif ended.stopped:
        notes = "[stopped: the command wrote more than it may]"
    elif ended.oom:
        notes = f"[exit status {ended.returncode}; something was killed, out of memory]"
    elif ended.returncode:
        notes = f"[exit status {ended.returncode}]"
    else:
        return said or "[no output]"
    return f"{said.rstrip()}\n{notes}" if said.strip() else notes


def cut(text: str, most: int) -> str:
    """`text` itself when it has `most` bytes of UTF-8 or fewer, else its begin and its end, with a note of what is missing."""
    data = text.encode()
    if len(data) <= most:
        return text
    half = most // 2
    begin, end = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    return f"{begin}\n[... {len(data) - 2 * half} bytes left out ...]\n{end}"
