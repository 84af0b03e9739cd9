"""Durable subscriptions: reading whose place the broker keeps.

Promises:
- every message of the filter is given at least once, in stream order, to one reader: it is acknowledged when the reader
  asks for the next one, so what a reader had in hand as it died is given to the one that comes after it, at once;
- within one process nothing is given twice, over restarts of the broker too;
- where to begin counts when the durable is made; afterwards it goes on where it was. A filter that is not the durable's
  own is refused (nats-py's `pull_subscribe` would go on with the old one and say nothing).

The durable acknowledges all before a message (`AckPolicy.ALL`), and is reset to what is acknowledged whenever a reader
comes or a message was lost on its way: so order never depends on redelivery, nor a slow reader on a deadline.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from datetime import datetime

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo
from nats.js.errors import APIError, NotFoundError

from pipeline.log.fold import Found, start_of
from pipeline.log.patience import LogError, Patience
from pipeline.log.pull import Pull
from pipeline.log.work import DURABLE_PREFIX
from schemas.names import checked_name

_LOG = logging.getLogger("packtrain.log")
_BATCH = 256
_IN_FLIGHT = 1024
_ACK_WAIT_S = 3600.0
"""Nothing depends on it: a reader that comes resets the durable. Until then nothing is sent to nobody."""
_RETRY_S = 0.3
_BUSY_S = 10.0
_EXISTS = {10012, 10013, 10148}
"""JetStream's codes for a durable that somebody else has just made, otherwise."""
_TOO_OLD = 2, 14


def durable_name(name: str) -> str:
    """JetStream's name of a subscription's durable; raises BadName."""
    return DURABLE_PREFIX + checked_name(name, "durable")


class Durable:
    """One durable of a stream; see the module's promises."""

    def __init__(
        self, client: Client, js: JetStreamContext, patiently: Patience, stream: str, name: str, subject: str
    ) -> None:
        self._client = client
        self._js = js
        self._patiently = patiently
        self._stream = stream
        self._name = durable_name(name)
        self._subject = subject

    async def read(self, start: int | datetime, poll_s: float) -> AsyncGenerator[Found, None]:
        """Messages for ever. Raises LogError when the durable is another's, or cannot be read."""
        await self._patiently(lambda: self._make(start), f"durable {self._name}", stores=True)
        await self._alone()
        following = 0
        while not self._client.is_closed:
            pull = Pull(self._client, self._stream, self._name)
            try:
                await self._patiently(self._reset, f"durable {self._name}")
                await pull.open()
                given = 0
                while True:
                    for message in await pull.take(_BATCH, poll_s):
                        place = message.metadata.sequence
                        given += 1
                        if place.consumer != given:
                            raise NatsError("messages were lost, or another process reads it too")
                        if place.stream >= following:
                            following = place.stream + 1
                            yield Found(message.subject, message.headers, message.data, place.stream)
                        # Handled: the reader has come back for more. It acknowledges all before, too; nobody waits for it.
                        await message.ack()
            except (NatsError, OSError, TimeoutError) as error:
                if self._client.is_closed:
                    return
                _LOG.info("durable %s goes on from %d: %s", self._name, following, error)
                await asyncio.sleep(_RETRY_S)
            finally:
                await pull.close()

    async def _make(self, start: int | datetime) -> None:
        info = await self._info()
        if info is None:
            version = self._client.connected_server_version
            if (version.major, version.minor) < _TOO_OLD:
                raise LogError(
                    f"durable subscriptions need nats-server {_TOO_OLD[0]}.{_TOO_OLD[1]} or newer, which can reset a consumer; this is {version}"
                )
            policy, seq, since = start_of(start)
            config = ConsumerConfig(
                durable_name=self._name,
                filter_subject=self._subject,
                deliver_policy=policy,
                opt_start_seq=seq,
                opt_start_time=since,
                ack_policy=AckPolicy.ALL,
                ack_wait=_ACK_WAIT_S,
                max_ack_pending=_IN_FLIGHT,
            )
            try:
                info = await self._js.add_consumer(self._stream, config)
            except APIError as error:
                if error.err_code not in _EXISTS:
                    raise
                info = await self._info()
                if info is None:
                    raise
        config = info.config
        if config.filter_subject != self._subject or config.ack_policy != AckPolicy.ALL:
            found = config.filter_subject or config.filter_subjects
            raise LogError(
                f"durable {self._name} of stream {self._stream} reads {found}, not {self._subject}: give the subscription another name, or remove the durable (Log.unsubscribe)"
            )

    async def _alone(self) -> None:
        """Raises LogError when another process waits at the durable: two would take each other's place for ever."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            info = await self._patiently(
                lambda: self._js.consumer_info(self._stream, self._name), f"durable {self._name}"
            )
            if not info.num_waiting:
                return
            # A request may outlive its process by its own time, where the connection broke unseen.
            if time.monotonic() > deadline:
                raise LogError(
                    f"durable {self._name} is read by another process: one reads a durable at a time; give each a durable of its own"
                )
            await asyncio.sleep(_RETRY_S)

    async def _reset(self) -> None:
        await self._js.reset_consumer(self._stream, self._name)

    async def _info(self) -> ConsumerInfo | None:
        try:
            return await self._js.consumer_info(self._stream, self._name)
        except NotFoundError:
            return None

    async def remove(self) -> bool:
        """Whether there was one."""

        async def remove() -> bool:
            try:
                return await self._js.delete_consumer(self._stream, self._name)
            except NotFoundError:
                return False

        return await self._patiently(remove, f"removal of durable {self._name}")
