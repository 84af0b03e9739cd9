"""Publishing facts with exactly-once effect.

Promises:
- a fact is stored only as the first event on its subject (`Nats-Expected-Last-Subject-Sequence: 0`); the second writer
  gets the winner's event back, not an error. What stands there and is no event (a stranger wrote it) does not count: the
  fact is stored after it, by compare-and-set on that message;
- a publish whose acknowledgement was lost is told from a lost race by the event id, never by guessing: on one server the
  retry is refused as a wrong sequence, on a replicated stream it is acknowledged as a duplicate;
- a burst is one atomic batch: all of it is stored, in order, also over an outage; when one of it is decided already, each
  goes on its own.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header, RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from pipeline.log.acks import Acks
from pipeline.log.patience import LogError, Patience
from pipeline.log.tracing import publishing
from schemas.envelope import EXPECTED_LAST, Event, Message, Unknown, at, decode, encode, new_event
from schemas.facts import Fact

_LOG = logging.getLogger("packtrain.log")
WRONG_LAST_SEQUENCE = {10071, 10164}
"""JetStream's codes for a lost compare-and-set, on one server and on a replicated stream."""
_NO_BATCHES = {10174, 10205}
"""Its codes for a stream that takes no atomic batches (made by an older version of ours)."""
PUBLISH_TIMEOUT_S = 3.0
_DECIDED = {*WRONG_LAST_SEQUENCE, 10201}
"""Its codes for a batch of which something is in the log already: another's, or our own, stored before."""
# Looked up once: an enum's value costs a microsecond.
_MSG_ID, _STREAM = Header.MSG_ID.value, Header.EXPECTED_STREAM.value
_BATCH = 256
_BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Published:
    """The event on the fact's subject. `won` is False when another writer had decided already."""

    event: Event
    won: bool


