"""A run that a command is about: its configuration, as far as it is here, and a broker that has its log."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.config import load
from pipeline.log import Log
from pipeline.log.connection import BrokerUnavailable, check_address
from schemas.config import AgentLoop, Broker, Decisions, Engine, Pool, RunConfig, Store
from schemas.facts import ALL, RunStarted
from schemas.names import BadName, checked_name
from services.cli.embedded import (
    LOOPBACK,
    BadInput,
    DirectoryLock,
    LaunchError,
    broker_member,
    free_port,
    is_embedded,
)
from services.cli.options import DEFAULT_DIRECTORY
from services.cli.supervise import Supervisor, Unit
from services.cli.where import BrokerOptions, Where

if TYPE_CHECKING:
    from pipeline.store import ObjectStore

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
READER, LAUNCHER = "reader", "launcher"
"""Users of the broker: of commands that only read, and of those that begin, change and end runs."""
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


class LogView(RunConfig):
    """A run's configuration as far as its log tells it: the decisions, and the names of pools. Of hosts it knows none."""


def find_run(where: Where) -> RunConfig:
    """The configuration file itself; what a broker's log tells of a run; or the record of a run in a launcher's directory. Broker and
    store are those that options name, where they do. Blocking.

    Raises ConfigError, BadInput, LaunchError, BrokerUnavailable.
    """
    if where.config is not None:
        found = read_record(where.config)
        if where.run not in (None, found.run):
            raise BadInput(f"{where.config} is of run {found.run}, not of {where.run}; leave --run out")
        return _reached(found, where)
    if where.nats is None:
        return _reached(_recorded(where.directory, where.run), where)
    if where.run is None:
        raise BadInput(
            f"--nats names no run: give --run, too; `packtrain runs list --nats {where.nats}` tells which there are"
        )
    run, broker = checked_name(where.run, "run"), broker_given(where)
    assert broker is not None
    return _reached(asyncio.run(_logged(run, broker)), where)


def broker_given(given: BrokerOptions) -> Broker | None:
    """The broker that options name; None when they name none. Raises BadInput."""
    if given.nats is None:
        for option in ("nats_token_file", "nats_credentials", "nats_ca"):
            if getattr(given, option) is not None:
                raise BadInput(f"--{option.replace('_', '-')} is for --nats, which is not given")
        return None
    return _broker(given, Broker())


def _broker(given: BrokerOptions, known: Broker) -> Broker:
    """`known` with what options say. An address comes with all that is needed to reach it: nothing else is kept."""
    files = {
        "token_file": given.nats_token_file,
        "credentials_file": given.nats_credentials,
        "ca_file": given.nats_ca,
    }
    update: dict[str, Any] = {key: str(file.absolute()) for key, file in files.items() if file is not None}
    if given.nats is not None:
        try:
            check_address(given.nats)
        except BrokerUnavailable as error:
            raise BadInput(str(error).replace("broker.url", "--nats")) from error
        if "@" in given.nats:
            raise BadInput(
                "--nats may hold no credentials; put them in a file and name it with --nats-credentials or --nats-token-file"
            )
        others = dict.fromkeys(PATHS["broker"], "")
        update = {**others, **update, "url": given.nats}
    elif "credentials_file" in update:
        update = {"token_file": "", **update}
    try:
        return Broker.model_validate({**known.model_dump(), **update})
    except ValidationError as error:
        raise BadInput(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from error


def _reached(config: RunConfig, where: Where) -> RunConfig:
    """The configuration with the broker and the store that options name."""
    credentials = where.store_credentials
    store = {
        "url": where.store,
        "endpoint": where.store_endpoint,
        "credentials_file": str(credentials.absolute()) if credentials is not None else None,
    }
    update = {key: value for key, value in store.items() if value is not None}
    if where.store is not None:
        check_store(where.store)
        update = {"endpoint": "", "credentials_file": "", **update}
    try:
        section = Store.model_validate({**config.store.model_dump(), **update})
    except ValidationError as error:
        raise BadInput(f"--store: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return config.model_copy(update={"broker": _broker(where, config.broker), "store": section})


def check_store(url: str) -> None:
    """Raises BadInput on a --store of files that is not there: who opens it makes it, and finds it empty."""
    from pipeline.store.objects import directory_of

    directory = directory_of(url)
    if directory is not None and not directory.is_dir():
        raise BadInput(
            f"--store {url} is no directory of this machine; name the one that has the run's objects"
        )


async def _logged(run: str, broker: Broker) -> LogView:
    log = await Log.connect(broker, run, "cli", user=READER)
    try:
        if not await log.exists():
            raise LaunchError(
                f"broker {broker.url} has no run {run!r}; `packtrain runs list` tells which it has"
            )
        started = await log.last(RunStarted.type, ALL, run)
    finally:
        await log.close()
    if started is None or not isinstance(started.fact, RunStarted):
        raise LaunchError(f"run {run} has not begun: its log has no run.started")
    try:
        known = Decisions.model_validate(started.fact.config)
    except ValidationError as error:
        raise LaunchError(
            f"run {run} was begun by another release: its run.started cannot be read; give --config"
        ) from error
    pools = dict.fromkeys(source.pool for source in known.sources)
    # Not validated: what the log does not tell would be at odds with what it tells.
    return LogView.model_construct(
        run=run,
        directory="",
        steps=known.steps,
        batch=known.batch,
        mixer=known.mixer,
        sources=known.sources,
        pools=tuple(Pool(name=name, harness="") for name in pools),
        agent_loop=AgentLoop.model_construct(hosts=0),
        engine=Engine(policy="", vision=known.vision),
        broker=broker,
    )


def store_of(config: RunConfig) -> ObjectStore:
    """The run's objects. Raises StoreError, and BadInput where nothing says where they are."""
    if isinstance(config, LogView) and not config.store.url:
        raise BadInput(
            f"the log of run {config.run} does not tell where its objects are; give --store, or --config"
        )
    # Its client takes as long to import as all else that a command needs.
    from pipeline.store import ObjectStore

    return ObjectStore.open(config.store)


def _recorded(directory: Path, run: str | None) -> RunConfig:
    """The record of a run in a launcher's directory: the named one, or the newest."""
    found = records(directory)
    if not found:
        raise LaunchError(
            f"{directory} holds no run; name its directory with --directory, a file with --config, or a broker with --nats"
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
async def open_log(config: RunConfig, producer: str = "cli", user: str = READER) -> AsyncIterator[Log]:
    """The run's log, which is there; `user`: whose credentials suffice for what is done to it. Raises BrokerUnavailable, LaunchError."""
    async with broker_of(config) as broker:
        log = await Log.connect(broker, config.run, producer, user=user)
        try:
            if not await log.exists():  # to read it would wait for a broker that serves no streams
                raise LaunchError(
                    f"broker {broker.url} has no run {config.run!r}; `packtrain runs list` tells which it has"
                )
            yield log
        finally:
            await log.close()


def inside(directory: Path) -> str:
    """What a command that is named to a person needs to mean this directory: nothing for the default one."""
    default = directory.absolute() == DEFAULT_DIRECTORY.absolute()
    return "" if default else f" --directory {shlex.quote(str(directory))}"
