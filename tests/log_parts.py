"""Facts, and hands on the broker, for tests of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from nats.errors import Error as NatsError

from pipeline.log import Log
from schemas.config import Broker
from schemas.envelope import EXPECTED_LAST
from schemas.facts import SampleCompleted, SequenceDispatched

HEADERS = {
    "ce-specversion": "1.0", "ce-id": "x", "ce-time": "2026-01-01T00:00:00+00:00", "ce-typeversion": "1",
}  # fmt: skip
"""Of a well-formed message that nobody checked."""
CHECKED = {**HEADERS, EXPECTED_LAST: "0"}
_T = TypeVar("_T")


def dispatched(number: int, source: str = "math") -> SequenceDispatched:
    sample = f"{source}-{number:06d}"
    return SequenceDispatched(
        source=source,
        sample=sample,
        sequence=f"{sample}-0",
        member=0,
        group_size=1,
        pool="chat",
        task_index=number,
    )


def completed(number: int, rewards: tuple[float, ...] = (1.0,)) -> SampleCompleted:
    return SampleCompleted(
        source="math", sample=f"math-{number:06d}", sequences=("a",) * len(rewards), rewards=rewards, failed=0
    )


async def take(events: AsyncIterator[_T], count: int, deadline_s: float = 30.0) -> list[_T]:
    found: list[_T] = []
    async with asyncio.timeout(deadline_s):
        async for event in events:
            found.append(event)
            if len(found) == count:
                break
    return found


async def until(condition: Callable[[], bool], deadline_s: float = 30.0, poll_s: float = 0.02) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(poll_s)


class Tries:
    """Counts what a log sends to be stored, from now on, each try of it."""

    def __init__(self, log: Log) -> None:
        self.count = 0
        acks = log._publisher._acks
        publish = acks.publish

        async def counted(subject: str, body: bytes, headers: dict[str, str]):
            self.count += 1
            return await publish(subject, body, headers)

        acks.publish = counted


async def created(log: Log) -> None:
    """The log's stream is there: a cluster that has just started has no leader yet."""
    async with asyncio.timeout(60):
        while True:
            try:
                await log.create()
                return
            except (NatsError, TimeoutError):
                await asyncio.sleep(0.2)


async def publish_raw(broker: Broker, subject: bytes, headers: bytes, body: bytes) -> None:
    """A message as a stranger may write it: no client of ours checks a byte. `headers` are whole, or none."""
    host, port = broker.url.removeprefix("nats://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    token = Path(broker.token_file).read_text().encode()
    writer.write(b'CONNECT {"verbose":false,"headers":true,"auth_token":"%s"}\r\n' % token)
    if headers:
        sizes = b"%d %d" % (len(headers), len(headers) + len(body))
        writer.write(b"HPUB %s %s\r\n%s%s\r\n" % (subject, sizes, headers, body))
    else:
        writer.write(b"PUB %s %d\r\n%s\r\n" % (subject, len(body), body))
    writer.write(b"PING\r\n")
    while (line := await reader.readline()) != b"PONG\r\n":
        assert line.startswith(b"INFO "), line
    writer.close()
    await writer.wait_closed()
