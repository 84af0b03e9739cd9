"""Work over the log: a durable pull consumer with explicit acknowledgements, and the loop that serves it.

Promises:
- a fact is handled by one reader at a time and comes back when its reader falls silent for `ack_wait_s`;
- `serve_work` pulls only into free slots, keeps the fact its own while the handler lives, and hands back what it
  has when it is stopped;
- a handler that raises costs its own delivery (which is retried, with growing delay), never another's.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipeline.log.tasks import end_tasks
from schemas.envelope import Event, Invalid, Unknown

_LOG = logging.getLogger("packtrain.work")
_FETCH_S = 0.5
_RETRY_S = 0.3
_UNKNOWN_S = 5.0
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0)


class Sorter(Protocol):
    """What turns a message into an event, or counts and buries it."""

    @property
    def stream(self) -> str: ...

    async def sort(
        self, subject: str, headers: dict[str, str] | None, body: bytes, seq: int
    ) -> Event | Unknown | Invalid: ...


class Delivery:
    """One delivery of a fact. `attempt` counts deliveries from 1."""

    def __init__(self, message: Msg, event: Event) -> None:
        self._message = message
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

    async def progress(self) -> None:
        """Keeps the fact from coming back for another `ack_wait_s`."""
        await self._message.in_progress()


class Work:
    """A durable work consumer; any number of processes may read it."""

    def __init__(
        self, js: JetStreamContext, sorter: Sorter, name: str, config: ConsumerConfig, ack_wait_s: float
    ) -> None:
        self._js = js
        self._sorter = sorter
        self._config = config
        self._subscription: JetStreamContext.PullSubscription | None = None
        self.name = name
        self.ack_wait_s = ack_wait_s

    async def open(self) -> None:
        """Declares the consumer (idempotent) and binds to it."""
        # pull_subscribe on an existing durable ignores the configuration that it is given: declare, then bind.
        await self._js.add_consumer(self._sorter.stream, self._config)
        self._subscription = await self._js.pull_subscribe_bind(
            consumer=self.name, stream=self._sorter.stream
        )

    async def fetch(self, most: int, timeout_s: float = _FETCH_S) -> list[Delivery]:
        """Up to `most` deliveries, fewer or none when there are not so many within `timeout_s`."""
        if self._subscription is None:
            await self.open()
        assert self._subscription is not None
        try:
            messages = await self._subscription.fetch(most, timeout=timeout_s)
        except TimeoutError:
            return []
        deliveries: list[Delivery] = []
        for message in messages:
            event = await self._sorter.sort(
                message.subject, message.headers, message.data, message.metadata.sequence.stream
            )
            if isinstance(event, Event):
                deliveries.append(Delivery(message, event))
            elif isinstance(event, Unknown):
                # A reader of a newer version may know it.
                await message.nak(delay=_UNKNOWN_S)
            else:
                await message.term()
        return deliveries


async def open_work(
    js: JetStreamContext, sorter: Sorter, name: str, subject: str, ack_wait_s: float, max_pending: int
) -> Work:
    """See `Log.work`. Waits while the broker is away."""
    config = ConsumerConfig(
        durable_name=name,
        filter_subject=subject,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=max_pending,
    )
    work = Work(js, sorter, name, config, ack_wait_s)
    while True:
        try:
            await work.open()
            return work
        except (NatsError, OSError, TimeoutError) as error:
            _LOG.info("work %s waits for the broker: %s", name, error or type(error).__name__)
            await asyncio.sleep(_RETRY_S)


async def serve_work(
    work: Work, capacity: int, handler: Callable[[Delivery], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Handles deliveries, at most `capacity` at once, until `stop` is set; see the module's promises."""
    running: set[asyncio.Task[None]] = set()
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
                task = asyncio.create_task(_handle(work, delivery, handler))
                running.add(task)
                task.add_done_callback(running.discard)
    finally:
        await end_tasks([stopped, *running])


async def _handle(work: Work, delivery: Delivery, handler: Callable[[Delivery], Awaitable[None]]) -> None:
    alive = asyncio.create_task(_keep(delivery, work.ack_wait_s / 3))
    try:
        await handler(delivery)
        if not delivery.settled:
            raise RuntimeError(
                f"handler of work {work.name!r} neither acknowledged nor retried {delivery.event.fact.id()}"
            )
    except asyncio.CancelledError:
        await _hand_back(delivery, 0.0)
        raise
    except Exception:
        delay = _BACKOFF_S[min(delivery.attempt, len(_BACKOFF_S)) - 1]
        _LOG.exception("work %s: %s failed, retried in %.1f s", work.name, delivery.event.fact.id(), delay)
        await _hand_back(delivery, delay)
    finally:
        alive.cancel()


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
