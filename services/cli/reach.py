"""A run that a launcher left behind, or runs at the moment: its configuration, and a broker that has its log."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline.config import load
from pipeline.log import Log
from schemas.config import Broker, RunConfig
from schemas.names import BadName, checked_name
from services.cli.embedded import (
    LOOPBACK,
    DirectoryLock,
    LaunchError,
    broker_member,
    free_port,
    is_embedded,
)
from services.cli.options import DEFAULT_DIRECTORY
from services.cli.supervise import Supervisor, Unit

RECORD = "config.toml"
"""A run's configuration with everything filled in, in its directory: what services and reading commands use."""
GIVEN = "given.toml"
"""The configuration that the run was started with: what `packtrain runs resume` starts again."""
IMPORTING = "importing.toml"
"""What becomes the record of a run when its import is complete."""
PATHS: dict[str, tuple[str, ...]] = {
    "broker": ("token_file", "credentials_file", "ca_file", "cert_file", "key_file"),
    "store": ("credentials_file",),
    "engine": ("token_file", "weights_dir"),
    "agent_loop": ("run_key_file", "journal_dir"),
    "packer": ("socket_dir",),
}
"""The keys of a configuration that name files, by section."""
_START_S, _TRY_S = 5.0, 0.02
_LISTEN = re.compile(r'^listen: "([0-9.]+:[0-9]+)"$', re.MULTILINE)


def home_of(directory: Path, run: str) -> Path:
    """The directory of a run's record; raises BadName on a run that could lie elsewhere."""
    return directory / "runs" / checked_name(run, "run")


def records(directory: Path) -> list[Path]:
    """The records of a launcher's directory, the newest last."""

    def legal(path: Path) -> bool:
        try:
            return bool(checked_name(path.parent.name, "run"))
        except BadName:
            return False

    found = [path for path in directory.glob(f"runs/*/{RECORD}") if legal(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def find_run(config: Path | None, directory: Path, run: str | None) -> RunConfig:
    """The configuration file itself, or the record of a run in a launcher's directory: the named one, or the newest."""
    if config is not None:
        return read_record(config)
    found = records(directory)
    if not found:
        raise LaunchError(
            f"{directory} holds no run; name its directory with --directory, or a file with --config"
        )
    if run is None:
        return read_record(found[-1])
    named = [path for path in found if path.parent.name == run]
    if not named:
        raise LaunchError(
            f"{directory} has no run {run!r}; runs: {', '.join(path.parent.name for path in found)}"
        )
    return read_record(named[0])


def read_record(path: Path) -> RunConfig:
    """The configuration in a file; a launcher's record with the paths of where it lies now. Raises ConfigError.

    A directory that was moved or copied is itself, and not the one that the launcher began in: what removes or writes
    would be at work in that one.
    """
    config = load(path)
    home = path.absolute().parent
    here, there = home.parent.parent, Path(config.directory)
    if here == there or not there.is_absolute() or home != here / "runs" / config.run:
        return config

    def moved(file: str) -> str:
        inside = file and Path(file).is_relative_to(there)
        return str(here / Path(file).relative_to(there)) if inside else file

    if config.store.url == (there / "objects").as_uri():
        store = config.store.model_copy(update={"url": (here / "objects").as_uri()})
        config = config.model_copy(update={"store": store})
    sections: dict[str, Any] = {}
    for name, keys in PATHS.items():
        section = getattr(config, name)
        sections[name] = section.model_copy(update={key: moved(getattr(section, key)) for key in keys})
    return config.model_copy(update={"directory": str(here), **sections})


@asynccontextmanager
async def broker_of(config: RunConfig) -> AsyncIterator[Broker]:
    """The run's broker. An embedded one is down when its launcher is: then it is started for as long as it is needed."""
    if not is_embedded(config):
        yield config.broker
        return
    async with embedded_broker(Path(config.directory)) as broker:
        yield broker


@asynccontextmanager
async def embedded_broker(directory: Path) -> AsyncIterator[Broker]:
    """The broker of a launcher's directory: the running one when a launcher (or another command) has it, else our own for
    as long as it is needed. Raises LaunchError when the directory cannot be used."""
    try:
        lock = DirectoryLock(directory)
    except LaunchError:
        running = running_broker(directory)
        if running is None:
            raise
        # A launcher starts it on a port of its own every time: a record may name an older one.
        yield running
        return
    with lock:
        supervisor = Supervisor()
        port = free_port()
        member, broker = broker_member(directory, port)
        supervisor.keep(Unit("broker", (member,)))
        try:
            await _listening(port)
            yield broker
        finally:
            await asyncio.shield(supervisor.stop())


async def _listening(port: int) -> None:
    """Returns when the server listens, so that nobody is told of a refused connection; or when it should have long been."""
    for _ in range(round(_START_S / _TRY_S)):
        try:
            _, writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            await asyncio.sleep(_TRY_S)
        else:
            writer.close()
            return


def running_broker(directory: Path) -> Broker | None:
    """How to reach the embedded broker that was started last; None when none ever was."""
    secrets = directory / "secrets"
    try:
        listening = _LISTEN.search((secrets / "nats.conf").read_text())
    except OSError:
        return None
    if listening is None:
        return None
    return Broker(url=f"nats://{listening[1]}", token_file=str(secrets / "broker-token"))


@asynccontextmanager
async def open_log(config: RunConfig, producer: str = "cli") -> AsyncIterator[Log]:
    """The run's log, which is there. Raises BrokerUnavailable, LaunchError."""
    async with broker_of(config) as broker:
        log = await Log.connect(broker, config.run, producer)
        try:
            if not await log.exists():  # to read it would wait for a broker that serves no streams
                raise LaunchError(f"broker {broker.url} has no run {config.run!r}")
            yield log
        finally:
            await log.close()


def inside(directory: Path) -> str:
    """What a command that is named to a person needs to mean this directory: nothing for the default one."""
    default = directory.absolute() == DEFAULT_DIRECTORY.absolute()
    return "" if default else f" --directory {shlex.quote(str(directory))}"
