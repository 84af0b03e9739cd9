"""A connection to the broker that outlives the broker.

Promises:
- the first connection succeeds within `timeout_s` or raises one `BrokerUnavailable` that says why; a refused token
  is told at once, not after the timeout;
- after that the connection reconnects for ever (nats-py's default gives up after two minutes), also when the broker
  falls silent without closing it;
- no message, whoever wrote it, ends the reading: a subject or header that is not text arrives as the nearest text.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.protocol.command import hpub_cmd  # pyright: ignore[reportUnknownVariableType]  # untyped in nats-py

from pipeline.secret_file import SecretUnreadable, read_secret
from schemas.config import Broker

_LOG = logging.getLogger("packtrain.log")
_RECONNECT_WAIT_S = 0.2
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PING_S = 20
"""nats-py's two minutes would leave a reader of a silent broker waiting for six."""


class BrokerUnavailable(ConnectionError):
    """The broker cannot be used; the message names its address, the reason and the remedy."""


class _AsDelivered:
    """Reads the headers of a message that is asked for by sequence or subject as those of one that is delivered: nats-py parses
    them as mail, which mangles what is not ASCII, gives what is no str, and takes a sixth of such a request's time."""

    parsebytes = staticmethod(Client._parse_header_lines)  # pyright: ignore[reportPrivateUsage]  # as they are delivered


class _JetStream(JetStreamContext):
    def __init__(self, client: Client, **opts: Any) -> None:
        super().__init__(client, **opts)
        self._hdr_parser = _AsDelivered()  # pyright: ignore[reportIncompatibleUnannotatedOverride, reportAttributeAccessIssue]  # all of a parser that it uses


class _Connection(Client):
    """nats-py's client, whose reading task dies unseen, connection and all readers with it, of bytes that are not UTF-8; and
    faster at headers, of which an event has a dozen."""

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ):
        text = subject.decode(errors="replace").encode()
        return super()._build_message(sid, text, reply, data, headers)

    def jetstream(self, **opts: Any) -> JetStreamContext:
        return _JetStream(self, **opts)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]  # untyped in nats-py
        except (ValueError, IndexError):
            # No event without its headers: the message goes to the dead letters.
            return None

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        block = _block(headers) if headers and subject else None
        if block is None:
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(hpub_cmd(subject, reply, block, payload))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()


def _block(headers: dict[str, Any]) -> bytes | None:
    """Headers as they go on the wire; None when it takes nats-py's care to make them so.

    It looks at each name and value in Python, for a tenth of all that a publish of ours costs.
    """
    if not _well_named(tuple(headers)):
        return None
    # Added, not formatted: nats-py's own names are members of an enum of str, whose format is another.
    lines = "\r\n".join([name + ": " + value for name, value in headers.items()])
    # A line break within a value would be a header of its own.
    breaks = len(headers) - 1
    if lines.count("\n") != breaks or lines.count("\r") != breaks:
        return None
    return f"NATS/1.0\r\n{lines}\r\n\r\n".encode()


@functools.lru_cache(maxsize=256)
def _well_named(names: tuple[str, ...]) -> bool:
    return all(_NAME.fullmatch(name) for name in names)


def _token(broker: Broker) -> str | None:
    try:
        return read_secret(broker.token_file, "broker.token_file") if broker.token_file else None
    except SecretUnreadable as error:
        raise BrokerUnavailable(str(error)) from error


def check_address(url: str) -> None:
    """Refuses what is no address of a NATS server; raises BrokerUnavailable."""
    # nats-py asserts what it expects of an address.
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("nats", "tls", "ws", "wss") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise BrokerUnavailable(f"broker.url {url!r} is not nats://host:port; set broker.url")


async def connect(broker: Broker, name: str, timeout_s: float = 10.0) -> Client:
    """A connected client; see the module's promises."""
    if not broker.url:
        raise BrokerUnavailable(
            "broker.url is empty: name a server (nats://host:port), or start the run with `packtrain demo`"
        )
    check_address(broker.url)
    token = _token(broker)
    reported: list[str] = []

    async def on_error(error: Exception) -> None:
        # A denied publish reaches its caller as a bare timeout; the server's reason arrives only here.
        reason = str(error) or type(error).__name__
        # The client tries again several times a second: an outage is told once, not hundreds of times.
        if not reported or reported[-1] != reason:
            _LOG.warning("broker %s: %s", broker.url, reason)
        reported.append(reason)
        del reported[:-8]

    async def on_reconnected() -> None:
        reported.clear()
        _LOG.info("broker %s is back", broker.url)

    deadline = time.monotonic() + timeout_s
    while True:
        client = _Connection()
        try:
            await asyncio.wait_for(
                client.connect(
                    broker.url,
                    name=name,
                    token=token,
                    error_cb=on_error,
                    reconnected_cb=on_reconnected,
                    connect_timeout=2,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType]  # a float works; nats-py sleeps it
                    ping_interval=_PING_S,
                    pending_size=16 * 1024 * 1024,
                ),
                timeout=3.0,
            )
            return client
        except (NatsError, OSError, TimeoutError) as error:
            await client.close()
            reason = (
                next((r for r in reversed(reported) if "Authorization" in r), "") or str(error) or "no answer"
            )
            if "Authorization" in reason or "authorization" in reason:
                raise BrokerUnavailable(
                    f"broker {broker.url} refused the token in {broker.token_file or '(none given)'}: {reason}; set broker.token_file"
                ) from error
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"broker {broker.url} is not reachable: {reason}; is nats-server running there?"
                ) from error
            await asyncio.sleep(_RECONNECT_WAIT_S)


__all__ = ["BrokerUnavailable", "connect"]
