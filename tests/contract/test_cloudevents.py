"""A CloudEvents SDK of other authors reads what a real server stored of ours, and what it writes is read by us.

It has no NATS binding. Binary mode over NATS is that of HTTP: a header `ce-<attribute>` each, `content-type`, and the data
as the body; so its HTTP binding is given the message's headers as they are.
"""

from __future__ import annotations

from datetime import UTC, datetime

import nats
import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary, from_structured, to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from nats.js.api import RawStreamMsg

from pipeline.log import Log
from schemas.documents import DEAD_LETTER
from schemas.envelope import EXPECTED_LAST, Event, Invalid, decode, encode
from schemas.facts import (
    FACTS,
    BatchReplanned,
    Fact,
    Failure,
    LimitChanged,
    SequenceFailed,
    SequenceQuarantined,
    SequenceScored,
)
from schemas.names import dead_letter_subject, stream_name
from schemas.payload import PayloadHeader
from tests.natsserver import NatsServer
from tests.recorded import demo_events
from tests.unit.test_documents import BODIES, HEADERS

FAILED = SequenceFailed(
    source="arithmetic",
    sample="arithmetic-000001",
    sequence="arithmetic-000001-0",
    attempts=5,
    failure=Failure(kind="infra", reason="engine_unavailable", detail='connection refused: "ÄÖ %41" 100 %'),
)
LIMITED = LimitChanged(of="pool", name="chat", number=2, concurrency=16)
SCORED = SequenceScored(
    source="math",
    sample="math-000001",
    sequence="math-000001-0",
    teacher="large",
    tokens=12,
    scores=PayloadHeader(key="runs/r/teacher/math-000001-0.safetensors", bytes=100, columns=()),
)
QUARANTINED = SequenceQuarantined(
    source="math",
    sample="math-000001",
    sequence="math-000001-0",
    step=3,
    reason="damaged",
    key="runs/r/payloads/math/math-000001-0-a1.safetensors",
    column="tokens",
    block=0,
)
REPLANNED = BatchReplanned(step=3, revision=1, without=("math-000001-0",))
EXAMPLES: dict[str, Fact] = {
    QUARANTINED.type: QUARANTINED,
    REPLANNED.type: REPLANNED,
    **{event.fact.type: event.fact for event in reversed(demo_events())},
    FAILED.type: FAILED,
    LIMITED.type: LIMITED,
    SCORED.type: SCORED,
}
CAUSE = demo_events()[7]


def test_there_is_an_example_of_every_fact() -> None:
    assert set(EXAMPLES) == set(FACTS)


async def stored(server: NatsServer, run: str, subject: str) -> RawStreamMsg:
    """The message as any client gets it from the server."""
    client = await nats.connect(server.broker.url, token=server.token)
    try:
        return await client.jetstream().get_last_msg(stream_name(run), subject)
    finally:
        await client.close()


@pytest.mark.parametrize("type_", sorted(FACTS))
async def test_the_sdk_reads_what_the_server_has_of_ours(
    nats_server: NatsServer, log: Log, run_name: str, type_: str
) -> None:
    fact = EXAMPLES[type_]
    event = (await log.publish(fact, CAUSE)).event
    raw = await stored(nats_server, run_name, fact.subject(run_name).text)
    read = from_binary(HTTPMessage(headers=raw.headers or {}, body=raw.data or b""), JSONFormat())
    assert isinstance(read, CloudEvent)
    found = read.get_attributes()
    expected = {
        "specversion": "1.0",
        "id": event.id,
        "type": type_,
        "source": "test",
        "time": event.time,
        "subject": fact.id(),
        "datacontenttype": "application/json",
        "typeversion": str(fact.version),
        "causationid": CAUSE.id,
        "correlationid": fact.correlation(),
    }
    assert found == {name: value for name, value in expected.items() if value is not None}
    assert read.get_data() == fact.model_dump(mode="json")
    # The SDK checks attributes when it makes an event, and can carry it on in its own JSON form.
    again = from_structured(to_structured(read, JSONFormat()), JSONFormat())
    assert again.get_attributes() == found


@pytest.mark.parametrize("type_", sorted(FACTS))
async def test_we_read_what_the_sdk_writes(
    nats_server: NatsServer, log: Log, run_name: str, type_: str
) -> None:
    fact, time = EXAMPLES[type_], datetime(2026, 11, 30, 10, 14, 44, 409569, tzinfo=UTC)
    correlation = fact.correlation()
    made = CloudEvent(
        attributes={
            "type": type_,
            "id": "f3f5-0001",
            "source": "grader-of-another-language",
            "specversion": "1.0",
            "time": time,
            "subject": fact.id(),
            "datacontenttype": "application/json",
            "typeversion": str(fact.version),
            "causationid": CAUSE.id,
            **({"correlationid": correlation} if correlation else {}),
        },
        data=orjson.loads(encode(demo_event(fact), run_name).body),
    )
    message = to_binary(made, JSONFormat())
    client = await nats.connect(nats_server.broker.url, token=nats_server.token)
    try:
        await client.jetstream().publish(
            fact.subject(run_name).text, message.body, headers={**message.headers, EXPECTED_LAST: "0"}
        )
    finally:
        await client.close()
    read = await log.last(type_, fact.scope(), fact.id())
    assert read == Event(
        fact=fact,
        id="f3f5-0001",
        time=time,
        producer="grader-of-another-language",
        causation=CAUSE.id,
        correlation=correlation,
        seq=1,
    )


async def test_what_the_server_has_fits_the_published_document(
    nats_server: NatsServer, log: Log, run_name: str
) -> None:
    """Single facts, a burst, and the letter of what is no event, headers as a consumer gets them."""
    first, *burst = EXAMPLES.values()
    await log.publish(first)
    await log.publish_all([(fact, CAUSE) for fact in burst])
    client = await nats.connect(nats_server.broker.url, token=nats_server.token)
    try:
        js = client.jetstream()
        await js.publish(f"rl.{run_name}.sample.graded.s.x", b"\x00rubbish")
        async for found in log.read():
            if isinstance(found, Invalid):
                break
        for fact in EXAMPLES.values():
            raw = await js.get_last_msg(stream_name(run_name), fact.subject(run_name).text)
            HEADERS[fact.type].validate(raw.headers)
            BODIES[fact.type].validate(orjson.loads(raw.data or b""))
        letter = await js.get_last_msg(stream_name(run_name), f"{dead_letter_subject(run_name)}.>")
        HEADERS[DEAD_LETTER].validate(letter.headers)
        assert (letter.headers or {})["dlq-seq"] == str(found.seq)
    finally:
        await client.close()


async def test_without_the_compare_and_set_header_it_is_no_event(run_name: str) -> None:
    message = encode(demo_event(FAILED), run_name)
    bare = {name: value for name, value in message.headers.items() if name != EXPECTED_LAST}
    read = from_binary(HTTPMessage(headers=bare, body=message.body), JSONFormat())
    written = to_binary(read, JSONFormat())
    found = decode(message.subject, written.headers, written.body, 1)
    assert not isinstance(found, Event)
    found = decode(message.subject, {**written.headers, EXPECTED_LAST: "0"}, written.body, 1)
    assert isinstance(found, Event)


def demo_event(fact: Fact) -> Event:
    return Event(fact=fact, id="e", time=datetime.now(UTC), producer="test")
