"""Determinism, on the recorded demo: today's code decides the bytes that were recorded, whatever the hash seed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from pipeline.replay import SERVICES, Rerun
from schemas.envelope import Event
from schemas.facts import FACTS, BatchYielded, Fact, RunStarted
from tests.recorded import DEMO, demo_events, demo_messages

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib, orjson
from pipeline.replay import SERVICES
from tests.recorded import demo_events

for name, service in SERVICES.items():
    core, decided, standing = service.core("demo"), hashlib.sha256(), set()
    states, divergences = hashlib.sha256(), 0
    from pipeline.replay import Rerun
    again = Rerun("demo", service)
    for event in demo_events():
        core.fold(event)
        for decision in core.decide(event):
            decided.update(orjson.dumps([event.seq, decision.fact.model_dump(mode="json")]))
            for key, body in decision.objects.items():
                decided.update(key.encode() + body)
        states.update(orjson.dumps(core.dump()))
        again.feed(event)
    report = again.report()
    print(name, decided.hexdigest(), states.hexdigest(), sum(report.compared.values()), len(report.divergences) + report.more, len(report.pending))
"""


def folded(seed: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_the_recorded_demo_is_decided_again_byte_for_byte_under_two_hash_seeds() -> None:
    one, other = folded("1"), folded("4242")
    assert one == other
    assert [(name, *counts) for name, _, _, *counts in one] == [
        ("mixer", "361", "0", "0"),
        ("sampler", "139", "0", "0"),
        ("yield", "5", "0", "0"),
    ]


def body(fact: Fact) -> bytes:
    return orjson.dumps(fact.model_dump(mode="json"))


def test_the_recorded_bodies_are_the_bytes_that_are_decided() -> None:
    """Not by our comparison: what is recorded, as the bytes of today's version, against those of the decision; and a plan by
    its checksum."""
    recorded = {event.fact.subject("demo").text: body(event.fact) for event in demo_events()}
    checked = 0
    for name in ("mixer", "sampler"):
        core, seen = SERVICES[name].core("demo"), set[str]()
        for event in demo_events():
            core.fold(event)
            for decision in core.decide(event):
                subject = decision.fact.subject("demo").text
                if subject in seen:
                    continue
                seen.add(subject)
                assert body(decision.fact) == recorded[subject]
                if isinstance(decision.fact, BatchYielded):
                    (plan,) = decision.objects.values()
                    assert len(plan) == decision.fact.plan.bytes
                checked += 1
    assert checked == 361 + 139


def test_every_message_of_the_version_1_stream_reads_as_an_event_of_today() -> None:
    found = [message.decoded() for message in demo_messages()]
    assert len(found) == 1651
    assert [each for each in found if not isinstance(each, Event)] == []
    versions = {(m.headers["ce-type"], m.headers["ce-typeversion"]) for m in demo_messages()}
    assert {version for _, version in versions} == {"1"}
    # All types but those that this run had no case for.
    assert FACTS.keys() - {type_ for type_, _ in versions} == {
        "sequence.failed",
        "sequence.scored",
        "sequence.quarantined",
        "batch.replanned",
        "limit.changed",
    }
    started = demo_events()[0].fact
    assert isinstance(started, RunStarted)
    assert b'"rules"' not in demo_messages()[0].body
    assert started.rules == 1


def test_the_fixture_is_the_recorded_one() -> None:
    raw = gzip.decompress(DEMO.read_bytes())
    assert (
        hashlib.sha256(raw).hexdigest() == "ec1d5549bd7f29c5c81790680c1199a832cc9bb8fd4d5160c1ddc4cbb4a5f004"
    )
    assert gzip.compress(raw, 9, mtime=0)[:9] == DEMO.read_bytes()[:9]
    rows = [orjson.loads(line) for line in raw.splitlines()]
    assert [row["seq"] for row in rows] == list(range(1, 1652))
    assert all(base64.b64decode(row["body"]) for row in rows)


@pytest.mark.parametrize("service", list(SERVICES))
def test_a_rerun_that_starts_from_a_stored_state_goes_on_as_one_that_did_not(service: str) -> None:
    whole = Rerun("demo", SERVICES[service])
    for event in demo_events():
        whole.feed(event)
    half = SERVICES[service].core("demo")
    for event in demo_events()[:800]:
        half.fold(event)
    loaded = SERVICES[service].core("demo")
    loaded.load(orjson.loads(orjson.dumps(half.dump())))
    for event in demo_events()[800:]:
        loaded.fold(event)
    assert loaded.dump() == whole.report().state
