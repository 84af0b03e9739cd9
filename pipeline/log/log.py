"""The log of one run.

Promises:
- `publish` has exactly-once effect: a fact has a subject of its own and is stored only as the first message there
  (`Nats-Expected-Last-Subject-Sequence: 0`). The second writer gets the winner's event back, not an error;
- a publish whose acknowledgement was lost is told from a lost race by the event id, never by guessing;
- while the broker is away, `publish` waits and goes on when it is back: nothing is lost, nothing spins;
- a message that is no event goes to the dead letters with its reason, an unknown type is skipped; both are counted,
  and neither stops a reader, whatever its size and wherever it stands.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from pipeline.log.connection import connect
from pipeline.log.fold import read_events
from pipeline.log.work import Work, open_work
from schemas.config import Broker
from schemas.envelope import Event, Invalid, Message, Unknown, at, decode, encode, new_event
from schemas.facts import FACTS, MAX_BODY, Fact
from schemas.names import Subject, dead_letter_subject, stream_name, subject_filter

_LOG = logging.getLogger("packtrain.log")
_WRONG_LAST_SEQUENCE = {10071, 10164}
"""JetStream's codes for a lost compare-and-set, on one server and on a replicated stream."""
_PUBLISH_TIMEOUT_S = 3.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_HEADER_ROOM = 4096
_MAX_MESSAGE = MAX_BODY + _HEADER_ROOM
_DUPLICATE_WINDOW_S = 120.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Published:
    """The event on the fact's subject. `won` is False when another writer had decided already."""

    event: Event
    won: bool


