"""Work over the log: a durable pull consumer with explicit acknowledgements, and the loop that serves it.

Promises:
- a fact is handled by one reader at a time and comes back when its reader falls silent for `ack_wait_s`;
- `serve_work` pulls only into free slots, keeps the fact its own while the handler lives, and hands back what it
  has when it is stopped; a fact that is delivered again meanwhile, as the broker was away and did not hear that it is kept,
  is not handled a second time beside the first;
- a handler that raises costs its own delivery (which is retried, with growing delay), never another's;
- a fact costs at most `max_deliver` handlers, whatever it does to them: then it is a dead letter
  (`pipeline.log.dead_letters`), and comes back when a person retries it.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipeline.log.dead_letters import MALFORMED, REASON, DeadLetters, printable
from pipeline.log.fold import Found
from pipeline.log.patience import LogError, Patience
from pipeline.log.pull import Lost, Pull
from pipeline.log.tasks import end_tasks
from pipeline.log.tracing import handling
from schemas.envelope import Event, Invalid, Unknown, decode
from schemas.names import BadName, checked_name, dead_letter_subject

_LOG = logging.getLogger("packtrain.work")
_FETCH_S = 0.5
_RETRY_S = 0.3
_UNKNOWN_S = (5.0, 10.0, 20.0, 40.0, 60.0)
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
MAX_DELIVER = 10
DURABLE_PREFIX = "sub-"
"""Of the durables of subscriptions, which share JetStream's names with work consumers."""


class Sorter(Protocol):
    """What turns a message into an event, or counts and buries it."""

    @property
    def run(self) -> str: ...

    @property
    def stream(self) -> str: ...

    @property
    def letters(self) -> DeadLetters: ...

    async def sort(
        self, subject: str, headers: dict[str, str] | None, body: bytes, seq: int
    ) -> Event | Unknown | Invalid: ...


class Delivery:
    """One delivery of a fact. `attempt` counts deliveries from 1, and from 1 again after a retried dead letter."""

    def __init__(
        self, message: Msg, event: Event, reader: str, letters: DeadLetters, original: Found, letter: int
    ) -> None:
        self._message = message
        self._reader = reader
        self._letters = letters
        self._original = original
        self._letter = letter
        self.event = event
        self.attempt = message.metadata.num_delivered or 1
        self.settled = False

    async def ack(self) -> None:
        """The fact is done with. A lost acknowledgement brings it back: handlers look for their result first."""
        self.settled = True
        await self._message.ack()

    async def retry(self, delay_s: float) -> None:
        """The fact comes back, to any reader, after `delay_s` seconds."""
        self.settled = True
        await self._message.nak(delay=delay_s)

    async def bury(self, reason: str) -> None:
        """The fact becomes a dead letter, and does not come back by itself. Waits while the broker is away."""
        await self._letters.bury(self._reader, self._original, reason, self.attempt, after=self._letter)
        # Also when the letter was there already: another reader wrote it, and was lost before it could end the fact.
        self.settled = True
        await self._message.term()

    @property
    def seq(self) -> int:
        """Stream sequence of what was delivered: the fact, or its retried letter."""
        return self._letter or self.event.seq

    def renew(self, again: Delivery) -> None:
        """Answers from now on as `again`, a later delivery of the same."""
        self._message = again._message

    async def progress(self) -> None:
        """Keeps the fact from coming back for another `ack_wait_s`."""
        await self._message.in_progress()


LastWord = Callable[[Delivery, str], Awaitable[None]]
"""What a service says of a fact before it becomes a dead letter, for that reason: idempotent, for it may be said twice."""


