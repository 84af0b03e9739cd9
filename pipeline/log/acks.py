"""Publishing to JetStream with one inbox for all acknowledgements.

Promises:
- every publish ends: with the broker's acknowledgement, its refusal, a TimeoutError, or Denied; none hangs, whatever becomes of
  the connection;
- an answer that comes too late, or that nobody asked for, is dropped.

nats-py's own request makes a random inbox and a waiting task for each message, which takes longer than all else that a
publish does: with this, a writer publishes twice as fast.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import Header
from nats.js.errors import APIError, NoStreamResponseError

from pipeline.log.connection import asking

_NO_RESPONDERS = "503"
_STATUS = Header.STATUS.value
_LOOK_S = 0.05
"""Between two looks at what has expired, at least."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The broker has the message as `seq`; `duplicate`: it had it already, by its id; `batch`: the id of that which it ends."""

    seq: int
    duplicate: bool
    batch: str


class Acks:
    """See the module's promises. One for a connection."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        # All wait equally long, so the first is the first to expire: one clock for all. By number, as what is answered is
        # not to be held until then.
        self._expiring: deque[tuple[float, str]] = deque()
        self._clock: asyncio.TimerHandle | None = None
        self._numbers = itertools.count(1)
        self._prefix = ""
        self._opening = asyncio.Lock()

    async def publish(self, subject: str, body: bytes, headers: dict[str, str]) -> Ack:
        """Raises APIError when the broker refuses it, NoStreamResponseError when no stream takes the subject, TimeoutError
        when nobody knows, Denied when the broker's user may not."""
        if not self._prefix:
            await self._open()
        number = str(next(self._numbers))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        self._waiting[number] = answer
        self._expiring.append((loop.time() + self._timeout_s, number))
        if self._clock is None:
            self._clock = loop.call_later(self._timeout_s, self._expire)
        try:
            with asking(self._client, subject, answer):
                await self._client.publish(subject, body, reply=self._prefix + number, headers=headers)
                message = await answer
        finally:
            del self._waiting[number]
            # What could not be sent has nobody who hears that it expired.
            answer.cancel()
        if message.headers and message.headers.get(_STATUS) == _NO_RESPONDERS:
            raise NoStreamResponseError
        ack: dict[str, Any] = orjson.loads(message.data)
        if "error" in ack:
            raise APIError.from_error(ack["error"])
        return Ack(int(ack["seq"]), bool(ack.get("duplicate")), str(ack.get("batch", "")))

    async def _open(self) -> None:
        async with self._opening:
            if not self._prefix:
                prefix = f"{self._client.new_inbox()}."
                # Announced again by the client after a reconnect.
                await self._client.subscribe(f"{prefix}*", cb=self._arrive)
                self._prefix = prefix

    async def _arrive(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject[len(self._prefix) :])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._expiring and self._expiring[0][0] <= now:
            answer = self._waiting.get(self._expiring.popleft()[1])
            if answer is not None and not answer.done():
                answer.set_exception(NatsTimeoutError())
        wait = max(self._expiring[0][0] - now, _LOOK_S) if self._expiring else None
        self._clock = loop.call_later(wait, self._expire) if wait is not None else None
