"""A connection to the broker that outlives the broker.

Promises:
- the first connection succeeds within `timeout_s` or raises one `BrokerUnavailable` that says why; an identity that is
  refused, and a server that cannot prove its own, are told at once, not after the timeout;
- where TLS is asked for (tls://, or files of it), nothing is said to a server that does not speak it;
- a request that the server denied (it tells no one but the connection) raises `Denied`, not a timeout;
- after that the connection reconnects for ever (nats-py's default gives up after two minutes), also when the broker
  falls silent without closing it;
- no message, whoever wrote it, ends the reading: a subject or header that is not text arrives as the nearest text.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.protocol.command import hpub_cmd  # pyright: ignore[reportUnknownVariableType]  # untyped in nats-py

from pipeline.log.identity import NO_TLS, BrokerUnavailable, identity_of, refusal_of, tls_of
from pipeline.log.tasks import end_tasks
from schemas.config import Broker

_LOG = logging.getLogger("packtrain.log")
# Said by asyncio at the end of each TLS connection of nats-py's, of nothing that anybody can change.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in str(record.msg))
_RECONNECT_WAIT_S = 0.2
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TRY_S = 3.0
_PING_S = 20
"""nats-py's two minutes would leave a reader of a silent broker waiting for six."""


_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
_REMEMBERED = 64


