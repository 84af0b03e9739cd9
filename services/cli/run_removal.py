"""`packtrain runs rm`: everything of one run, and nothing of another.

Promises:
- nothing is removed from a run that goes on or is about to, nor before a person or --yes agreed, nor anything else than
  what they agreed to;
- first goes the run's claim on its objects, without which no launcher goes on with it; last goes its record, so that the
  same command finishes what was interrupted;
- objects whose claim does not name the log that is removed are left: also when there is no such log, as for a launcher
  that was refused the store; and so are those that an import found there, which the log that was exported may still use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nats.js.errors import NotFoundError

from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.claims import claim_body, claim_of
from pipeline.store.objects import directory_of
from schemas.config import Broker, Store
from schemas.facts import ALL, RunStarted
from schemas.keys import run_prefix
from services.cli.claim import claim_key
from services.cli.embedded import LaunchError
from services.cli.launcher import find_launcher, holder
from services.cli.live import counted
from services.cli.reach import IMPORTING, RECORD, home_of, inside
from services.cli.run_control import Place, ending, log_of, place_of
from services.cli.summary import size
from services.imported import BORROWED

Say = Callable[[str], None]
Ask = Callable[[str], bool]


@dataclass(frozen=True)
class Holdings:
    """What there is of a run."""

    events: int | None = None
    bytes: int = 0
    objects: tuple[str, ...] = ()
    object_bytes: int = 0
    left: str = ""
    """Why the objects below its prefix are none of its own; empty when they are."""
    files: tuple[Path, ...] = ()

    def told(self, run: str) -> str:
        """In words; empty when there is nothing."""
        parts: list[str] = []
        if self.events is not None:
            parts.append(f"{counted(self.events, 'event')} ({size(self.bytes)})")
        if self.objects:
            parts.append(f"{counted(len(self.objects), 'object')} ({size(self.object_bytes)})")
        parts += [str(path) for path in self.files]
        return f"run {run}: {', '.join(parts)}" if parts else ""


def remove(
    directory: Path, run: str, given: Broker | None, ask: Ask, say: Say, named: Store | None = None
) -> bool:
    """Removes the run; False when the person did not agree. `named`: where its objects are, in place of what a record here says.

    Raises LaunchError, BrokerUnavailable, StoreError.
    """
    home = home_of(directory, run)
    if home.is_symlink():
        raise LaunchError(f"{home} is a link: what it leads to is not removed; remove the link first")
    _check_idle(directory, run)
    return asyncio.run(_remove(directory, home, run, given, ask, say, named))


def _check_idle(directory: Path, run: str) -> None:
    """Refuses a run whose launcher is here, or may be: until its services run, nobody can tell which run it has."""
    running, pid = find_launcher(directory), holder(directory)
    if running is not None and running.run == run:
        raise LaunchError(
            f"run {run} is running (launcher {running.pid}); packtrain runs stop {run}{inside(directory)} stops it first"
        )
    if running is None and pid not in (None, os.getpid()):
        raise LaunchError(
            f"{directory} is in use by process {pid}, which may begin with run {run}; remove it when that has ended"
        )


async def _remove(
    directory: Path, home: Path, run: str, given: Broker | None, ask: Ask, say: Say, named: Store | None
) -> bool:
    async with place_of(directory, run, given) as place, log_of(place, run) as log:
        store = _store(directory, place, given, named)
        own = given is None or place.record is not None
        found = await _look(directory, home, run, log, store, own)
        told = found.told(run)
        if not told:
            raise LaunchError(f"there is no run {run!r} in {directory} and broker {place.broker.url}")
        if not ask(told):
            return False
        _check_idle(directory, run)
        if await _look(directory, home, run, log, store, own) != found:
            raise LaunchError(f"run {run} changed while you were asked; nothing was removed")
        if store is not None and found.objects:
            await store.remove([key for key in found.objects if key == claim_key(run)])
            await store.remove([key for key in found.objects if key != claim_key(run)])
            _sweep(store.url, run)
        ruled = named
        if ruled is None and place.record is not None and place.record.retention.expire_days:
            ruled = place.record.store
        if ruled is not None and ruled.url.startswith("s3://") and not found.left:
            # Of objects that are another log's the rule is that log's, too.
            from pipeline.store.expiry import set_expiry

            await asyncio.to_thread(set_expiry, ruled, run, 0)
        for stream in (f"KV_{log.stream}", log.stream):
            await log.patiently(lambda stream=stream: _delete(log, stream), f"removal of {stream}")
    for path in found.files:
        if path == home:
            _remove_home(home)
        else:
            path.unlink(missing_ok=True)
    say(f"removed {told}")
    if found.left:
        assert store is not None
        say(f"the objects below {run_prefix(run)} stay in {store.url}: {found.left}")
    if store is None:
        say("objects were not looked for: no record here names the run's store; --store does")
    return True


def _store(directory: Path, place: Place, given: Broker | None, named: Store | None) -> ObjectStore | None:
    if named is not None:
        return ObjectStore.open(named, patience_s=10.0)
    if place.record is not None:
        return ObjectStore.open(place.record.store, patience_s=10.0)
    if given is None and (directory / "objects").is_dir():
        return ObjectStore.open(Store(url=(directory / "objects").absolute().as_uri()))
    return None


async def _look(
    directory: Path, home: Path, run: str, log: Log, store: ObjectStore | None, own: bool
) -> Holdings:
    """What there is. Raises LaunchError when services of the run are at work."""
    found = Holdings()
    name: str | None = None
    if await log.exists():
        if await ending(log) is None and (busy := await _busy(log)):
            raise LaunchError(
                f"run {run} is running: its consumers {', '.join(busy)} are being read; packtrain runs stop {run} --cancel ends it"
            )
        messages, size = await log.size()
        found = replace(found, events=messages, bytes=size)
        started = await log.last(RunStarted.type, ALL, run)
        name = started.id if started is not None else None
    if store is not None:
        claimed = await claim_of(store, run)
        if (home / BORROWED).exists():
            found = replace(found, left="they were there before the import")
        # An interrupted removal has no claim, so what is claimed and not by this log is somebody's.
        elif claimed is not None and (name is None or claimed != claim_body(name)):
            found = replace(found, left=f"they are of another run {run}, or of a log that is gone")
        else:
            objects = [entry async for entry in store.list(run_prefix(run))]
            found = replace(
                found, objects=tuple(key for key, _ in objects), object_bytes=sum(n for _, n in objects)
            )
    if own:
        secrets = [directory / "secrets" / f"{kind}-{run}" for kind in ("engine-token", "run-key")]
        found = replace(found, files=tuple(path for path in (*secrets, home) if path.exists()))
    return found


async def _delete(log: Log, stream: str) -> None:
    with contextlib.suppress(NotFoundError):
        await log.js.delete_stream(stream)


async def _busy(log: Log) -> list[str]:
    """Durable consumers of the run that somebody waits on."""
    consumers = await log.js.consumers_info(log.stream)
    return sorted(c.name for c in consumers if c.config.durable_name and c.num_waiting)


def _sweep(url: str, run: str) -> None:
    """Removes the empty directories that a store of files keeps."""
    directory = directory_of(url)
    if directory is not None:
        root = directory / run_prefix(run)
        for path in sorted(root.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if root.is_dir() and not any(root.iterdir()):
            root.rmdir()


def _remove_home(home: Path) -> None:
    """The record last: it says where the rest is, to whoever finishes this."""
    for path in home.iterdir():
        if path.name not in (RECORD, IMPORTING):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for name in (IMPORTING, RECORD):
        (home / name).unlink(missing_ok=True)
    home.rmdir()
