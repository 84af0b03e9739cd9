"""`packtrain export` and `import`: a run into one file, and from it into another broker, store and directory.

Promises:
- export changes nothing; the file holds the run as it was when the export began, also of a run that goes on;
- import checks all of the file first; a broker, store or directory that has another run of the name is refused
  unchanged; interrupted, the same command goes on;
- a run cannot go on before all of it is there: its record and its claim on the store come last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import ConfigError, dumps, loads
from pipeline.log import BrokerUnavailable, Log, LogError
from pipeline.log.archive import Archive
from pipeline.log.archive_format import ArchiveError, Manifest
from pipeline.log.archive_writer import ArchiveWriter
from pipeline.log.transfer import compare, export_messages, extent, import_messages
from pipeline.store import ObjectExists, ObjectStore
from pipeline.store.claims import claim_body, claim_of
from schemas.config import Broker, RunConfig, Store
from schemas.facts import ALL, RunStarted
from schemas.keys import run_prefix
from schemas.names import subject_filter
from services.cli.claim import claim_key, open_place
from services.cli.embedded import BadInput, LaunchError, is_embedded, make_directory
from services.cli.progress import progress
from services.cli.reach import (
    GIVEN,
    IMPORTING,
    LAUNCHER,
    RECORD,
    LogView,
    embedded_broker,
    find_run,
    home_of,
    inside,
    open_log,
    read_record,
)
from services.cli.summary import size
from services.cli.where import Where
from services.imported import BORROWED

_AT_ONCE = 16
_AT_ONCE_BYTES = 64 << 20
Say = Callable[[str], None]


def portable(config: RunConfig) -> RunConfig:
    """The configuration without what belongs to a machine: broker, store, addresses, directories, files of secrets."""
    return config.model_copy(
        update={
            "directory": RunConfig.model_fields["directory"].default,
            "broker": Broker(),
            "store": Store(),
            "engine": config.engine.model_copy(
                update={"kind": "tiny", "url": "", "replicas": (), "token_file": "", "weights_dir": ""}
            ),
            "agent_loop": config.agent_loop.model_copy(
                update={"run_key_file": "", "journal_dir": "", "bind": "127.0.0.1", "advertise": ""}
            ),
            "packer": config.packer.model_copy(update={"socket_dir": ""}),
            "trainer": config.trainer.model_copy(update={"rendezvous": ""}),
        }
    )


def export(where: Where, file: Path, payloads: bool, say: Say) -> None:
    """Writes the run's export. Raises BadInput, LaunchError, LogError, BrokerUnavailable, StoreError."""
    if file.exists():
        raise BadInput(f"{file} exists already; name another file, or remove it")
    found = find_run(where)
    if isinstance(found, LogView):
        raise BadInput(
            f"the file holds the run's configuration, of which the log of run {found.run} tells a part: give it with --config"
        )
    with _named(file):
        manifest = asyncio.run(_export(found, file, payloads))
        say(f"run {found.run}: {_counted(manifest)} in {file}, {size(file.stat().st_size)}")


async def _export(config: RunConfig, file: Path, payloads: bool) -> Manifest:
    async with open_log(config, "export") as log:
        part = await extent(log)
        # After the log's end is fixed: whatever an event of it names was written before the event.
        store = ObjectStore.open(config.store) if payloads else None
        objects = sorted([found async for found in store.list(run_prefix(config.run))]) if store else []
        manifest = Manifest(
            run=config.run,
            first=part.first,
            last=part.last,
            messages=part.messages,
            payloads=payloads,
            objects=len(objects),
            object_bytes=sum(count for _, count in objects),
        )
        with ArchiveWriter(file, manifest, dumps(portable(config))) as writer:
            with progress("exporting messages", part.messages) as tell:
                async for message in export_messages(log, part):
                    writer.message(message)
                    tell(message.seq - part.first + 1)
            if store is not None:
                with progress("exporting objects", manifest.object_bytes, in_bytes=True) as tell:
                    done = 0
                    for group in groups(objects):
                        bodies = await asyncio.gather(*(store.get(key) for key, _ in group))
                        for (key, _), body in zip(group, bodies, strict=True):
                            writer.object(key, body)
                            done += len(body)
                        tell(done)
            writer.close()
            return manifest


