"""Work over the log: a durable pull consumer with explicit acknowledgements. `pipeline.log.serving` serves it.

Promises:
- a fact is handled by one reader at a time and comes back when its reader falls silent for `ack_wait_s`;
- of the readers that wait, those that say the lowest priority are given first;
- a message that is no fact of the consumer never reaches a handler: it is settled at the door.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipeline.log.dead_letters import DeadLetters
from pipeline.log.fold import Found
from pipeline.log.patience import Patience
from pipeline.log.pull import GROUP, Lost, Pull, has_priorities
from schemas.envelope import Event, Invalid, Unknown, decode
from schemas.names import MALFORMED, BadName, checked_name, dead_letter_subject

_LOG = logging.getLogger("packtrain.work")
_FETCH_S = 0.5
_UNKNOWN_S = (5.0, 10.0, 20.0, 40.0, 60.0)
MAX_DELIVER = 10
MAX_PENDING = 20_000
"""Facts that are with all readers of a work consumer together, unless it is limited."""
DURABLE_PREFIX = "sub-"
"""Of the durables of subscriptions, which share JetStream's names with work consumers."""


@dataclass
class _ByPriority(ConsumerConfig):
    """With the two fields of the broker's that nats-py does not have."""

    priority_groups: list[str] | None = None
    priority_policy: str | None = None


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


class Work:
    """A durable work consumer; any number of processes may read it."""

    def __init__(
        self,
        client: Client,
        js: JetStreamContext,
        patiently: Patience,
        sorter: Sorter,
        config: _ByPriority,
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
        await self._declare()
        pull = Pull(self._client, self._sorter.stream, self.name)
        await pull.open()
        self._pull = pull

    async def limit(self, most: int) -> None:
        """From now on at most `most` facts are with all its readers together, 0: as many as by default. What is with them
        stays there. Waits while the broker is away."""
        self._config.max_ack_pending = most or MAX_PENDING
        await self._declare()

    async def _declare(self) -> None:
        # A durable of an older version of ours reads its facts alone, in turn: declared again, it is given today's filters and
        # priorities. A host of that version is then refused, declares it again, and is served in turn beside the others.
        def declare() -> Awaitable[object]:
            config = self._config
            if has_priorities(self._client):
                config.priority_groups, config.priority_policy = [GROUP], "prioritized"
            return self._js.add_consumer(self._sorter.stream, config)

        await self._patiently(declare, f"work {self.name}", stores=True)

    def end(self) -> None:
        """Lets a `fetch` that waits return at once: its facts are for readers that go on."""
        if self._pull is not None:
            self._pull.end()

    async def close(self) -> None:
        """Takes no more, and hands back what was not fetched."""
        if self._pull is not None:
            pull, self._pull = self._pull, None
            for message in await pull.close():
                with contextlib.suppress(NatsError, OSError):
                    await message.nak()

    async def fetch(self, most: int, timeout_s: float = _FETCH_S, priority: int = 0) -> list[Delivery]:
        """Up to `most` deliveries as soon as there is one, none when nothing comes within `timeout_s`.

        Of readers that wait, those with the lowest `priority` (0 to `pull.LOWEST`) are given first.

        Those with `attempt` over `max_deliver` are among them, to be buried; `serve_work` does. Raises what the client
        raises while the broker is away.
        """
        if self._pull is None:
            await self.open()
        assert self._pull is not None
        try:
            messages = await self._pull.take(most, timeout_s, priority)
        except Lost:
            await self.close()
            raise
        opened = [await self._opened(message) for message in messages]
        return [delivery for delivery in opened if delivery is not None]

    async def pending(self) -> int:
        """Facts that no reader has been given yet. Raises what the client raises while the broker is away."""
        return (await self._js.consumer_info(self._sorter.stream, self.name)).num_pending or 0

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
    config = _ByPriority(
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
