"""Trials a minute of the agent `oracle` on the shipped tasks, in overlay workspaces, against Harbor's own runner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from capture_world import say
from hosts_world import ROOT, TASKS, figure, staged
from report import Figure

from pipeline.harnesses.scaffolds import scaffold
from pipeline.harnesses.scaffolds.install import FOLDER, at
from schemas.config import Broker

_SCRIPT = Path(__file__).with_name("hosts_harbor.py")
_WITHIN_S = 240


async def trials(broker: Broker, directory: Path, rounds: tuple[tuple[int, int], ...]) -> list[Figure]:
    """For each (concurrency, how often every task is tried). Without Harbor nothing is compared, so nothing is given."""
    python = harbor()
    if python is None:
        say("trials: left out; `make scaffolds` installs Harbor, in whose runner they are tried too")
        return []
    figures: list[Figure] = []
    count = sum(path.is_dir() for path in TASKS.iterdir())
    for width, often in rounds:
        pool = {"harness": "harbor", "options": {"agent": "oracle"}, "tenants": width}
        environment = {"kind": "harbor", "options": {"tasks": str(TASKS)}}
        async with staged(broker, directory, pool, environment) as stage:
            with stage.host():
                # Of what is loaded with the first one, as Harbor's import is, nothing counts.
                await stage.trials(1)
                ours = 60 * count * often / await stage.trials(count * often)
        theirs = await _harbors(python, directory / f"job-{width}", width, often)
        say(f"{width} trials at once: {ours:.0f} a minute, Harbor's runner {theirs:.0f}")
        figures.append(figure(f"trials.{width}", ours, "trials/min", theirs, theirs, "higher"))
    return figures


def harbor() -> Path | None:
    """The interpreter that Harbor is installed for."""
    python = at(scaffold("terminus"), ROOT / FOLDER) / "bin" / "python"
    return python if python.exists() else None


async def _harbors(python: Path, folder: Path, width: int, often: int) -> float:
    """Trials a minute, once it has started."""
    command = [str(python), str(_SCRIPT), str(TASKS), str(folder), str(width), str(often)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(_WITHIN_S):
        out, error = await process.communicate()
    if process.returncode:
        raise SystemExit(f"Harbor's runner exited with {process.returncode}: {error.decode()[-1500:]}")
    found = json.loads(out.splitlines()[-1])
    if not 0 < found["trials"] == found["solved"]:
        raise SystemExit(f"Harbor's runner: {found}, see {folder}")
    return 60 * found["trials"] / found["seconds"]
