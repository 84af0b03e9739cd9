"""Messages of one pull consumer, asked for and counted.

Promises:
- what a stranger stored never ends or disturbs the reading: a stored message is told from an answer of the broker by
  its reply subject, which only the broker sets, not by its headers (nats-py's `fetch` takes a stored message with a
  `Status` header for an answer, and drops it);
- nothing is asked for that has no taker: requests expire, and what they still owe is counted, so that no more comes
  than was wanted at one time;
- the broker serves the waiting request with the lowest `priority` first, those of one priority in turn, when it can;
- what was asked for and is lost (a broken connection, a restarted server, a consumer that is gone) raises `Lost`
  within a second or the request's own time; nothing waits for ever.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import Header

from pipeline.log.connection import check_denied

_LOOK_S = 0.25
"""How often the connection is looked at while nothing comes."""
_GRACE_S = 1.0
"""How long after its end the broker may take to say that a request has expired."""
_SHORT_S = 0.02
"""Not worth another request."""
_ENDED = {"404", "408"}
"""Nothing there; request expired. Everything else (409: consumer deleted, leader changed, server stops; 503: no such
consumer) means that the requests are void."""


GROUP = "tenants"
"""The priority group of every work consumer: JetStream wants one, and gives it no meaning of its own."""
LOWEST = 9
"""JetStream's last priority; the first is 0."""
PRIORITIES_SINCE = (2, 12)
"""The first nats-server that serves requests by their priority; an older one is asked without, and serves all in turn."""


def has_priorities(client: Client) -> bool:
    """Whether the connected server serves requests by priority."""
    version = client.connected_server_version
    return (version.major, version.minor) >= PRIORITIES_SINCE


class Lost(NatsError):
    """What was asked for does not come: declare the consumer, and ask anew."""


class Pull:
    """See the module's promises. Made anew after `Lost`."""

    def __init__(self, client: Client, stream: str, consumer: str) -> None:
        self._client = client
        self._request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._consumer = consumer
        self._queue: deque[Msg] = deque()
        self._arrived = asyncio.Event()
        self._subscription: Subscription | None = None
        self._connection = client.stats["reconnects"]
        self._owed = 0
        self._asked = self._until = 0.0
        self._ended = False

    async def open(self) -> None:
        """Sends nothing that is answered: it registers an inbox."""
        self._connection = self._client.stats["reconnects"]
        self._subscription = await self._client.subscribe(self._client.new_inbox(), cb=self._arrive)

    def end(self) -> None:
        """Whoever takes gets at once what is there, and nobody waits any more."""
        self._ended = True
        self._arrived.set()

    async def close(self) -> list[Msg]:
        """Takes no more; gives what has come and was not taken."""
        left = [message for message in self._queue if _stored(message)]
        self._queue.clear()
        if self._subscription is not None:
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                await self._subscription.unsubscribe()
        return left

    async def take(self, want: int, timeout_s: float, priority: int = 0) -> list[Msg]:
        """Up to `want` messages as soon as there is one, none after `timeout_s`. Raises Lost.

        priority: 0 (served first) to `LOWEST`, of what is asked for now; what was asked for before keeps its own.
        """
        deadline = time.monotonic() + timeout_s
        # Not for every message that was taken: one request in a while keeps them coming.
        if want > 2 * self._owed:
            await self._ask(want - self._owed, timeout_s, priority)
        found: list[Msg] = []
        while True:
            # What has come is given before a request's end is told, which may be an error.
            while self._queue and len(found) < want and not (found and not _stored(self._queue[0])):
                self._count(self._queue.popleft(), found)
            left = deadline - time.monotonic()
            if found or self._ended or left < -_GRACE_S:
                return found
            if not self._owed:
                if left < _SHORT_S:
                    return found
                await self._ask(want, left, priority)
            elif time.monotonic() > self._until + _GRACE_S:
                check_denied(self._client, self._request, self._asked)
                raise Lost(f"{self._consumer}: {self._owed} messages were asked for and never came")
            self._check()
            await self._wait()

    async def _arrive(self, message: Msg) -> None:
        self._queue.append(message)
        self._arrived.set()

    async def _wait(self) -> None:
        self._arrived.clear()
        if not self._queue and not self._ended:
            # Not wait_for, which in Python 3.11 may lose a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._arrived.wait()

    async def _ask(self, count: int, timeout_s: float, priority: int) -> None:
        assert self._subscription is not None
        self._check()
        # Never no_wait: while max_ack_pending is reached the broker keeps such a request, without an end.
        request: dict[str, int | str] = {"batch": count, "expires": int(timeout_s * 1e9)}
        if has_priorities(self._client):
            request |= {"group": GROUP, "priority": priority}
        await self._client.publish(self._request, orjson.dumps(request), reply=self._subscription.subject)
        self._owed += count
        self._asked = time.monotonic()
        self._until = self._asked + timeout_s

    def _check(self) -> None:
        """Requests, and messages on their way, do not outlive their connection."""
        if self._client.stats["reconnects"] != self._connection or not self._client.is_connected:
            raise Lost(f"{self._consumer}: the connection to the broker was lost")

    def _count(self, message: Msg, found: list[Msg]) -> None:
        if _stored(message):
            self._owed -= 1
            found.append(message)
            return
        answer = message.headers or {}
        status = answer.get(Header.STATUS.value, "")
        if status == "100":
            return
        if status not in _ENDED:
            said = answer.get(Header.DESCRIPTION, "") or answer.get(Header.DESCRIPTION.value, "")
            raise Lost(f"{self._consumer}: the broker answers {status} {' '.join(said.split())[:200]}")
        pending = answer.get("Nats-Pending-Messages", "")
        self._owed -= int(pending) if pending.isdecimal() else self._owed
        if self._owed < 0:
            self._owed = 0


def _stored(message: Msg) -> bool:
    return message.reply.startswith("$JS.ACK.")