class Denied(NatsError):
    """The broker's user may not do this: waiting does not help. The message names user, subject and remedy."""


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
    faster at headers, of which an event has a dozen. `user`: the kind of service that it is, empty: none."""

    def __init__(self, user: str = "", demands_tls: bool = False) -> None:
        super().__init__()
        self.user = user
        self._demands_tls = demands_tls
        self.asked: dict[str, set[asyncio.Future[Any]]] = {}
        """Answers that are waited for, by the subject that was asked, in lower case."""
        # When the server denied a publish, by subject: the newest last; and whether it denied the inbox that answers come to.
        self._denied: dict[str, float] = {}
        self._deaf = False

    def heard(self, reason: str) -> None:
        """What the server said of something that it did not do."""
        # nats-py gives it in lower case, the subject too.
        found = _DENIED.search(reason.lower())
        if found is None:
            return
        kind, subject = found.groups()
        subjects = [subject]
        if kind == "subscription":
            if not subject.startswith(f"{self._inbox_prefix.decode()}.".lower()):
                return
            self._deaf = True
            subjects = list(self.asked)
        else:
            self._denied.pop(subject, None)
            self._denied[subject] = time.monotonic()
            for old in list(self._denied)[:-_REMEMBERED]:
                del self._denied[old]
        for subject in subjects:
            for answer in self.asked.get(subject, ()):
                answer.cancel()

    def forget(self) -> None:
        self._denied.clear()
        self._deaf = False

    def denied(self, subject: str, since: float) -> str:
        """What the server denied of a request to `subject` that was made at `since`, or its answer; empty: nothing."""
        refused = self._denied.get(subject.lower(), 0.0) >= since
        if not refused and not self._deaf:
            return ""
        who = f"user {self.user!r}" if self.user else "the user of broker.credentials_file"
        if refused:
            return (
                f"the broker does not let {who} publish {subject}; give each service its own credentials (what each may do: "
                "`packtrain broker permissions`)"
            )
        if not self.user:
            return (
                "the broker lets its user subscribe to its own inbox only, and we do not know which: say whose credentials they "
                'are, as in Log.connect(..., user="reader")'
            )
        return (
            f"the broker does not let {who} subscribe to {self._inbox_prefix.decode()}.>, so that no answer comes: "
            "broker.credentials_file is another service's; give each its own"
        )

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109  # as nats-py names it
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        asked = asyncio.ensure_future(super().request(subject, payload, timeout, old_style, headers))
        with asking(self, subject, asked):
            return await asked

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py goes on in plain text, credentials and all.
        if self._demands_tls and initial_connection and not info.get("tls_required"):
            raise NatsError(NO_TLS)
        await super()._process_info(info, initial_connection)  # pyright: ignore[reportUnknownMemberType]  # untyped in nats-py

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if self.is_reconnecting:
            # There is nobody to send it to, and to write it to a TLS connection that was lost ends in an error of asyncio's.
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)  # pyright: ignore[reportUnknownMemberType]  # untyped in nats-py

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


@contextlib.contextmanager
def asking(client: Client, subject: str, answer: asyncio.Future[Any]) -> Generator[None, None, None]:
    """While it lasts, a request to `subject` whose answer is waited for ends when the server denies it: with Denied."""
    if not isinstance(client, _Connection):
        yield
        return
    since, key = time.monotonic(), subject.lower()
    if reason := client.denied(subject, since):
        answer.cancel()
        raise Denied(reason)
    client.asked.setdefault(key, set()).add(answer)
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        # Else it is we who are cancelled.
        if task is None or not task.cancelling():
            check_denied(client, subject, since)
        raise
    finally:
        waiting = client.asked[key]
        waiting.discard(answer)
        if not waiting:
            del client.asked[key]


def check_denied(client: Client, subject: str, since: float) -> None:
    """Raises Denied where a request to `subject`, made at `since` (monotonic), has no answer because the server denied it."""
    reason = client.denied(subject, since) if isinstance(client, _Connection) else ""
    if reason:
        raise Denied(reason)


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


async def connect(broker: Broker, name: str, timeout_s: float = 10.0, user: str = "") -> Client:
    """A connected client; see the module's promises. `user`: the kind of service (`pipeline.log.permissions`), whose own
    inbox answers come to; empty: any."""
    if not broker.url:
        raise BrokerUnavailable(
            "broker.url is empty: name a server (nats://host:port), or start the run with `packtrain demo`"
        )
    check_address(broker.url)
    # Read before the first try: what is no seed is told at once.
    identity, tls = identity_of(broker), tls_of(broker)
    reported: list[str] = []
    connected = False
    refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    client = _Connection()

    async def on_error(error: Exception) -> None:
        # A denied publish reaches its caller as a bare timeout; the server's reason arrives only here.
        reason = str(error) or type(error).__name__
        client.heard(reason)
        if not connected and not refused.done() and (final := refusal_of(broker, error)):
            refused.set_result(final)
        # The client tries again several times a second: an outage is told once, not hundreds of times.
        if not refused.done() and (not reported or reported[-1] != reason):
            _LOG.warning("broker %s: %s", broker.url, reason)
        reported.append(reason)
        del reported[:-8]

    async def on_disconnected() -> None:
        # The server that comes back may have other rules.
        client.forget()

    async def on_reconnected() -> None:
        reported.clear()
        _LOG.info("broker %s is back", broker.url)

    deadline = time.monotonic() + timeout_s
    while True:
        client = _Connection(user, tls is not None)
        connecting = asyncio.create_task(
            client.connect(
                broker.url,
                name=name,
                tls=tls,
                inbox_prefix=f"_INBOX.{user}" if user else "_INBOX",
                error_cb=on_error,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType]  # a float works; nats-py sleeps it
                ping_interval=_PING_S,
                pending_size=16 * 1024 * 1024,
                **identity,
            )
        )
        try:
            await asyncio.wait({connecting, refused}, timeout=_TRY_S, return_when=asyncio.FIRST_COMPLETED)
            error = connecting.exception() if connecting.done() else TimeoutError("no answer")
            if error is None:
                connected = True
                return client
            if not isinstance(error, (NatsError, OSError, TimeoutError)):
                raise error
        finally:
            if not connected:
                await end_tasks([connecting])
                await client.close()
        if refused.done():
            raise BrokerUnavailable(f"broker {broker.url} {refused.result()}")
        if time.monotonic() > deadline:
            reason = reported[-1] if reported else str(error)
            raise BrokerUnavailable(
                f"broker {broker.url} is not reachable: {reason}; is nats-server running there?"
            )
        await asyncio.sleep(_RECONNECT_WAIT_S)


__all__ = ["BrokerUnavailable", "Denied", "asking", "check_address", "check_denied", "connect"]
