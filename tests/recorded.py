"""The recorded demo of `tests/fixtures/demo-v1.jsonl.gz`: its messages as they stood in the stream, and its events."""

from __future__ import annotations

import base64
import functools
import gzip
from dataclasses import dataclass
from pathlib import Path

import orjson

from schemas.envelope import Event, Invalid, Unknown, decode

DEMO = Path(__file__).parent / "fixtures" / "demo-v1.jsonl.gz"


@dataclass(frozen=True)
class Recorded:
    """One message of the stream."""

    seq: int
    subject: str
    headers: dict[str, str]
    body: bytes

    def decoded(self) -> Event | Unknown | Invalid:
        return decode(self.subject, self.headers, self.body, self.seq)


@functools.cache
def demo_messages() -> tuple[Recorded, ...]:
    rows = map(orjson.loads, gzip.decompress(DEMO.read_bytes()).splitlines())
    return tuple(
        Recorded(row["seq"], row["subject"], row["headers"], base64.b64decode(row["body"])) for row in rows
    )


@functools.cache
def demo_events() -> tuple[Event, ...]:
    found = [message.decoded() for message in demo_messages()]
    events = tuple(each for each in found if isinstance(each, Event))
    assert len(events) == len(found), [each for each in found if not isinstance(each, Event)][:3]
    return events