class Publisher:
    """See the module's promises. Waits while the broker is away (`pipeline.log.patience`)."""

    def __init__(
        self, client: Client, js: JetStreamContext, patience: Patience, stream: str, run: str, producer: str
    ) -> None:
        self._client = client
        self._js = js
        self._patience = patience
        self._stream = stream
        self._run = run
        self._producer = producer
        self._atomic = True
        self._acks = Acks(client, PUBLISH_TIMEOUT_S)

    async def publish(self, fact: Fact, cause: Event | None) -> Published:
        """Raises BodyTooLarge or BadName for a fact that may not be an event, LogError when the log will never take it."""
        with publishing(fact, self._run, cause) as traceparent:
            event = new_event(fact, self._producer, cause, traceparent)
            return await self._single(event, encode(event, self._run))

    async def publish_all(self, facts: Sequence[tuple[Fact, Event | None]]) -> list[Published]:
        """Several facts, in order. Raises as `publish` does; then the log holds some of them."""
        pairs: list[tuple[Event, Message]] = []
        published: list[Published] = []
        # A span a fact, for its place in its trace; all last until all is sent, as the bursts are sent together.
        with ExitStack() as spans:
            for fact, cause in facts:
                traceparent = spans.enter_context(publishing(fact, self._run, cause))
                event = new_event(fact, self._producer, cause, traceparent)
                pairs.append((event, encode(event, self._run)))
            for burst in _bursts(pairs):
                published += await self._burst(burst)
        return published

    async def first(self, subject: str) -> tuple[Event | None, int]:
        """The fact on a subject: the first event there. Also the sequence of the last message before it that is none; 0: none.

        Raises LogError on an event of a newer version: what it says is not ours to guess.
        """
        after = 0
        while True:
            try:
                raw = await self._js.get_msg(self._stream, seq=after + 1, subject=subject, next=True)
            except NotFoundError:
                return None, after
            found = decode_raw(raw)
            if isinstance(found, Event):
                return found, after
            if isinstance(found, Unknown):
                raise unreadable(subject, found)
            after = found.seq

    async def _single(self, event: Event, message: Message) -> Published:
        return await self._patience(
            lambda: self._store(event, message), f"publish of {message.subject}", stores=True
        )

    async def _store(self, event: Event, message: Message) -> Published:
        expected = 0
        while True:
            headers = {
                **message.headers,
                _MSG_ID: event.id,
                _STREAM: self._stream,
                EXPECTED_LAST: str(expected),
            }
            try:
                ack = await self._acks.publish(message.subject, message.body, headers)
                if not ack.duplicate:
                    return Published(at(event, ack.seq), won=True)
            except APIError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
            winner, rubbish = await self.first(message.subject)
            if winner is not None:
                return Published(winner, won=winner.id == event.id)
            if rubbish == expected:
                raise NatsError(f"{message.subject} is taken, but holds no event yet")
            expected = rubbish

    async def _burst(self, burst: list[tuple[Event, Message]]) -> list[Published]:
        published: list[Published] = []
        while len(burst) > 1 and self._atomic:
            try:
                stored = await self._batch(burst)
                if stored is not None:
                    return published + stored
                _LOG.info("the broker knows no atomic batches: each of a burst goes on its own")
                self._atomic = False
                break
            except APIError as error:
                if error.err_code in _NO_BATCHES:
                    _LOG.info("%s takes no atomic batches: %s", self._stream, error.description)
                    self._atomic = False
                    break
                if error.err_code in _DECIDED:
                    break
            except (NatsError, OSError, TimeoutError):
                if self._client.is_closed:
                    raise
            # The broker went away, or is full: nobody knows whether the batch was stored. Its first fact alone waits and
            # finds out; the others are a batch again, so that their order stays.
            event, message = burst[0]
            published.append(await self._single(event, message))
            burst = burst[1:]
        # One of them is decided already, and event ids tell which.
        singles = await asyncio.gather(*(self._single(event, message) for event, message in burst))
        return published + list(singles)

    async def _batch(self, burst: list[tuple[Event, Message]]) -> list[Published] | None:
        """All or nothing; None: the broker took each for a message of its own, and whether it did is not known.

        Raises APIError when the broker refuses it, TimeoutError when nobody knows.
        """
        batch, last = uuid.uuid4().hex, len(burst)
        for number, (event, message) in enumerate(burst, 1):
            headers = {
                **message.headers,
                _MSG_ID: event.id,
                _STREAM: self._stream,
                "Nats-Batch-Id": batch,
                "Nats-Batch-Sequence": str(number),
            }
            if number < last:
                await self._client.publish(message.subject, message.body, headers=headers)
                continue
            headers["Nats-Batch-Commit"] = "1"
            ack = await self._acks.publish(message.subject, message.body, headers)
            if ack.batch != batch:
                return None
            first = ack.seq - last + 1
            return [Published(at(event, first + i), won=True) for i, (event, _) in enumerate(burst)]
        raise AssertionError("unreachable")


def unreadable(subject: str, found: Unknown) -> LogError:
    """What to raise where an event of a newer version stands and would have to be understood."""
    return LogError(
        f"{subject} holds {found.type} version {found.version}, which this version of packtrain cannot read; upgrade it"
    )


def decode_raw(raw: RawStreamMsg):
    """What `decode` makes of a message that was asked for by sequence or subject."""
    return decode(raw.subject or "", raw.headers, raw.data or b"", raw.seq or 0)


def _bursts(pairs: list[tuple[Event, Message]]) -> Iterator[list[tuple[Event, Message]]]:
    """In order, each small enough for one batch and for the client's buffer."""
    burst: list[tuple[Event, Message]] = []
    size = 0
    for pair in pairs:
        if burst and (len(burst) == _BATCH or size + len(pair[1].body) > _BATCH_BYTES):
            yield burst
            burst, size = [], 0
        burst.append(pair)
        size += len(pair[1].body)
    if burst:
        yield burst
