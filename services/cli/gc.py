"""`packtrain gc`: what of a run's objects its retention no longer keeps, and what no event names; shown, or removed.

Promises:
- without --apply nothing is removed;
- what goes is decided on the whole log, from its first message on; a log that has lost its beginning or holds what this release
  cannot read is refused, and so is a place that is another log's, or that an import only borrowed;
- interrupted, the same command goes on: what is removed is not there the next time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.table import Table

from pipeline.log import Log
from pipeline.retention.core import REASONS, RetentionCore
from pipeline.retention.names import named, owner
from pipeline.retention.orphans import GRACE_S, orphan
from pipeline.store import ObjectStore
from pipeline.store.claims import claim_body, claim_of
from schemas.config import Retention, RunConfig
from schemas.envelope import Event
from schemas.keys import claim_key, run_prefix
from services.cli.embedded import BadInput, LaunchError
from services.cli.progress import progress
from services.cli.reach import find_run, open_log, store_of
from services.cli.summary import size
from services.cli.where import Where
from services.imported import borrows

IMAGE, ORPHAN = "image", "orphan"
TOLD = {
    **REASONS,
    IMAGE: "images that no sequence shows that has not gone",
    ORPHAN: "objects that no event names",
}
_AT_ONCE = 500


@dataclass(frozen=True)
class Request:
    """Which run, and what of it goes: its own policy, with the given numbers in their place."""

    where: Where
    rules: dict[str, int]
    orphans: bool = False
    apply: bool = False
    json: bool = False


@dataclass(frozen=True)
class Doomed:
    """An object that goes."""

    key: str
    bytes: int
    reason: str


def collect(request: Request, tell: Callable[[str], None], show: Callable[[Table], None]) -> None:
    """Shows or removes. Raises BadInput, LaunchError, BrokerUnavailable, StoreError."""
    config = find_run(request.where)
    policy = Retention.model_validate(config.retention.model_dump() | request.rules)
    if not policy.removes and not request.orphans:
        raise BadInput(
            f"run {config.run} keeps everything: it has no [retention]; give --rejected-steps, --consumed-steps or "
            "--checkpoint-steps, or --orphans"
        )
    if borrows(config):
        raise LaunchError(
            f"the objects of run {config.run} were in {config.store.url} before its import: the log that was exported may still use "
            "them, and nothing was removed"
        )
    asyncio.run(_collect(config, policy, request, tell, show))


async def _collect(
    config: RunConfig,
    policy: Retention,
    request: Request,
    tell: Callable[[str], None],
    show: Callable[[Table], None],
) -> None:
    store = store_of(config)
    async with open_log(config, "gc") as log:
        reading = await read_log(log)
    await _check_claim(store, config.run, reading.log_id)
    doomed = await _doomed(store, reading, policy, request.orphans)
    if request.json and not request.apply:
        for each in doomed:
            tell(_line(each))
    elif not request.json:
        show(table(doomed))
    if request.apply:
        with progress("removing objects", len(doomed)) as done:
            for first in range(0, len(doomed), _AT_ONCE):
                some = doomed[first : first + _AT_ONCE]
                await store.remove([each.key for each in some])
                done(first + len(some))
                if request.json:
                    for each in some:
                        tell(_line(each))
    if not request.json:
        tell(f"run {config.run}: {_ending(doomed, request.apply)}")


def _ending(doomed: list[Doomed], applied: bool) -> str:
    counted = f"{len(doomed):,} objects ({size(sum(each.bytes for each in doomed))})"
    if applied:
        return f"{counted} removed"
    return f"{counted} would be removed; nothing was: --apply removes them" if doomed else "nothing to remove"


def _line(each: Doomed) -> str:
    return json.dumps({"key": each.key, "bytes": each.bytes, "reason": each.reason})


def table(doomed: list[Doomed]) -> Table:
    """By reason: objects, bytes."""
    shown = Table("reason", "", "objects", "bytes")
    objects, total = Counter[str](), Counter[str]()
    for each in doomed:
        objects[each.reason] += 1
        total[each.reason] += each.bytes
    for reason, told in TOLD.items():
        if objects[reason]:
            shown.add_row(reason, told, f"{objects[reason]:,}", size(total[reason]))
    return shown


@dataclass
class Reading:
    """A whole log, folded. `keys`: what its events name. `log_id`: of its run.started; empty: it has none."""

    core: RetentionCore
    keys: set[str]
    log_id: str = ""


async def read_log(log: Log) -> Reading:
    """Raises LaunchError when the log has lost its beginning."""
    first = (await log.info()).state.first_seq
    if first > 1:
        raise LaunchError(
            f"the log of run {log.run} begins at message {first}: what its objects are cannot be told without its beginning, and "
            "nothing was removed"
        )
    found = Reading(RetentionCore(log.run), set())
    head = await log.head()
    if not head:
        return found
    with progress("reading the log", head) as done:
        async for event in log.read():
            found.core.read(event)
            if isinstance(event, Event):
                # Only what may be an orphan is kept in mind.
                found.keys.update(key for key in named(log.run, event.fact) if owner(log.run, key))
                found.log_id = found.log_id or (event.id if event.fact.type == "run.started" else "")
            done(event.seq)
            if event.seq >= head:
                break
    return found


async def _check_claim(store: ObjectStore, run: str, log_id: str) -> None:
    if not log_id or await claim_of(store, run) != claim_body(log_id):
        raise LaunchError(
            f"the objects below {run_prefix(run)} in {store.url} are of another run {run}, or of none that is known: "
            f"{claim_key(run)} does not name this log, and nothing was removed"
        )


async def _doomed(store: ObjectStore, reading: Reading, policy: Retention, orphans: bool) -> list[Doomed]:
    """What goes and is there, in the order of the keys. Raises LaunchError on an unreadable log."""
    core = reading.core
    if core.unreadable:
        raise LaunchError(f"{core.unreadable}; nothing was removed")
    # Before anything is taken: what is taken is forgotten.
    listed = [found async for found in store.list_dated(run_prefix(core.run))]
    now = datetime.now(UTC)

    def lost(key: str, written: datetime) -> bool:
        old = (now - written).total_seconds() > GRACE_S
        return orphans and old and key not in reading.keys and orphan(core, key)

    reasons = {key: ORPHAN for key, _, written in listed if lost(key, written)}
    reasons |= core.take(policy)
    shown = core.images(policy)
    if shown is not None:
        images = {key for key in reading.keys if (own := owner(core.run, key)) and own.form == "image"}
        reasons |= dict.fromkeys(images - shown, IMAGE)
    return sorted(_there(listed, reasons), key=lambda each: each.key)


def _there(listed: list[tuple[str, int, datetime]], reasons: dict[str, str]) -> Iterator[Doomed]:
    for key, count, _ in listed:
        if key in reasons:
            yield Doomed(key, count, reasons[key])


async def fate(config: RunConfig, key: str) -> str:
    """Why retention removed the object, or may have; empty when it does not remove it."""
    async with open_log(config, "gc") as log:
        core = (await read_log(log)).core
    state = core.dump()
    if (reason := core.take(config.retention).get(key)) is not None:
        return f"retention removed it: it is {TOLD[reason]}"
    every = RetentionCore(core.run)
    every.load(state)
    reason = every.take(Retention(rejected_steps=1, consumed_steps=1, checkpoint_steps=1)).get(key)
    return (
        f"it is {TOLD[reason]}, which packtrain gc removes when it is given numbers of its own"
        if reason is not None
        else ""
    )