class Log:
    """See the module's promises. `skipped` counts messages that were no event for this reader, by kind."""

    def __init__(self, client: Client, run: str, producer: str, replicas: int) -> None:
        self._client = client
        # A publish that times out is retried by us, with the event id; the context's own timeout bounds one try.
        self._js: JetStreamContext = client.jetstream(timeout=_PUBLISH_TIMEOUT_S)
        self._replicas = replicas
        self.run = run
        self.producer = producer
        self.stream = stream_name(run)
        self.skipped: Counter[str] = Counter()

    @classmethod
    async def connect(cls, broker: Broker, run: str, producer: str, timeout_s: float = 10.0) -> Log:
        """Connects; raises BrokerUnavailable (see `pipeline.log.connection`)."""
        client = await connect(broker, f"{producer}@{run}", timeout_s)
        return cls(client, run, producer, broker.replicas)

    async def close(self) -> None:
        await self._client.close()

    async def create(self) -> None:
        """Creates the run's stream; does nothing when it exists."""
        config = StreamConfig(
            name=self.stream,
            subjects=[f"rl.{self.run}.>", f"{dead_letter_subject(self.run)}.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            num_replicas=self._replicas,
            max_msg_size=_MAX_MESSAGE,
            duplicate_window=_DUPLICATE_WINDOW_S,
            deny_delete=True,
        )
        await self._js.add_stream(config)

    async def exists(self) -> bool:
        """Whether the run has a stream."""
        try:
            await self._js.stream_info(self.stream)
        except NotFoundError:
            return False
        return True

    async def head(self) -> int:
        """Stream sequence of the newest message that a fold of everything reads, dead letters not among them; 0 when
        there is none. Waits while the broker is away."""
        newest = await self._last_of(subject_filter(self.run))
        return newest.seq if newest is not None else 0

    async def size(self) -> tuple[int, int]:
        """(messages, bytes) in the stream."""
        state = (await self._js.stream_info(self.stream)).state
        return state.messages, state.bytes

    async def publish(self, fact: Fact, cause: Event | None = None) -> Published:
        """Stores the fact unless it is decided already; waits while the broker is away.

        Raises BodyTooLarge or BadName for a fact that may not be an event.
        """
        event = new_event(fact, self.producer, cause)
        message = encode(event, self.run)
        return await self._patiently(lambda: self._store(event, message), f"publish of {message.subject}")

    async def _patiently(self, attempt: Callable[[], Awaitable[_T]], what: str) -> _T:
        """The attempt's result, however long the broker is away."""
        for tries in itertools.count():
            try:
                return await attempt()
            except (NatsError, OSError, TimeoutError) as error:
                if self._client.is_closed:
                    raise
                if tries in (3, 30, 300):
                    _LOG.warning("%s waits for the broker: %s", what, error or type(error).__name__)
                await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
        raise AssertionError("unreachable")

    async def _store(self, event: Event, message: Message) -> Published:
        headers = {
            **message.headers,
            Header.MSG_ID.value: event.id,
            Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0",
        }
        try:
            ack = await self._js.publish(
                message.subject, message.body, stream=self.stream, headers=headers, timeout=_PUBLISH_TIMEOUT_S
            )
            if not ack.duplicate:
                return Published(at(event, ack.seq), won=True)
        except APIError as error:
            if error.err_code not in _WRONG_LAST_SEQUENCE:
                raise
        winner = _readable(message.subject, await self._newest(message.subject))
        if winner is None:
            raise NatsError(f"{message.subject} is taken, but holds no event yet")
        return Published(winner, won=winner.id == event.id)

    async def _newest(self, subject: str) -> Event | Unknown | Invalid | None:
        try:
            raw = await self._js.get_last_msg(self.stream, subject)
        except NotFoundError:
            return None
        return decode(raw.subject or "", raw.headers, raw.data or b"", raw.seq or 0)

    async def _last_of(self, subject: str) -> Event | Unknown | Invalid | None:
        return await self._patiently(lambda: self._newest(subject), f"read of {subject}")

    async def last(self, type_: str, scope: str, id_: str) -> Event | None:
        """The fact of that type, scope and id, if it is in the log. Waits while the broker is away."""
        if type_ not in FACTS:
            raise ValueError(f"no event type {type_!r}; types: {sorted(FACTS)}")
        entity, _, fact = type_.partition(".")
        subject = Subject(self.run, entity, fact, scope, id_).text
        return _readable(subject, await self._last_of(subject))

    async def latest(self, type_: str, scope: str = "*") -> Event | None:
        """The newest fact of that type (and scope), if any. Waits while the broker is away."""
        subject = subject_filter(self.run, type_, scope)
        last = await self._last_of(subject)
        if not isinstance(last, Invalid):
            return _readable(subject, last)
        # Rubbish on top of the facts hides none of them.
        newest: Event | None = None
        async for found in self.read(type_, source=scope):
            newest = found if isinstance(found, Event) else newest
            if found.seq >= last.seq:
                break
        return newest

    async def subscribe(
        self,
        type_: str = "*",
        *,
        source: str = "*",
        start: Literal["all", "new"] | int = "all",
        poll_s: float = 2.0,
    ) -> AsyncIterator[Event]:
        """Events in stream order, each once, for ever: from the beginning, new ones only, or from a stream sequence.

        `source` is the scope of the subject: a source, pool or host. Reconnects and goes on where it was.
        """
        first = start if isinstance(start, int) else (1 if start == "all" else await self.head() + 1)
        async for found in self.read(type_, source=source, first=first, poll_s=poll_s):
            if isinstance(found, Event):
                yield found

    async def read(
        self, type_: str = "*", *, source: str = "*", first: int = 1, poll_s: float = 2.0
    ) -> AsyncIterator[Event | Unknown | Invalid]:
        """`subscribe` with what it skips, for readers that must know how far they are."""
        subject = subject_filter(self.run, type_, source)
        async for found in read_events(self._client, self._js, self.stream, subject, first, poll_s):
            yield await self.sort(found.subject, found.headers, found.body, found.seq)

    async def sort(
        self, subject: str, headers: dict[str, str] | None, body: bytes, seq: int
    ) -> Event | Unknown | Invalid:
        """What a message is. An unknown one is counted, an invalid one counted and dead-lettered."""
        found = decode(subject, headers, body, seq)
        if isinstance(found, Unknown):
            self.skipped["unknown"] += 1
        elif isinstance(found, Invalid):
            self.skipped["invalid"] += 1
            await self._dead_letter(found, headers, body)
        return found

    async def _dead_letter(self, invalid: Invalid, headers: dict[str, str] | None, body: bytes) -> None:
        _LOG.warning("dead letter: message %d on %s: %s", invalid.seq, invalid.subject, invalid.reason)
        kept = {k: v for k, v in (headers or {}).items() if not k.startswith("Nats-")}
        marks = {
            "dlq-reason": _cut(" ".join(invalid.reason.split()), 1000),
            "dlq-subject": _cut(invalid.subject, 500),
            "dlq-seq": str(invalid.seq),
            "dlq-bytes": str(len(body)),
            Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0",
        }
        head = {**kept, **marks}
        if _size(head) + len(body) > _MAX_MESSAGE:
            # The message itself stays in the stream, whole, at `dlq-seq`.
            head, body = marks, body[: _MAX_MESSAGE - _size(marks)]
        letter = f"{dead_letter_subject(self.run)}.{invalid.seq}"

        async def bury() -> None:
            try:
                await self._js.publish(letter, body, headers=head, timeout=_PUBLISH_TIMEOUT_S)
            except APIError as error:
                # Another reader was first: one dead letter for one message.
                if error.err_code not in _WRONG_LAST_SEQUENCE:
                    raise

        await self._patiently(bury, f"publish of {letter}")

    async def work(
        self, name: str, type_: str, *, source: str = "*", ack_wait_s: float, max_pending: int = 20_000
    ) -> Work:
        """The durable work consumer `name`: every matching fact is handled by one of its readers, until acknowledged."""
        return await open_work(
            self._js, self, name, subject_filter(self.run, type_, source), ack_wait_s, max_pending
        )


def _readable(subject: str, found: Event | Unknown | Invalid | None) -> Event | None:
    """What stands on a subject; raises ValueError on a message that is no event for this reader."""
    if found is None or isinstance(found, Event):
        return found
    raise ValueError(f"{subject} holds a message that this version cannot read: {found}")


def _size(headers: dict[str, str]) -> int:
    """Bytes of the headers on the wire: a status line, one line each, an empty one."""
    return 12 + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


def _cut(text: str, most: int) -> str:
    """The text's first bytes, at most so many."""
    return text.encode()[:most].decode(errors="ignore")
