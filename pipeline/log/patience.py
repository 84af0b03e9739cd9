"""Waiting for a broker that is away, full or electing a leader; and telling that from a broker that will never agree.

Promises:
- what can pass is waited for, however long, with growing pauses: nothing is lost, nothing spins;
- an outage is told once when it is clear (not once for every waiting call), again while it lasts, and when it is over;
  a full disk is told as such, with the remedy;
- what cannot pass (a stream that was removed, a request that the broker refuses for good, or denies to its user) raises
  `LogError` at once.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from pipeline.log.connection import Denied

_LOG = logging.getLogger("packtrain.log")
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_TELL_AFTER = 3
"""Tries: less is a broker that restarts."""
_TELL_EVERY_S = 60.0
_PASSING_STATUS = {429, 503}
"""JetStream's status of what can pass: too many requests; no leader, no room."""
_PASSING = {10009, 10118, 10119, 10158}
"""Its codes for what can pass in spite of their status: another leader, a stream or consumer that is offline, and a message of
this id that is on its way to the replicas: the try before, of which nobody knows yet."""
_FULL = {10023, 10028, 10047, 10077}
"""JetStream's codes for storage that is used up: of the server, the account, or the stream (`max_bytes`)."""
_FULL_SAID = ("no space left on device", "error creating store")
"""What it says of a full disk where it makes a stream or a consumer; the codes of that are for every other fault too."""
_NO_STREAM = 10059
NO_JETSTREAM = "it does not serve JetStream: it is starting or stopping, or was started without -js"
_NO_SPACE = "the broker's storage is full"
_T = TypeVar("_T")


class LogError(RuntimeError):
    """The log will never take this: waiting does not help. The message names the run, the reason and the remedy."""


@dataclass
class _Outage:
    """Of reads, or of writes: a broker whose disk is full still answers."""

    since: float | None = None
    told: float = 0.0


class Patience:
    """See the module's promises. One for a connection, so that an outage is one outage."""

    def __init__(self, client: Client, js: JetStreamContext, stream: str) -> None:
        self._client = client
        self._js = js
        self._stream = stream
        self._outages = {False: _Outage(), True: _Outage()}

    async def __call__(self, attempt: Callable[[], Awaitable[_T]], what: str, *, stores: bool = False) -> _T:
        """The attempt's result, however long the broker is away; `stores`: it writes.

        Raises LogError, or the last error of a closed client.
        """
        outage = self._outages[stores]
        for tries in itertools.count(1):
            try:
                result = await attempt()
            except Denied as error:
                raise LogError(f"{what}: {error}") from error
            except (NatsError, OSError, TimeoutError) as error:
                if self._client.is_closed:
                    raise
                if isinstance(error, APIError) and not _passes(error):
                    if error.err_code == _NO_STREAM:
                        raise self._gone() from error
                    raise LogError(
                        f"{what}: the broker refuses it for good: {error.description} ({error.err_code})"
                    ) from error
                if tries >= _TELL_AFTER:
                    await self._tell(outage, what, error)
            else:
                _over(outage)
                return result
            await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S)) - 1])
        raise AssertionError("unreachable")

    async def _tell(self, outage: _Outage, what: str, error: Exception) -> None:
        now = time.monotonic()
        outage.since = now if outage.since is None else outage.since
        if outage.told and now - outage.told < _TELL_EVERY_S:
            return
        outage.told = now
        full, reason = await self._diagnose(error)
        _LOG.log(logging.ERROR if full else logging.WARNING, "%s waits for the broker: %s", what, reason)

    async def _diagnose(self, error: Exception) -> tuple[bool, str]:
        """(whether its storage is full, what a person should know). Raises LogError when the stream is gone."""
        if _full(error):
            return (
                True,
                f"{_NO_SPACE} ({error}); free or add space, or raise broker.max_bytes; nothing is lost",
            )
        if self._client.is_connected:
            try:
                await self._js.stream_info(self._stream)
            except NotFoundError:
                raise self._gone() from error
            except APIError as refusal:
                if refusal.code is None:
                    return False, NO_JETSTREAM
            except (NatsError, OSError, TimeoutError):
                pass
            else:
                if isinstance(error, TimeoutError):
                    return True, (
                        f"it answers but stores nothing: {_NO_SPACE} or its disk fails; free space, then restart nats-server, which "
                        "after a failed write stores nothing until it is restarted. Nothing is lost"
                    )
        return False, str(error) or type(error).__name__

    def _gone(self) -> LogError:
        return LogError(
            f"stream {self._stream} is not in the broker: the run was removed, or this is another broker; check broker.url and run"
        )


def _over(outage: _Outage) -> None:
    if outage.since is not None:
        _LOG.warning("the broker goes on after %.0f s", time.monotonic() - outage.since)
        outage.since, outage.told = None, 0.0


def _passes(error: APIError) -> bool:
    # Without a code: nobody answered the request, as JetStream is starting, stopping, or not there.
    return error.code is None or error.code in _PASSING_STATUS or error.err_code in _PASSING or _full(error)


def _full(error: Exception) -> bool:
    if not isinstance(error, APIError):
        return False
    return error.err_code in _FULL or any(said in (error.description or "") for said in _FULL_SAID)