class Work:
    """A durable work consumer; any number of processes may read it."""

    def __init__(
        self,
        client: Client,
        js: JetStreamContext,
        patiently: Patience,
        sorter: Sorter,
        config: ConsumerConfig,
        max_deliver: int,
    ) -> None:
        self._client = client
        self._js = js
        self._patiently = patiently
        self._sorter = sorter
        self._config = config
        self._pull: Pull | None = None
        assert config.durable_name is not None
        self.name = config.durable_name
        self.ack_wait_s = config.ack_wait or 0.0
        self.max_deliver = max_deliver

    async def open(self) -> None:
        """Declares the consumer (idempotent), and binds to it. Waits while the broker is away."""
        # A durable of an older version of ours reads its facts alone: declared again, it is given today's filters.
        await self._patiently(
            lambda: self._js.add_consumer(self._sorter.stream, self._config), f"work {self.name}", stores=True
        )
        pull = Pull(self._client, self._sorter.stream, self.name)
        await pull.open()
        self._pull = pull

    async def close(self) -> None:
        """Takes no more, and hands back what was not fetched."""
        if self._pull is not None:
            pull, self._pull = self._pull, None
            for message in await pull.close():
                with contextlib.suppress(NatsError, OSError):
                    await message.nak()

    async def fetch(self, most: int, timeout_s: float = _FETCH_S) -> list[Delivery]:
        """Up to `most` deliveries as soon as there is one, none when nothing comes within `timeout_s`.

        Those with `attempt` over `max_deliver` are among them, to be buried; `serve_work` does. Raises what the client
        raises while the broker is away.
        """
        if self._pull is None:
            await self.open()
        assert self._pull is not None
        try:
            messages = await self._pull.take(most, timeout_s)
        except Lost:
            await self.close()
            raise
        opened = [await self._opened(message) for message in messages]
        return [delivery for delivery in opened if delivery is not None]

    async def _opened(self, message: Msg) -> Delivery | None:
        """The delivery in a message, if it is for a handler; any other message is settled here."""
        found = Found(message.subject, message.headers, message.data, message.metadata.sequence.stream)
        letters = self._sorter.letters
        letter = await letters.open(found)
        if letter is None:
            event = await self._sorter.sort(found.subject, found.headers, found.body, found.seq)
            if isinstance(event, Invalid):
                await message.term()
                return None
            return await self._known(message, event, found, 0)
        seq, wanted = letter
        if not wanted:
            await message.ack()
            return None
        original = await letters.original(seq)
        if original is None:
            event = Invalid(found.subject, f"message {seq} is no longer in the stream", seq)
        elif not _matches(original.subject, self._facts):
            event = Invalid(found.subject, f"message {seq} is not among the facts of {self.name}", seq)
        else:
            event = decode(original.subject, original.headers, original.body, seq)
        if isinstance(event, Invalid):
            lost = original or Found(found.subject, found.headers, found.body, seq)
            await letters.bury(self.name, lost, event.reason, after=found.seq)
            await message.term()
            return None
        assert original is not None
        return await self._known(message, event, original, found.seq)

    async def _known(
        self, message: Msg, event: Event | Unknown, original: Found, letter: int
    ) -> Delivery | None:
        if isinstance(event, Event):
            return Delivery(message, event, self.name, self._sorter.letters, original, letter)
        # A reader of a newer version may know it, however long it takes to come.
        attempt = message.metadata.num_delivered or 1
        if attempt < self.max_deliver:
            await message.nak(delay=_UNKNOWN_S[min(attempt, len(_UNKNOWN_S)) - 1])
            return None
        # That reader must not find the fact used up by those who did not know it: as a retried letter it is new.
        reason = f"{event.type} version {event.version} waits for a reader of {self.name} that knows it"
        await self._sorter.letters.bury(self.name, original, reason, attempt, after=letter, state="retried")
        await message.term()
        return None

    @property
    def _facts(self) -> str:
        assert self._config.filter_subjects
        return self._config.filter_subjects[0]


def _matches(subject: str, pattern: str) -> bool:
    """Whether a subject is one of a filter whose only wildcard is `*`."""
    tokens, wanted = subject.split("."), pattern.split(".")
    return len(tokens) == len(wanted) and all(w in ("*", t) for t, w in zip(tokens, wanted, strict=True))


async def open_work(
    client: Client,
    js: JetStreamContext,
    patiently: Patience,
    sorter: Sorter,
    name: str,
    subject: str,
    *,
    ack_wait_s: float,
    max_pending: int,
    max_deliver: int,
) -> Work:
    """See `Log.work`. Waits while the broker is away."""
    checked_name(name, "work consumer")
    if name == MALFORMED or name.startswith(DURABLE_PREFIX):
        raise BadName(f"work consumer {name!r}: {MALFORMED!r} and names in {DURABLE_PREFIX!r} are taken")
    if max_deliver < 1:
        raise ValueError(f"work consumer {name!r}: max_deliver is {max_deliver}, and must be 1 or more")
    config = ConsumerConfig(
        durable_name=name,
        filter_subjects=[subject, f"{dead_letter_subject(sorter.run, name)}.>"],
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=max_pending,
        # JetStream's own max_deliver stays unset: it would drop the fact with an advisory, which nobody may hear. Counted
        # here, at the door, the fact comes until somebody has written its letter.
    )
    work = Work(client, js, patiently, sorter, config, max_deliver)
    await work.open()
    return work


