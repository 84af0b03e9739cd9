"""Ordered reading of the log, for folds.

Promises:
- every message of the filter from `first` on is given once, in stream order;
- it goes on after a server restart, a lost connection, or a consumer that the server forgot; it ends when the
  client is closed.

A pull consumer without acknowledgements, of which the reader checks the numbering itself: a message that was sent into
a connection as it broke shows as a gap in the consumer's sequence, or, when nothing follows, as a delivered count that
is ahead of ours. Either way the consumer is made anew from the last stream sequence that was given.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

_LOG = logging.getLogger("packtrain.log")
_BATCH = 256
_FORGET_S = 60.0
_RETRY_S = 0.3


@dataclass(frozen=True, slots=True)
class Found:
    """One message of the log."""

    subject: str
    headers: dict[str, str] | None
    body: bytes
    seq: int


async def read_events(
    client: Client, js: JetStreamContext, stream: str, subject: str, first: int, poll_s: float
) -> AsyncIterator[Found]:
    """Messages of `subject` from stream sequence `first` on, for ever; see the module's promises."""
    following = max(first, 1)
    while not client.is_closed:
        try:
            consumer = await _consumer(js, stream, subject, following)
        except (NatsError, OSError, TimeoutError) as error:
            _LOG.info("reading %s waits for the broker: %s", subject, error or type(error).__name__)
            await asyncio.sleep(_RETRY_S)
            continue
        # Sends nothing: it registers an inbox, which the client announces again after a reconnect.
        subscription = await js.pull_subscribe_bind(consumer=consumer, stream=stream)
        given = 0
        try:
            while True:
                try:
                    messages = await subscription.fetch(_BATCH, timeout=poll_s)
                except TimeoutError:
                    info = await js.consumer_info(stream, consumer)
                    if info.delivered is not None and info.delivered.consumer_seq != given:
                        break
                    continue
                gap = False
                for message in messages:
                    place = message.metadata.sequence
                    if place.consumer != given + 1:
                        gap = True
                        break
                    given += 1
                    following = place.stream + 1
                    yield Found(message.subject, message.headers, message.data, place.stream)
                if gap:
                    break
        except (NatsError, OSError, TimeoutError) as error:
            if client.is_closed:
                return
            _LOG.info("reading %s starts anew at %d: %s", subject, following, error or type(error).__name__)
            await asyncio.sleep(_RETRY_S)
        finally:
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                await subscription.unsubscribe()


async def _consumer(js: JetStreamContext, stream: str, subject: str, first: int) -> str:
    info = await js.add_consumer(
        stream,
        ConsumerConfig(
            filter_subject=subject,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_FORGET_S,
            mem_storage=True,
            num_replicas=1,
        ),
    )
    return info.name
