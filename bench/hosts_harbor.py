"""Harbor's own runner over our sandboxes: run by the interpreter that Harbor is installed for.

    python bench/hosts_harbor.py TASKS FOLDER CONCURRENCY ATTEMPTS

runs every task of TASKS so often with the agent `oracle`, writes Harbor's job to FOLDER, and prints {"seconds", "trials",
"solved"}. Harbor has no environment that is a sandbox of the machine itself, so it is given one, by import path, over the
same `OverlayWorkspaces` as our trials have: what differs is what runs the trial.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import sys
import tarfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.harnesses.workspaces.base import Spec, Workspace  # noqa: E402  # found by the line above
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces  # noqa: E402

os.environ["HARBOR_TELEMETRY"] = "0"
_base: Any = importlib.import_module("harbor.environments.base")
_Capabilities: Any = importlib.import_module("harbor.environments.capabilities").EnvironmentCapabilities
_MOST = 64 << 20
_LONGEST_S = 600.0


class Overlay(_base.BaseEnvironment):
    """One of Harbor's environments; see its base class."""

    _workspace: Workspace

    @staticmethod
    def type() -> str:
        return "overlay"

    @property
    def capabilities(self) -> Any:
        return _Capabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self._stack = AsyncExitStack()
        spec = Spec(name=self.session_id.replace(".", "-"), definition=self.environment_dir.resolve())
        self._workspace = await self._stack.enter_async_context(OverlayWorkspaces().open(spec))
        # Where Harbor's agents and verifiers write to; an engine mounts them.
        await self.exec(
            "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod -R 777 /logs", user="root"
        )

    async def stop(self, delete: bool) -> None:
        await self._stack.aclose()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._workspace.put(Path(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._workspace.put(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        _write(target_path, await self._workspace.get(source_path, _MOST))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._workspace.run(
            ["tar", "-c", "-f", "-", "-C", source_dir, "."],
            timeout_s=_LONGEST_S,
            user="root",
            output_bytes=_MOST,
        )
        _unpack(target_dir, packed.stdout)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        who = self._resolve_user(user)
        ended = await self._workspace.run(
            ["/bin/bash", "-c", command],
            timeout_s=timeout_sec or _LONGEST_S,
            cwd=cwd or "",
            env=self._merge_env(env) or {},
            user="" if who is None else str(who),
        )
        out, err = (each.decode(errors="replace") for each in (ended.stdout, ended.stderr))
        return _base.ExecResult(stdout=out, stderr=err, return_code=ended.returncode)


async def main(tasks: str, folder: str, concurrency: int, attempts: int) -> None:
    job: Any = importlib.import_module("harbor.job").Job
    config: Any = importlib.import_module("harbor.models.job.config").JobConfig
    wanted = {
        "jobs_dir": folder,
        "n_attempts": attempts,
        "n_concurrent_trials": concurrency,
        "quiet": True,
        "environment": {"import_path": "hosts_harbor:Overlay", "suppress_override_warnings": True},
        "agents": [{"name": "oracle"}],
        "datasets": [{"path": tasks}],
    }
    made = await job.create(config.model_validate(wanted))
    began = time.perf_counter()
    await made.run()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, **_found(folder)}))


def _write(file: Path | str, data: bytes) -> None:
    Path(file).write_bytes(data)


def _unpack(folder: Path | str, data: bytes) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


def _found(folder: str) -> dict[str, int]:
    trials = [json.loads(file.read_text()) for file in Path(folder).glob("*/*/result.json")]
    rewards = [(each["verifier_result"] or {}).get("rewards", {}).get("reward") for each in trials]
    return {"trials": len(trials), "solved": rewards.count(1.0)}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
