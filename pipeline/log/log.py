"""The log of one run.

Promises:
- `publish` and `publish_all` have exactly-once effect (`pipeline.log.publish`);
- while the broker is away or full, whoever publishes or reads waits and goes on when it is back: nothing is lost,
  nothing spins (`pipeline.log.patience`);
- a message that is no event goes to the dead letters with its reason, an unknown type is skipped; both are counted,
  and neither stops a reader, whatever its size and wherever it stands;
- the stream keeps what it has: when `broker.max_bytes` is reached it takes no more, rather than forget its beginning.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import datetime
from typing import Literal

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from pipeline.hosts.waits import Waits
from pipeline.log.connection import BrokerUnavailable, Denied, connect
from pipeline.log.dead_letters import MAX_MESSAGE, DeadLetters
from pipeline.log.fold import Found, read_events
from pipeline.log.patience import NO_JETSTREAM, LogError, Patience
from pipeline.log.publish import PUBLISH_TIMEOUT_S, Published, Publisher, decode_raw, unreadable
from pipeline.log.subscription import Durable, durable_name
from pipeline.log.work import MAX_DELIVER, MAX_PENDING, Work, open_work
from schemas.config import Broker
from schemas.envelope import Event, Invalid, Unknown, decode
from schemas.facts import FACTS, Fact
from schemas.names import MALFORMED, Subject, dead_letter_subject, stream_name, subject_filter

_IN_USE = 10058
"""JetStream's code for a stream that exists with another configuration."""
_LOOK_BACK = 8
"""Messages at the end of the stream that are looked at one by one."""
_DOTS = 5
"""In the subject of a fact."""
_DUPLICATE_WINDOW_S = 120.0


