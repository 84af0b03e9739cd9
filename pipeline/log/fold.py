"""Ordered reading of the log, for folds.

Promises:
- every message of the filter from `first` on is given once, in stream order;
- it goes on after a server restart, a lost connection, or a consumer that the server forgot; it ends when the
  client is closed.

A pull consumer without acknowledgements, of which the reader checks the numbering itself: a message that was sent into
a connection as it broke shows as a gap in the consumer's sequence, or, when nothing follows, as one that was asked for
and is still owed. Either way the consumer is made anew from the last stream sequence that was given.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipeline.log.connection import Denied
from pipeline.log.patience import LogError, Patience
from pipeline.log.pull import Pull

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
    client: Client,
    js: JetStreamContext,
    stream: str,
    subject: str,
    first: int | datetime,
    poll_s: float,
    patiently: Patience,
) -> AsyncGenerator[Found, None]:
    """Messages of `subject`, for ever: from stream sequence `first` on, or those stored at that time and later.

    See the module's promises. `poll_s`: how long one request to the broker stands while nothing comes. Raises LogError
    when the stream is gone.
    """
    following = first
    while not client.is_closed:
        pull: Pull | None = None
        given, gap = 0, False
        try:
            consumer = await patiently(
                lambda at=following: _consumer(js, stream, subject, at), f"read of {subject}"
            )
            pull = Pull(client, stream, consumer)
            await pull.open()
            while not gap:
                for message in await pull.take(_BATCH, poll_s):
                    place = message.metadata.sequence
                    if place.consumer != given + 1:
                        gap = True
                        break
                    given += 1
                    following = place.stream + 1
                    yield Found(message.subject, message.headers, message.data, place.stream)
        except Denied as error:
            raise LogError(f"read of {subject}: {error}") from error
        except (NatsError, OSError, TimeoutError) as error:
            if client.is_closed:
                return
            _LOG.info("reading %s starts anew at %s: %s", subject, following, error or type(error).__name__)
            await asyncio.sleep(_RETRY_S)
        finally:
            if pull is not None:
                await pull.close()


def start_of(start: int | datetime) -> tuple[DeliverPolicy, int | None, datetime | None]:
    """Where a consumer begins, as JetStream says it: (policy, sequence, time)."""
    if isinstance(start, datetime):
        return DeliverPolicy.BY_START_TIME, None, start
    return DeliverPolicy.BY_START_SEQUENCE, max(start, 1), None


def fold_name() -> str:
    """A name of one reader's consumer. One that has a name is asked for by a subject that ends in its filter: so the broker can
    permit it by what it reads."""
    return f"fold-{uuid.uuid4().hex}"


async def _consumer(js: JetStreamContext, stream: str, subject: str, first: int | datetime) -> str:
    policy, seq, time = start_of(first)
    info = await js.add_consumer(
        stream,
        ConsumerConfig(
            name=fold_name(),
            filter_subject=subject,
            deliver_policy=policy,
            opt_start_seq=seq,
            opt_start_time=time,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_FORGET_S,
            mem_storage=True,
            num_replicas=1,
        ),
    )
    return info.name
