"""Events on the wire: a fact as the body, CloudEvents 1.0 (NATS binding, binary mode) plus W3C traceparent as headers.

Promises:
- `decode(encode(event))` is the same event;
- bodies of older versions are read as today's (`schemas.upcasters`);
- `decode` never raises: a message is an `Event`, an `Unknown` (a type or a newer version that this code does not
  know: skip and count it) or `Invalid` (dead-letter it with its reason);
- a fact that was not published by compare-and-set is `Invalid`: a second copy of a fact never counts twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

import orjson
from pydantic import ValidationError

from schemas.facts import FACTS, MAX_BODY, Fact
from schemas.names import BadName, Subject
from schemas.upcasters import Body, upcast

CLOUDEVENTS = "1.0"
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
"""The broker stores a message with this header only if the number is that of the subject's last message, and keeps the
header: so a message that carries it was checked, and one that does not may be a duplicate."""
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
CONTENT_TYPE = "application/json"


class BodyTooLarge(ValueError):
    """A fact whose body is over `MAX_BODY`: what grows with the batch belongs in the store."""


@dataclass(frozen=True, slots=True)
class Event:
    """A fact with its envelope. `seq` is the stream sequence number, 0 until it is in the log."""

    fact: Fact
    id: str
    time: datetime
    producer: str
    causation: str | None = None
    correlation: str | None = None
    traceparent: str | None = None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Unknown:
    """A well-formed message of a type or version that this reader does not know."""

    type: str
    version: str
    seq: int


@dataclass(frozen=True, slots=True)
class Invalid:
    """A message that is no event; `reason` says why."""

    subject: str
    reason: str
    seq: int


def _event_id() -> str:
    """A random UUID, version 4, in hex: `uuid.uuid4().hex` in a third of its time, for every event that is published."""
    bits = int.from_bytes(os.urandom(16)) & ~(0xF << 76 | 0x3 << 62)
    return f"{bits | 4 << 76 | 2 << 62:032x}"


def new_event(fact: Fact, producer: str, cause: Event | None = None, traceparent: str | None = None) -> Event:
    """A fresh event with a random id, caused by `cause`, whose trace it joins unless one is given."""
    inherited = cause.traceparent if cause is not None else None
    return Event(
        fact=fact,
        id=_event_id(),
        time=datetime.now(UTC),
        producer=producer,
        causation=cause.id if cause is not None else None,
        correlation=fact.correlation(),
        traceparent=traceparent or inherited,
    )


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to the broker."""

    subject: str
    headers: dict[str, str] = field(hash=False)
    body: bytes


def encode(event: Event, run: str) -> Message:
    """Subject, headers and body; raises `BodyTooLarge` over 64 KiB and `BadName` on an id that may not be a subject."""
    subject = event.fact.subject(run).text
    body = orjson.dumps(event.fact.model_dump(mode="json"))
    if len(body) > MAX_BODY:
        raise BodyTooLarge(
            f"{event.fact.type} on {subject}: body is {len(body)} bytes, limit {MAX_BODY}; put the growing part in the store and carry a ref"
        )
    headers = {
        "content-type": CONTENT_TYPE,
        "ce-specversion": CLOUDEVENTS,
        "ce-id": event.id,
        "ce-type": event.fact.type,
        "ce-source": event.producer,
        "ce-time": event.time.isoformat(),
        "ce-subject": event.fact.id(),
        "ce-typeversion": str(event.fact.version),
        EXPECTED_LAST: "0",
    }
    if event.causation is not None:
        headers["ce-causationid"] = event.causation
    if event.correlation is not None:
        headers["ce-correlationid"] = event.correlation
    if event.traceparent is not None:
        headers["traceparent"] = event.traceparent
    return Message(subject, headers, body)


def decode(
    subject: str, headers: Mapping[str, str] | None, body: bytes, seq: int
) -> Event | Unknown | Invalid:
    """The event in a message of the log; see the module's promises."""
    head = headers or {}
    type_, version, id_ = head.get("ce-type", ""), head.get("ce-typeversion", ""), head.get("ce-id")
    if head.get("ce-specversion") != CLOUDEVENTS or not type_ or not id_:
        return Invalid(subject, "headers are not CloudEvents 1.0 in binary mode", seq)
    model = FACTS.get(type_)
    if not _VERSION.fullmatch(version) or model is None or int(version) > model.version:
        return _foreign(subject, type_, version, seq)
    if not head.get(EXPECTED_LAST, "").isdecimal():
        return Invalid(
            subject,
            f"{type_} was published without {EXPECTED_LAST}: it may be the second of its kind; publish facts by compare-and-set",
            seq,
        )
    try:
        if int(version) < model.version:
            older = orjson.loads(body)
            if not isinstance(older, dict):
                raise TypeError("the body is no JSON object")
            fact = model.model_validate(upcast(type_, int(version), model.version, cast("Body", older)))
        else:
            fact = model.model_validate_json(body)
        time = datetime.fromisoformat(head.get("ce-time", ""))
        # The run is the stream's; what the subject must be follows from it and from the fact.
        expected = fact.subject(subject.split(".", 2)[1]).text
    except (ValidationError, TypeError, ValueError, IndexError) as error:
        return Invalid(subject, f"{type_} does not validate: {error}"[:2000], seq)
    if time.tzinfo is None:
        return Invalid(subject, f"{type_}: ce-time {head['ce-time'][:40]!r} has no time zone", seq)
    if subject != expected:
        return Invalid(subject, f"{type_} belongs on {expected}", seq)
    return Event(
        fact=fact,
        id=id_,
        time=time,
        producer=head.get("ce-source", ""),
        causation=head.get("ce-causationid"),
        correlation=head.get("ce-correlationid"),
        traceparent=head.get("traceparent"),
        seq=seq,
    )


def _foreign(subject: str, type_: str, version: str, seq: int) -> Unknown | Invalid:
    """A message of a type or version that is not ours: unknown if it is well-formed."""
    try:
        named = Subject.parse(subject)
    except BadName as error:
        return Invalid(subject, str(error), seq)
    if type_ != f"{named.entity}.{named.fact}" or not _VERSION.fullmatch(version):
        return Invalid(
            subject, f"type {type_[:200]!r} version {version[:20]!r} belongs on no such subject", seq
        )
    return Unknown(type_, version, seq)


def at(event: Event, seq: int) -> Event:
    """The same event with its place in the log."""
    # By name: `dataclasses.replace` takes three times as long, and this is done for every event that is published.
    return Event(
        fact=event.fact,
        id=event.id,
        time=event.time,
        producer=event.producer,
        causation=event.causation,
        correlation=event.correlation,
        traceparent=event.traceparent,
        seq=seq,
    )
