"""A log into an archive, and back into a broker.

Promises:
- `export_messages` gives every message of the log from its first to the one that was its last when it began, or raises;
- `import_messages` leaves a log whose every message has the sequence, subject, headers (`archive_format`, canonical form)
  and body of the archive's. The broker itself checks each one's place (`Nats-Expected-Last-Sequence`), so nothing is
  stored out of order, twice, or between another writer's;
- `compare` refuses a log that holds anything else than a beginning of the archive, and changes nothing; one that holds a
  beginning is completed, so an import that was interrupted goes on when it is started again;
- while the broker is away both wait.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js.api import Header, PubAck
from nats.js.errors import APIError

from pipeline.log.archive import Archive
from pipeline.log.archive_format import canonical
from pipeline.log.fold import Found
from pipeline.log.log import Log
from pipeline.log.patience import LogError

_WINDOW = 256
_ACK_S = 3.0
_TRIES = 6
_SHORT_WINDOW_S = 0.1
"""The shortest in which JetStream takes a second message with the same id for the first. Two messages of a log may have
one id when they were stored longer apart than its usual window, as an import is faster than the run was."""
_HEADER_ROOM = 1024
"""The header with the place is added to a message that may be as large as the stream takes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Stream sequences of the first and the last message; none between them is missing."""

    first: int
    last: int

    @property
    def messages(self) -> int:
        return self.last - self.first + 1


async def extent(log: Log) -> Extent:
    """What there is to export now. Raises LogError on a log that is empty or has holes."""
    state = (await log.info()).state
    if not state.messages:
        raise LogError(f"run {log.run} has no messages to export")
    if state.messages != state.last_seq - state.first_seq + 1:
        raise LogError(
            f"the log of run {log.run} has holes: {state.messages} messages from {state.first_seq} to {state.last_seq}; "
            "it cannot be exported, as an import could not give every message its sequence"
        )
    return Extent(state.first_seq, state.last_seq)


async def export_messages(log: Log, part: Extent) -> AsyncIterator[Found]:
    """The messages as they are, dead letters among them. Raises LogError when one is gone before it was read."""
    expected = part.first
    async with contextlib.aclosing(log.messages(">", part.first)) as messages:
        async for found in messages:
            if found.seq != expected:
                raise LogError(
                    f"message {expected} of run {log.run} was removed while it was exported; export again"
                )
            yield found
            if found.seq == part.last:
                return
            expected += 1


async def import_messages(
    log: Log, archive: Archive, start: int, done: Callable[[int], None] = lambda _: None
) -> None:
    """Stores the archive's messages from `start` on, which `compare` gave. `done` is told sequences as they are stored.

    The archive was checked. Raises LogError, ArchiveError.
    """
    manifest = archive.manifest
    await log.create(manifest.first)
    if start <= manifest.last:
        await _open(log)
        await _store(log, archive, start, done)
        await log.create(manifest.first)
    found = await extent(log)
    if (found.first, found.last) != (manifest.first, manifest.last):
        raise LogError(
            f"run {log.run} was written to during its import: it has messages {found.first} to {found.last}, the file "
            f"{manifest.first} to {manifest.last}; remove it there (packtrain runs rm) and import again"
        )


async def compare(log: Log, archive: Archive) -> int:
    """The first sequence that the broker lacks. Changes nothing. Raises LogError when its log is another one."""
    manifest = archive.manifest
    if not await log.exists():
        return manifest.first
    state = (await log.info()).state
    if state.messages == 0 and state.last_seq == manifest.first - 1:
        return manifest.first
    if (
        state.messages == 0
        or state.first_seq != manifest.first
        or state.messages != state.last_seq - state.first_seq + 1
    ):
        raise _other(log, f"it begins at message {state.first_seq}, the file at {manifest.first}")
    if state.last_seq > manifest.last:
        raise _other(log, f"it goes on to message {state.last_seq}, the file to {manifest.last}")
    recorded = archive.messages()
    async for found in export_messages(log, Extent(state.first_seq, state.last_seq)):
        if canonical(found, manifest.first) != next(recorded):
            raise _other(log, f"message {found.seq} differs")
    return state.last_seq + 1


def _other(log: Log, how: str) -> LogError:
    return LogError(
        f"the broker has another run {log.run} ({how}); nothing was changed. Import into another broker or directory, or "
        f"remove that run there first (packtrain runs rm)"
    )


async def _open(log: Log) -> None:
    """Lets the stream take what it took from its first writers; `Log.create` makes it as it should be again."""
    config = (await log.info()).config
    size = (config.max_msg_size or 0) + _HEADER_ROOM
    opened = config.evolve(duplicate_window=_SHORT_WINDOW_S, max_msg_size=size)
    await log.patiently(lambda: log.js.update_stream(opened), f"opening of {log.stream}")


async def _store(log: Log, archive: Archive, start: int, done: Callable[[int], None]) -> None:
    """Publishes from `start` on, many in flight, each in its place; goes on from where the stream is after trouble."""
    tries = 0
    while start <= archive.manifest.last:
        reason = await _burst(log, archive, start, done)
        if reason is None:
            return
        stored = (await log.info()).state.last_seq
        tries = 0 if stored >= start else tries + 1
        if tries == _TRIES:
            raise LogError(
                f"message {start} of run {log.run} is not stored: {reason}; what was imported stays, the same import goes on with it"
            )
        start = stored + 1
        await asyncio.sleep(2 * _SHORT_WINDOW_S * (1 + tries))


async def _burst(log: Log, archive: Archive, start: int, done: Callable[[int], None]) -> str | None:
    """Publishes until the end or the first trouble; what it was."""
    waiting: deque[tuple[int, asyncio.Future[PubAck]]] = deque()
    try:
        for found in archive.messages(start):
            headers = {**(found.headers or {}), Header.EXPECTED_LAST_SEQUENCE.value: str(found.seq - 1)}
            future = await log.js.publish_async(
                found.subject, found.body, wait_stall=_ACK_S, stream=log.stream, headers=headers
            )
            waiting.append((found.seq, future))
            if len(waiting) >= _WINDOW:
                done(await _acknowledged(*waiting.popleft()))
        while waiting:
            done(await _acknowledged(*waiting.popleft()))
    except (NatsError, OSError, TimeoutError) as error:
        return (error.description if isinstance(error, APIError) else str(error)) or type(error).__name__
    finally:
        for _, future in waiting:
            if not future.cancel() and not future.cancelled():
                future.exception()  # those after the first trouble were refused too
    return None


async def _acknowledged(seq: int, future: asyncio.Future[PubAck]) -> int:
    # A future of a connection that broke never ends by itself.
    ack = await asyncio.wait_for(future, _ACK_S)
    if ack.duplicate or ack.seq != seq:
        raise NatsError(f"the broker took message {seq} for message {ack.seq}, which has the same id")
    return seq