class Log:
    """See the module's promises. `skipped` counts messages that were no event for this reader, by kind; `waits` measures
    how long publishes take, as `broker`."""

    def __init__(self, client: Client, run: str, producer: str, broker: Broker) -> None:
        self._client = client
        # A publish that times out is retried by us, with the event id; the context's own timeout bounds one try.
        self._js: JetStreamContext = client.jetstream(timeout=PUBLISH_TIMEOUT_S)
        self._broker = broker
        self.run = run
        self.producer = producer
        self.stream = stream_name(run)
        self.skipped: Counter[str] = Counter()
        self.waits = Waits()
        self.patiently = Patience(client, self._js, self.stream)
        self.letters = DeadLetters(client, self._js, self.patiently, run, self.stream)
        self._publisher = Publisher(client, self._js, self.patiently, self.stream, run, producer)

    @classmethod
    async def connect(
        cls, broker: Broker, run: str, producer: str, timeout_s: float = 10.0, user: str = ""
    ) -> Log:
        """Connects; `user`: the kind of service, of whose rights the broker's user is (`pipeline.log.permissions`).

        Raises BrokerUnavailable (see `pipeline.log.connection`).
        """
        client = await connect(broker, f"{producer}@{run}", timeout_s, user)
        return cls(client, run, producer, broker)

    @property
    def js(self) -> JetStreamContext:
        """For what else belongs to the run in JetStream: snapshots, archives."""
        return self._js

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the broker at the moment."""
        return self._client.is_connected

    @property
    def replicas(self) -> int:
        return self._broker.replicas

    async def close(self) -> None:
        await self._client.close()

    async def create(self, first_seq: int = 1) -> None:
        """Creates the run's stream; one that exists is given the configured retention.

        `first_seq`: sequence of the first message, for a log that is imported.
        """
        config = StreamConfig(
            name=self.stream,
            subjects=[f"rl.{self.run}.>", f"{dead_letter_subject(self.run)}.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            num_replicas=self._broker.replicas,
            max_msg_size=MAX_MESSAGE,
            max_age=self._broker.max_age_s,
            max_bytes=self._broker.max_bytes or -1,
            # Full means wait: the oldest message of a run is the one that every fold begins with.
            discard=DiscardPolicy.NEW,
            duplicate_window=_DUPLICATE_WINDOW_S,
            deny_delete=True,
            deny_purge=True,
            allow_atomic=True,
            first_seq=first_seq if first_seq > 1 else None,
        )
        try:
            await self._js.add_stream(config)
        except APIError as error:
            if error.err_code != _IN_USE:
                raise
            await self._js.update_stream(config.evolve(first_seq=None))

    async def exists(self) -> bool:
        """Whether the run has a stream. Does not wait: raises BrokerUnavailable when the broker does not say, LogError when
        its user may not know."""
        try:
            await self._js.stream_info(self.stream)
        except NotFoundError:
            return False
        except Denied as error:
            raise LogError(f"look at {self.stream}: {error}") from error
        except ServiceUnavailableError as error:
            reason = NO_JETSTREAM if error.code is None else str(error)
            raise BrokerUnavailable(f"broker {self._broker.url}: {reason}") from error
        except (NatsError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise BrokerUnavailable(
                f"broker {self._broker.url} gives no answer about {self.stream}: {reason}"
            ) from error
        return True

    async def head(self) -> int:
        """Stream sequence of the newest message that a fold of everything reads, dead letters not among them; 0 when
        there is none. Waits while the broker is away."""
        return await self.patiently(self._head, f"read of {self.stream}")

    async def _head(self) -> int:
        # To find the last message of a wildcard, JetStream looks at every subject of the run: 30 ms for a million facts,
        # at each start. The newest message of all is nearly always one.
        newest = (await self._js.stream_info(self.stream)).state.last_seq
        for seq in range(newest, max(newest - _LOOK_BACK, 0), -1):
            with contextlib.suppress(NotFoundError):
                subject = (await self._js.get_msg(self.stream, seq)).subject or ""
                if subject.startswith(f"rl.{self.run}.") and subject.count(".") == _DOTS:
                    return seq
        found = await self._newest(subject_filter(self.run))
        return found.seq if found is not None else 0

    async def info(self) -> StreamInfo:
        """JetStream's account of the stream. Waits while the broker is away."""
        return await self.patiently(lambda: self._js.stream_info(self.stream), f"look at {self.stream}")

    async def size(self) -> tuple[int, int]:
        """(messages, bytes) in the stream."""
        state = (await self._js.stream_info(self.stream)).state
        return state.messages, state.bytes

    async def publish(self, fact: Fact, cause: Event | None = None) -> Published:
        """Stores the fact unless it is decided already; waits while the broker is away.

        Raises BodyTooLarge or BadName for a fact that may not be an event, LogError when the log will never take it.
        """
        with self.waits.waiting("broker"):
            return await self._publisher.publish(fact, cause)

    async def publish_all(self, facts: Sequence[tuple[Fact, Event | None]]) -> list[Published]:
        """`publish` for a burst of (fact, cause), as atomic batches: in order, each unless it is decided already."""
        with self.waits.waiting("broker"):
            return await self._publisher.publish_all(facts)

    async def _newest(self, subject: str) -> Event | Unknown | Invalid | None:
        try:
            return decode_raw(await self._js.get_last_msg(self.stream, subject))
        except NotFoundError:
            return None

    async def _last_of(self, subject: str) -> Event | Unknown | Invalid | None:
        return await self.patiently(lambda: self._newest(subject), f"read of {subject}")

    async def last(self, type_: str, scope: str, id_: str) -> Event | None:
        """The fact of that type, scope and id, if it is in the log. Waits while the broker is away."""
        if type_ not in FACTS:
            raise ValueError(f"no event type {type_!r}; types: {sorted(FACTS)}")
        entity, _, fact = type_.partition(".")
        subject = Subject(self.run, entity, fact, scope, id_).text
        found, _ = await self.patiently(lambda: self._publisher.first(subject), f"read of {subject}")
        return found

    async def latest(self, type_: str, scope: str = "*") -> Event | None:
        """The newest fact of that type (and scope), if any. Waits while the broker is away."""
        subject = subject_filter(self.run, type_, scope)
        last = await self._last_of(subject)
        if isinstance(last, Unknown):
            raise unreadable(subject, last)
        if not isinstance(last, Invalid):
            return last
        # Rubbish on top of the facts hides none of them.
        newest: Event | None = None
        async for found in self.read(type_, source=scope):
            newest = found if isinstance(found, Event) else newest
            if found.seq >= last.seq:
                break
        return newest

    def subscribe(
        self,
        type_: str = "*",
        *,
        source: str = "*",
        start: Literal["all", "new"] | int | datetime = "all",
        durable: str | None = None,
        poll_s: float = 2.0,
    ) -> AsyncIterator[Event]:
        """Events in stream order, each once, for ever. Reconnects and goes on where it was.

        `source` is the scope of the subject: a source, pool or host. `start`: the beginning, new events only, a stream
        sequence, or a time with its zone, which is that at which the broker stored the event. With `durable`, a name, the
        broker keeps the place, and every event is given at least once (`pipeline.log.subscription`); `start` counts when
        there is no such durable yet. Raises ValueError or BadName, and LogError for what the log will never give.
        """
        if isinstance(start, datetime) and start.tzinfo is None:
            raise ValueError(
                f"start {start.isoformat()} has no time zone: say which, as in datetime.now(UTC)"
            )
        if isinstance(start, int) and start < 0:
            raise ValueError(f"start {start} is no stream sequence: they begin at 1")
        subject = subject_filter(self.run, type_, source)
        if durable is not None:
            durable_name(durable)
        return self._events(subject, start, durable, poll_s)

    async def _events(
        self, subject: str, start: Literal["all", "new"] | int | datetime, durable: str | None, poll_s: float
    ) -> AsyncIterator[Event]:
        first = await self.head() + 1 if start == "new" else (1 if isinstance(start, str) else start)
        async with contextlib.aclosing(self._read(subject, first, durable, poll_s)) as messages:
            async for found in messages:
                if isinstance(found, Event):
                    yield found

    async def unsubscribe(self, durable: str) -> bool:
        """Removes the durable, and with it its place; False when there is none. Waits while the broker is away."""
        return await self._durable(durable, "").remove()

    def _durable(self, name: str, subject: str) -> Durable:
        return Durable(self._client, self._js, self.patiently, self.stream, name, subject)

    def read(
        self, type_: str = "*", *, source: str = "*", first: int | datetime = 1, poll_s: float = 2.0
    ) -> AsyncIterator[Event | Unknown | Invalid]:
        """`subscribe` with what it skips, for readers that must know how far they are."""
        return self._read(subject_filter(self.run, type_, source), first, None, poll_s)

    def messages(
        self, subject: str, first: int | datetime = 1, poll_s: float = 2.0
    ) -> AsyncGenerator[Found, None]:
        """What is stored on the subjects of a filter, as it is, for ever: nothing is decoded, counted or buried."""
        return read_events(self._client, self._js, self.stream, subject, first, poll_s, self.patiently)

    async def _read(
        self, subject: str, first: int | datetime, durable: str | None, poll_s: float
    ) -> AsyncGenerator[Event | Unknown | Invalid, None]:
        messages = (
            self.messages(subject, first, poll_s)
            if durable is None
            else self._durable(durable, subject).read(first, poll_s)
        )
        # A reader that leaves says so at once: a durable is acknowledged, a consumer asked for no more.
        async with contextlib.aclosing(messages):
            async for found in messages:
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
            await self.letters.bury(MALFORMED, Found(subject, headers, body, seq), found.reason)
        return found

    async def work(
        self,
        name: str,
        type_: str,
        *,
        source: str = "*",
        ack_wait_s: float,
        max_pending: int = MAX_PENDING,
        max_deliver: int = MAX_DELIVER,
    ) -> Work:
        """The durable work consumer `name`: every matching fact is handled by one of its readers, until acknowledged.

        After `max_deliver` deliveries without an end it is a dead letter of `name` (`pipeline.log.dead_letters`).
        """
        return await open_work(
            self._client,
            self._js,
            self.patiently,
            self,
            name,
            subject_filter(self.run, type_, source),
            ack_wait_s=ack_wait_s,
            max_pending=max_pending,
            max_deliver=max_deliver,
        )
