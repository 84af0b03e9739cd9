"""Older bodies read as today's."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson
import pytest

from schemas import envelope, upcasters
from schemas.envelope import Event, Invalid, Unknown, decode, encode, new_event
from schemas.facts import FACTS, RULES, Fact, RunStarted
from schemas.names import Name
from schemas.upcasters import UPCASTERS, upcast


def test_every_version_of_every_fact_has_its_step() -> None:
    steps = {(name, version) for name, fact in FACTS.items() for version in range(1, fact.version)}
    assert set(UPCASTERS) == steps


def old(body: Any, version: str = "1") -> Event | Unknown | Invalid:
    message = encode(new_event(RunStarted(run="r", config={}), "launcher"), "r")
    return decode(message.subject, {**message.headers, "ce-typeversion": version}, orjson.dumps(body), 1)


def test_a_run_of_version_1_was_made_by_rules_1() -> None:
    event = old({"run": "r", "config": {"steps": 5}})
    assert isinstance(event, Event)
    assert event.fact == RunStarted(run="r", config={"steps": 5}, rules=1)
    assert new_event(RunStarted(run="r", config={}), "x").fact.model_dump()["rules"] == RULES


@pytest.mark.parametrize(
    "body", [[], None, 7, {}, {"run": "r"}, {"run": "r", "config": {}, "more": 1}], ids=repr
)
def test_an_old_body_that_does_not_validate_is_no_event(body: Any) -> None:
    assert isinstance(old(body), Invalid)


def test_a_newer_version_is_unknown_and_one_that_is_no_number_invalid() -> None:
    assert isinstance(old({}, str(RunStarted.version + 1)), Unknown)
    assert isinstance(old({}, "0"), Invalid)
    assert isinstance(old({}, "two"), Invalid)


def test_versions_go_up_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fact that changed twice: from metres to kilometres, and then its name."""

    class Third(Fact):
        type: ClassVar[str] = "trip.taken"
        version: ClassVar[int] = 3
        trip: Name
        distance_km: float

        def id(self) -> str:
            return self.trip

    monkeypatch.setitem(upcasters.UPCASTERS, ("trip.taken", 1), lambda b: {"km": b.pop("metres") / 1000, **b})
    monkeypatch.setitem(upcasters.UPCASTERS, ("trip.taken", 2), lambda b: {"distance_km": b.pop("km"), **b})
    monkeypatch.setitem(envelope.FACTS, "trip.taken", Third)
    wanted = Third(trip="t", distance_km=1.5)
    message = encode(new_event(wanted, "x"), "r")
    for version, body in ((1, {"metres": 1500}), (2, {"km": 1.5}), (3, {"distance_km": 1.5})):
        head = {**message.headers, "ce-typeversion": str(version)}
        event = decode(message.subject, head, orjson.dumps({"trip": "t", **body}), 1)
        assert isinstance(event, Event)
        assert event.fact == wanted
    assert upcast("trip.taken", 3, 3, {"a": 1}) == {"a": 1}