async def serve_work(
    work: Work,
    capacity: int,
    handler: Callable[[Delivery], Awaitable[None]],
    stop: asyncio.Event,
    bury: LastWord | None = None,
) -> None:
    """Handles deliveries, at most `capacity` at once, until `stop` is set; see the module's promises.

    `bury` is told of each fact that is about to become a dead letter, so that whoever waits for its result gets one.
    """
    running: set[asyncio.Task[None]] = set()
    in_hand: dict[int, Delivery] = {}

    def ended(task: asyncio.Task[None], delivery: Delivery) -> None:
        running.discard(task)
        if in_hand.get(delivery.seq) is delivery:
            del in_hand[delivery.seq]

    stopped = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            free = capacity - len(running)
            if free <= 0:
                await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                deliveries = await work.fetch(free)
            except (NatsError, OSError) as error:
                _LOG.info("work %s waits for the broker: %s", work.name, error or type(error).__name__)
                await asyncio.sleep(_RETRY_S)
                continue
            for delivery in deliveries:
                held = in_hand.get(delivery.seq)
                if held is not None and not held.settled:
                    held.renew(delivery)
                    continue
                in_hand[delivery.seq] = delivery
                task = asyncio.create_task(_handle(work, delivery, handler, bury))
                running.add(task)
                task.add_done_callback(functools.partial(ended, delivery=delivery))
    finally:
        await end_tasks([stopped, *running])
        await work.close()


async def _handle(
    work: Work,
    delivery: Delivery,
    handler: Callable[[Delivery], Awaitable[None]],
    last_word: LastWord | None,
) -> None:
    alive = asyncio.create_task(_keep(delivery, work.ack_wait_s / 3))
    try:
        if delivery.attempt > work.max_deliver:
            reason = f"delivered {delivery.attempt - 1} times, no reader answered"
            await _bury(work, delivery, reason, last_word)
        else:
            with handling(delivery.event, work.name):
                await handler(delivery)
            if not delivery.settled:
                raise RuntimeError(
                    f"handler of work {work.name!r} neither acknowledged nor retried {delivery.event.fact.id()}"
                )
    except asyncio.CancelledError:
        await _hand_back(delivery, 0.0)
        raise
    except Exception as error:
        await _failed(work, delivery, error, last_word)
    finally:
        alive.cancel()


async def _failed(work: Work, delivery: Delivery, error: Exception, last_word: LastWord | None) -> None:
    if delivery.attempt == work.max_deliver and not delivery.settled:
        _LOG.error(
            "work %s: %s failed for the last time", work.name, delivery.event.fact.id(), exc_info=error
        )
        try:
            await _bury(work, delivery, f"{type(error).__name__}: {error}", last_word)
            return
        except (LogError, NatsError, OSError) as unburied:
            error = unburied
    delay = _BACKOFF_S[min(delivery.attempt, len(_BACKOFF_S)) - 1]
    _LOG.error(
        "work %s: %s failed, retried in %.1f s", work.name, delivery.event.fact.id(), delay, exc_info=error
    )
    await _hand_back(delivery, delay)


async def _bury(work: Work, delivery: Delivery, reason: str, last_word: LastWord | None) -> None:
    # What a plug-in raises may hold anything; whoever gets the reason from here gets a line of text.
    reason = printable(reason, REASON)
    if last_word is not None:
        try:
            await last_word(delivery, reason)
        except Exception as error:
            # The letter is written all the same: without it nobody would know of either.
            _LOG.exception("work %s: the last word on %s failed", work.name, delivery.event.fact.id())
            reason = f"{reason}; and the service's last word failed: {type(error).__name__}: {error}"
    await delivery.bury(reason)


async def _hand_back(delivery: Delivery, delay_s: float) -> None:
    # Without a connection the fact comes back by its ack_wait all the same.
    if not delivery.settled:
        with contextlib.suppress(NatsError, OSError):
            await delivery.retry(delay_s)


async def _keep(delivery: Delivery, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(NatsError, OSError):
            await delivery.progress()
