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


async def trials(
    broker: Broker, directory: Path, widths: tuple[int, ...], often: int, rounds: int
) -> list[Figure]:
    """So many trials at once, every task so often in a round; rounds take turns with Harbor's. Where that is not installed there is
    nothing to compare, and no figure."""
    python = harbor()
    if python is None:
        say("trials: left out; `make scaffolds` installs Harbor, in whose runner they are tried too")
        return []
    figures: list[Figure] = []
    count = sum(path.is_dir() for path in TASKS.iterdir())
    for width in widths:
        pool = {"harness": "harbor", "options": {"agent": "oracle"}, "tenants": width}
        environment = {"kind": "harbor", "options": {"tasks": str(TASKS)}}
        ours = theirs = 0.0
        async with staged(broker, directory, pool, environment) as stage:
            with stage.host():
                # Of what is loaded with the first one, as Harbor's import is, nothing counts.
                await stage.trials(1)
                for number in range(rounds):
                    ours += await stage.trials(count * often)
                    theirs += await _harbors(
                        python, directory / f"job-{width}-{number}", width, often, count * often
                    )
        rates = [60 * count * often * rounds / seconds for seconds in (ours, theirs)]
        say(f"{width} trials at once: {rates[0]:.0f} a minute, Harbor's runner {rates[1]:.0f}")
        figures.append(figure(f"trials.{width}", rates[0], "trials/min", rates[1], rates[1], "higher"))
    return figures


def harbor() -> Path | None:
    """The interpreter that Harbor is installed for."""
    python = at(scaffold("terminus"), ROOT / FOLDER) / "bin" / "python"
    return python if python.exists() else None


async def _harbors(python: Path, folder: Path, width: int, often: int, count: int) -> float:
    """Seconds for so many trials, once it has started."""
    command = [str(python), str(_SCRIPT), str(TASKS), str(folder), str(width), str(often)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(_WITHIN_S):
        out, error = await process.communicate()
    if process.returncode:
        raise SystemExit(f"Harbor's runner exited with {process.returncode}: {error.decode()[-1500:]}")
    found = json.loads(out.splitlines()[-1])
    if (found["trials"], found["solved"]) != (count, count):
        raise SystemExit(f"Harbor's runner: {found} of {count}")
    return found["seconds"]
