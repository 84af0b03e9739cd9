"""How a run begins: its stream and bucket, `run.started`, the claim on the store, and groups of another run if it is given any.

Promises:
- services find all that they need made: none of them needs the right to make it;
- groups of another run are in the log before a service of this one starts, with their payloads under its own prefix: what
  becomes of the other run is nothing to it;
- which groups those are stands in `run.started`, and their facts in an object that it names: a launcher that was killed
  on the way, or goes on with the run, enters the same ones, each once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import orjson
from nats.errors import Error as NatsError

from pipeline.batch.inheritance import Entrance, Leftovers, NotInheritable, entrance
from pipeline.checksum import crc32c
from pipeline.log import Log
from pipeline.log.snapshot import open_bucket
from pipeline.store import ObjectExists, ObjectStore
from schemas.config import Decisions, RunConfig
from schemas.envelope import Event
from schemas.facts import ALL, FACTS, Fact, Inherited, RunStarted, SequenceFinished
from schemas.keys import run_prefix
from schemas.payload import Ref
from services.cli.claim import claim
from services.cli.embedded import LaunchError
from services.cli.live import counted
from services.cli.reach import LAUNCHER
from services.cli.runs import decided_otherwise

_AT_ONCE = 256
Say = Callable[[str], None]


async def begin(
    log: Log, config: RunConfig, store: ObjectStore, resumed: bool, groups_from: str, say: Say
) -> None:
    """Begins the run or finds it begun. `groups_from`: the run whose groups it begins with; empty: none, or as it was begun.
    `resumed`: another may have begun it, but with the same decisions.

    Raises LaunchError, BrokerUnavailable, StoreError, LogError.
    """
    inherited = None
    # Before there is a stream: what is refused leaves no run behind.
    if groups_from and not (await log.exists() and await log.last(RunStarted.type, ALL, config.run)):
        inherited = await _inherit(groups_from, config, store, say)
    try:
        await log.create()
        await open_bucket(log, create=True)
    except NatsError as error:
        raise LaunchError(
            f"broker {config.broker.url} cannot hold the stream of run {config.run} with replicas = "
            f"{config.broker.replicas}: {error}; set broker.replicas, or name another run"
        ) from error
    started = RunStarted(run=config.run, config=config.decisions(), inherited=inherited)
    published = await log.publish(started)
    if not published.won and not resumed:
        raise LaunchError(
            f"run {config.run} was started by another launcher just now; name another run with --run"
        )
    fact = published.event.fact
    assert isinstance(fact, RunStarted)
    check_decisions(config, fact)
    if groups_from and (fact.inherited is None or fact.inherited.run != groups_from):
        raise LaunchError(
            f"run {config.run} has begun without groups of run {groups_from}; go on with it without --groups-from, or begin "
            "another run with them"
        )
    # Services that are started beside us do not wait for the claim: of one that was killed before it they may have gone on.
    newest = await log.latest(SequenceFinished.type)
    named = newest.fact.payload.key if newest and isinstance(newest.fact, SequenceFinished) else None
    await claim(store, config, published.event.id, named is not None and await store.size(named) is None)
    if fact.inherited is not None:
        await _enter(log, store, published.event, fact.inherited.facts)


def check_decisions(config: RunConfig, started: RunStarted) -> None:
    """Refuses a configuration that decides otherwise than the one that the run was begun with. Raises LaunchError."""
    if differing := decided_otherwise(config, started.config):
        raise LaunchError(
            f"run {config.run} was begun with other settings ({', '.join(differing)}); give the configuration that it was begun with, "
            "or name another run in this one"
        )


async def _inherit(run: str, config: RunConfig, store: ObjectStore, say: Say) -> Inherited:
    """What the run is to begin with; its facts are in the store. Raises LaunchError when that cannot be."""
    found = await _entrance(run, config)
    await _check_payloads(run, found, store)
    body = orjson.dumps(
        {
            "facts": [[fact.type, cause, fact.model_dump(mode="json")] for fact, cause in found.facts],
            "copies": found.copies,
        }
    )
    checksum = crc32c(body)
    key = f"{run_prefix(config.run)}/inherited/{checksum:08x}.json"
    # It may be there, of a launcher that came no further: its checksum says that it is the same.
    with contextlib.suppress(ObjectExists):
        await store.create(key, body)
    given = ", ".join(f"{source} {count}" for source, count in found.groups.items())
    old = f"; {counted(found.stale, 'group')} too old" if found.stale else ""
    say(
        f"run {config.run} begins with {counted(sum(found.groups.values()), 'group')} of run {run}{f': {given}' if given else ''}{old}"
    )
    return Inherited(run=run, groups=found.groups, facts=Ref(key=key, bytes=len(body), crc32c=checksum))


async def _entrance(run: str, config: RunConfig) -> Entrance:
    if run == config.run:
        raise LaunchError(f"run {run} cannot begin with its own groups; name another run with --groups-from")
    log = await Log.connect(config.broker, run, LAUNCHER, user=LAUNCHER)
    try:
        if not await log.exists():
            raise LaunchError(f"broker {config.broker.url} has no run {run!r} to take groups from")
        left, head = Leftovers(run), await log.head()
        if not head:
            raise LaunchError(f"the log of run {run} is empty: there are no groups to take from it")
        async for event in log.read():
            if isinstance(event, Event):
                left.fold(event)
            if event.seq >= head:
                break
        if left.decisions is None:
            raise LaunchError(f"run {run} has no run.started in its log: there are no groups to take from it")
        return entrance(left, config.run, Decisions.model_validate(config.decisions()))
    except NotInheritable as error:
        raise LaunchError(str(error)) from error
    finally:
        await log.close()


async def _check_payloads(run: str, found: Entrance, store: ObjectStore) -> None:
    for first in range(0, len(found.copies), _AT_ONCE):
        some = [old for old, _ in found.copies[first : first + _AT_ONCE]]
        for key, size in zip(some, await asyncio.gather(*map(store.size, some)), strict=True):
            if size is None:
                raise LaunchError(
                    f"{store.url} has no {key}, a payload of run {run}: take the store that it was run with, or begin without its groups"
                )


async def _enter(log: Log, store: ObjectStore, started: Event, ref: Ref) -> None:
    """Copies the payloads and publishes the facts, unless that was done."""
    content = orjson.loads(await store.get(ref))
    facts: list[tuple[Fact, Event | None]] = []
    for type_, cause, body in content["facts"]:
        fact = FACTS[type_].model_validate(body)
        # Of the other run's log, by its id: all that there is of it here.
        facts.append((fact, Event(fact, cause, started.time, started.producer)))
    if not facts:
        return
    *others, (last, cause) = facts
    # By itself, so that it is there only when all others are.
    if await log.last(last.type, last.scope(), last.id()) is not None:
        return
    copies = content["copies"]
    for first in range(0, len(copies), _AT_ONCE):
        await asyncio.gather(*(store.copy(old, new) for old, new in copies[first : first + _AT_ONCE]))
    for first in range(0, len(others), _AT_ONCE):
        await log.publish_all(others[first : first + _AT_ONCE])
    await log.publish(last, cause)
