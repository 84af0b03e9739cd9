"""A run that a launcher left behind, or runs at the moment: its configuration, and a broker that has its log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pipeline.config import load
from schemas.config import Broker, RunConfig
from services.cli.embedded import DirectoryLock, LaunchError, broker_member, free_port, is_embedded
from services.cli.supervise import Supervisor, Unit


def find_run(config: Path | None, directory: Path, run: str | None) -> RunConfig:
    """The configuration file itself, or the record of a run in a launcher's directory: the named one, or the newest."""
    if config is not None:
        return load(config)
    records = sorted(directory.glob("runs/*/config.toml"), key=lambda path: path.stat().st_mtime)
    if not records:
        raise LaunchError(
            f"{directory} holds no run; name its directory with --directory, or a file with --config"
        )
    if run is None:
        return load(records[-1])
    named = [path for path in records if path.parent.name == run]
    if not named:
        raise LaunchError(
            f"{directory} has no run {run!r}; runs: {', '.join(path.parent.name for path in records)}"
        )
    return load(named[0])


@asynccontextmanager
async def broker_of(config: RunConfig) -> AsyncIterator[Broker]:
    """The run's broker. An embedded one is down when its launcher is: then it is started for as long as it is needed."""
    if not is_embedded(config):
        yield config.broker
        return
    directory = Path(config.directory)
    try:
        lock = DirectoryLock(directory)
    except LaunchError:
        yield config.broker  # its launcher lives, and so does the broker
        return
    with lock:
        supervisor = Supervisor()
        member, broker = broker_member(directory, free_port())
        supervisor.keep(Unit("broker", (member,)))
        try:
            yield broker
        finally:
            await asyncio.shield(supervisor.stop())
