"""Runs Terminus 2 in the current directory: `start.py FOLDER run_terminus.py OPTIONS.json`.

Harbor runs agents in containers; here the workspace is the sandbox already, so the environment is a plain process: what Terminus asks of
an environment, and nothing else.
"""

# Harbor is in the scaffold's own folder, and is not typed here.
# pyright: basic, reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
    """The environment that Terminus acts in: this directory."""

    default_user = None
    session_id = "here"

    def __init__(self, logs: Path) -> None:
        self.trial_paths = SimpleNamespace(agent_dir=logs)

    async def exec(self, command: str, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        process = await asyncio.create_subprocess_shell(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)

    async def is_dir(self, path: str, user=None) -> bool:
        return await asyncio.to_thread(Path(path).is_dir)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copyfile(source_path, target_path)


async def main(options: dict) -> None:
    instruction = options.pop("instruction")
    logs = Path(os.environ["HOME"]) / "logs"
    logs.mkdir()
    agent = Terminus2(logs_dir=logs, record_terminal_session=False, **options)
    environment = Here(logs)
    await agent.setup(environment)
    await agent.run(instruction, environment, AgentContext())
    print("finished")


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