def groups(objects: list[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """In order, each so many or so large as are moved at once; one that is larger is alone."""
    group: list[tuple[str, int]] = []
    total = 0
    for key, count in objects:
        if group and (len(group) == _AT_ONCE or total + count > _AT_ONCE_BYTES):
            yield group
            group, total = [], 0
        group.append((key, count))
        total += count
    if group:
        yield group


@dataclass(frozen=True)
class Target:
    """Where an import goes: a directory for the record, and a broker and a store unless they are the directory's own."""

    directory: Path
    broker: Broker
    store: Store


def import_file(file: Path, target: Target, say: Say) -> None:
    """Brings a run from its file. Raises BadInput, LaunchError, LogError, BrokerUnavailable, StoreError."""
    with _named(file), Archive(file) as archive:
        with progress("checking", archive.bytes, in_bytes=True) as tell:
            for at in archive.check():
                tell(at)
        try:
            config = loads(archive.config, f"config.toml in {file}")
        except ConfigError as error:
            raise BadInput(str(error)) from error
        if config.run != archive.manifest.run or config != portable(config):
            raise BadInput(f"{file}: its config.toml is not that of an export of run {archive.manifest.run}")
        directory = make_directory(target.directory.absolute())
        asyncio.run(_import(archive, config, directory, target, say))


async def _import(archive: Archive, portable_: RunConfig, directory: Path, target: Target, say: Say) -> None:
    run = portable_.run
    store_config = target.store.model_copy(
        update={"url": target.store.url or (directory / "objects").as_uri()}
    )
    given = portable_.model_copy(
        update={"directory": str(directory), "broker": target.broker, "store": target.store}
    )
    async with _broker(target.broker, directory) as broker:
        config = given.model_copy(update={"broker": broker, "store": store_config})
        home = home_of(directory, run)
        _check_records(home, config)
        log = await Log.connect(broker, run, "import", user=LAUNCHER)
        try:
            start = await compare(log, archive)
            store = await open_place(config, resumed=True)
            claim, claimed = await _check_place(store, archive, config)
            recorded = (home / RECORD).is_file()
            make_directory(home)
            if claimed and not recorded and not (home / IMPORTING).is_file():
                (home / BORROWED).touch()
            if not recorded:
                (home / GIVEN).write_text(dumps(given))
                (home / IMPORTING).write_text(dumps(config))
            await _put_objects(store, archive, claim_key(run))
            with progress("importing messages", archive.manifest.messages) as tell:
                await import_messages(log, archive, start, lambda seq: tell(seq - archive.manifest.first + 1))
            if claim is not None and archive.manifest.payloads:
                await _put(store, claim_key(run), claim)
            if not recorded:
                (home / IMPORTING).replace(home / RECORD)
        finally:
            await log.close()
    there = start - archive.manifest.first
    before = f"; {there:,} of the messages were there already" if there else ""
    say(f"run {run}: {_counted(archive.manifest)} from {archive.path}{before}")
    if not archive.manifest.payloads:
        say("the file has no objects: the run can be read, replayed and traced, but not go on")


@asynccontextmanager
async def _broker(given: Broker, directory: Path) -> AsyncIterator[Broker]:
    if given.url:
        yield given
    else:
        async with embedded_broker(directory) as broker:
            yield broker


def _check_records(home: Path, config: RunConfig) -> None:
    """Refuses a directory whose run of this name is of another broker or store. Raises LaunchError."""
    for name in (RECORD, IMPORTING):
        if not (home / name).is_file():
            continue
        theirs = read_record(home / name)
        same_broker = is_embedded(theirs) if is_embedded(config) else theirs.broker.url == config.broker.url
        if not same_broker or theirs.store.url != config.store.url:
            raise LaunchError(
                f"{home} is the record of a run {config.run} in another broker or store; import into another directory with "
                f"--directory, or remove that run first: packtrain runs rm {config.run}{inside(Path(config.directory))}"
            )


def log_id(archive: Archive) -> str | None:
    """Id of the archive's `run.started`, by which the claim on a store names a log; None when it is forgotten."""
    run = archive.manifest.run
    subject = subject_filter(run, RunStarted.type, ALL, run)
    for found in archive.messages():
        if found.subject == subject:
            return (found.headers or {}).get("ce-id")
    return None


async def _check_place(store: ObjectStore, archive: Archive, config: RunConfig) -> tuple[bytes | None, bool]:
    """Refuses a store that holds objects of another run of that name, unchanged.

    The claim of this one, if it is known; and whether it stands there already.
    """
    run = config.run
    name = log_id(archive)
    mine = claim_body(name) if name is not None else None
    claimed = await claim_of(store, run)
    members = dict(archive.objects())
    ours = {key: member.bytes for key, member in members.items()}
    named = mine
    if named is None and (member := members.get(claim_key(run))) is not None:
        named = archive.read(member)
    foreign = None
    if claimed is not None and claimed != named:
        foreign = claim_key(run)
    else:
        async for key, count in store.list(run_prefix(run)):
            if ours.get(key, count if claimed is not None else -1) != count:
                foreign = key
    if foreign is not None:
        raise LaunchError(
            f"{config.store.url} holds {foreign}, an object of another run {run}; nothing was changed. Give another place with "
            "--store or --directory"
        )
    return mine, claimed is not None


async def _put_objects(store: ObjectStore, archive: Archive, last: str) -> None:
    """Stores all objects but `last`."""
    members = dict(archive.objects())
    done = 0
    with progress("importing objects", archive.manifest.object_bytes, in_bytes=True) as tell:
        for group in groups([(key, member.bytes) for key, member in members.items() if key != last]):
            bodies = [(key, archive.read(members[key])) for key, _ in group]
            await asyncio.gather(*(_put(store, key, body) for key, body in bodies))
            done += sum(len(body) for _, body in bodies)
            tell(done)


async def _put(store: ObjectStore, key: str, body: bytes) -> None:
    try:
        await store.create(key, body)
    except ObjectExists:
        if await store.get(key) != body:
            raise


def _counted(manifest: Manifest) -> str:
    objects = f", {manifest.objects:,} objects ({size(manifest.object_bytes)})" if manifest.payloads else ""
    return f"{manifest.messages:,} messages{objects}"


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Errors of the file and of the log as errors of the command."""
    try:
        yield
    except ArchiveError as error:
        raise BadInput(str(error)) from error
    except LogError as error:
        raise LaunchError(str(error)) from error
    except BrokerUnavailable:
        raise
    except OSError as error:
        raise LaunchError(f"{error.filename or file}: {error.strerror or error}") from error
