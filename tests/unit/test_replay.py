"""A run's decisions made again: nothing diverges in what this code made, and what was altered is named with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.replay import SERVICES, Divergence, Place, Report, Rerun
from pipeline.replay.rerun import ABSENT, first_difference
from schemas.envelope import Event
from schemas.facts import (
    RULES,
    BatchYielded,
    Fact,
    Failure,
    RunStarted,
    RunStopped,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from services.cli.replay_report import rerun_lines
from tests.recorded import demo_events
from tests.unit.factories import config
from tests.unit.test_cores import World

SOURCE = {"pool": "p", "group_size": 3, "environment": {"kind": "arithmetic"}}
F = TypeVar("F", bound=Fact)
HELD_OUT = {"name": "held-out", "groups": 0, "evaluate": 2, **SOURCE, "group_size": 1}


def rerun(events: Sequence[Event], service: str) -> Report:
    again = Rerun(events[0].fact.subject("x").id if events else "x", SERVICES[service])
    for event in events:
        again.feed(event)
    return again.report()


def numbered(events: Sequence[Event]) -> list[Event]:
    """The events as a stream of their own."""
    return [replace(event, seq=seq) for seq, event in enumerate(events, 1)]


def first(kind: type[F], sample: str | None = None) -> tuple[Event, F]:
    """The demo's first event of that fact, of that sample if one is given."""
    for event in demo_events():
        if isinstance(event.fact, kind) and sample in (None, event.fact.correlation()):
            return event, event.fact
    raise AssertionError(f"the demo has no {kind.__name__} of {sample}")


def altered(event: Event, **changes: Any) -> list[Event]:
    """The demo with other values in the body of one event."""
    other = replace(event, fact=event.fact.model_copy(update=changes))
    return [other if each.id == event.id else each for each in demo_events()]


def without(*events: Event) -> list[Event]:
    gone = {event.id for event in events}
    return [each for each in demo_events() if each.id not in gone]


def cause_of(event: Event) -> Place:
    found = next(each for each in demo_events() if each.id == event.causation)
    return Place(found.seq, found.fact.type, found.fact.id())


@given(
    seed=st.integers(0, 10_000),
    staleness=st.integers(0, 2),
    cut=st.integers(0, 400),
    twice=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_no_run_of_this_code_diverges_and_no_part_of_one(
    seed: int, staleness: int, cut: int, twice: bool
) -> None:
    sources = [{"name": "math", "groups": 2, **SOURCE, "staleness": staleness}, HELD_OUT]
    world = World(config(sources=sources), seed)
    if twice:
        world.cores += [(SERVICES["mixer"].core("r"), 0), (SERVICES["sampler"].core("r"), 0)]
    world.run()
    for name in SERVICES:
        whole = rerun(world.log, name)
        assert whole.divergences == ()
        assert sum(whole.compared.values()) == sum(SERVICES[name].decides(e.fact) for e in world.log)
        # A log that ends anywhere has decisions on their way, and they are no divergences.
        part = rerun(world.log[:cut], name)
        assert part.divergences == ()
        standing = {e.fact.subject("r").text for e in world.log[:cut]}
        assert not {p.subject for p in part.pending} & standing


def test_the_demo_has_no_divergence_and_its_state_can_be_seen_at_any_message() -> None:
    for name, compared in (("mixer", 361), ("sampler", 139), ("yield", 5)):
        report = rerun(demo_events(), name)
        assert (report.divergences, report.pending, sum(report.compared.values())) == ((), (), compared)
    for event in demo_events():
        if isinstance(event.fact, BatchYielded):
            until = [e for e in demo_events() if e.seq <= event.seq]
            assert rerun(until, "sampler").state["yielded"] == event.fact.step
            assert rerun(until[:-1], "sampler").state["yielded"] == event.fact.step - 1


def test_what_is_on_its_way_is_told_as_such() -> None:
    accepted, _ = first(SampleAccepted)
    report = rerun([e for e in demo_events() if e.seq < accepted.seq], "sampler")
    assert report.divergences == ()
    assert (accepted.fact.subject("demo").text, cause_of(accepted)) in [
        (p.subject, p.cause) for p in report.pending
    ]


def test_an_altered_field_is_named_with_both_values_and_the_event_it_was_decided_on() -> None:
    accepted, fact = first(SampleAccepted)
    (found,) = rerun(altered(accepted, pass_rate=0.5), "sampler").divergences
    assert found == Divergence(
        accepted.seq,
        accepted.fact.subject("demo").text,
        "differs",
        "pass_rate",
        0.5,
        fact.pass_rate,
        cause_of(accepted),
    )


def test_one_bit_of_an_advantage_is_enough() -> None:
    shaped, fact = first(SampleShaped)
    advantages = (
        *fact.advantages[:3],
        fact.advantages[3] * (1 + 2**-52),
        *fact.advantages[4:],
    )
    found = rerun(altered(shaped, advantages=advantages), "sampler").divergences
    assert (found[0].seq, found[0].kind, found[0].field) == (shaped.seq, "differs", "advantages[3]")
    # The batch that it went into has another plan than recorded, of which the checksum is named.
    batch, yielded = first(BatchYielded)
    assert [(d.seq, d.field, d.recorded) for d in found[1:]] == [
        (batch.seq, "plan.crc32c", yielded.plan.crc32c)
    ]


def test_another_cause_is_a_divergence() -> None:
    accepted, _ = first(SampleAccepted)
    started = demo_events()[0]
    other = [replace(e, causation=started.id) if e.id == accepted.id else e for e in demo_events()]
    (found,) = rerun(other, "sampler").divergences
    shown = f"message {cause_of(accepted).seq}"
    assert (found.kind, found.field, found.recorded, found.recomputed) == (
        "differs",
        "causationid",
        "message 1",
        shown,
    )


def test_a_dropped_fact_is_named_with_the_event_it_was_decided_on() -> None:
    completed, fact = first(SampleCompleted)
    graded, _ = first(SampleGraded, fact.sample)
    (found,) = rerun(without(completed), "sampler").divergences
    assert (found.kind, found.seq, found.cause) == (
        "never recorded",
        cause_of(completed).seq,
        cause_of(completed),
    )
    assert found.subject == completed.fact.subject("demo").text
    assert found.recomputed == completed.fact.model_dump(mode="json")
    # Its effect is an input, and stands: nothing else differs.
    assert graded in demo_events()


def test_a_dropped_fact_comes_before_what_follows_from_it() -> None:
    accepted, _ = first(SampleAccepted)
    found = rerun(without(accepted), "sampler").divergences
    assert [(d.kind, d.subject.split(".")[3]) for d in found[:2]] == [
        ("never recorded", "accepted"),
        ("never decided", "shaped"),
    ]
    assert found[0].seq == cause_of(accepted).seq


def test_a_dropped_dispatch_is_missed_when_the_run_is_over() -> None:
    dispatched = [e for e in demo_events() if isinstance(e.fact, SequenceDispatched)]
    for event in (dispatched[0], dispatched[-1]):
        found = rerun(without(event), "mixer").divergences
        assert [(d.kind, d.subject) for d in found if d.kind == "never recorded"] == [
            ("never recorded", event.fact.subject("demo").text)
        ]


def test_a_burst_that_is_cut_by_the_end_of_the_log_is_on_its_way_whatever_its_order() -> None:
    """The second dispatch is there before the first: a later decision alone does not say that the service went on."""
    dispatched = [e for e in demo_events() if isinstance(e.fact, SequenceDispatched)][:3]
    report = rerun([demo_events()[0], *dispatched[1:]], "mixer")
    assert report.divergences == ()
    assert dispatched[0].fact.subject("demo").text in [p.subject for p in report.pending]


def test_an_added_fact_is_never_decided() -> None:
    shaped, _ = first(SampleShaped)
    extra = SampleRejected(source="arithmetic", sample="arithmetic-000777", reason="stale")
    added = replace(shaped, fact=extra, id="added", causation=shaped.id)
    at = demo_events().index(shaped) + 1
    events = numbered([*demo_events()[:at], added, *demo_events()[at:]])
    # Batches name the message that they were decided on, which is one further on now.
    report = rerun(events, "sampler")
    found = report.divergences[0]
    assert (found.kind, found.seq, found.subject) == (
        "never decided",
        at + 1,
        "rl.demo.sample.rejected.arithmetic.arithmetic-000777",
    )
    assert found.cause == Place(shaped.seq, "sample.shaped", shaped.fact.id())
    assert rerun(events, "yield").divergences[0] == found


def test_a_reordered_pair_is_never_decided_where_it_stands() -> None:
    shaped, fact = first(SampleShaped)
    accepted, _ = first(SampleAccepted, fact.sample)
    places = {accepted.id: replace(shaped, seq=accepted.seq), shaped.id: replace(accepted, seq=shaped.seq)}
    found = rerun([places.get(e.id, e) for e in demo_events()], "sampler").divergences
    assert (found[0].kind, found[0].seq, found[0].cause) == ("never decided", accepted.seq, None)
    assert found[0].subject == shaped.fact.subject("demo").text


def test_a_second_fact_on_a_subject_is_told() -> None:
    accepted, _ = first(SampleAccepted)
    events = [*demo_events(), replace(accepted, id="again", seq=1652)]
    (found,) = rerun(events, "sampler").divergences
    assert (found.kind, found.seq) == ("stands twice", 1652)


def test_a_late_fact_is_handled_as_the_service_does() -> None:
    """A failure that comes after the sequence finished decides the completion again, on a subject that is taken."""
    completed, fact = first(SampleCompleted)
    _, late = first(SequenceFinished, fact.sample)
    failure = SequenceFailed(
        source=late.source,
        sample=late.sample,
        sequence=late.sequence,
        attempts=5,
        failure=Failure(kind="infra", reason="lost"),
    )
    at = demo_events().index(completed) + 1
    head = list(demo_events()[:at])
    report = rerun([*head, Event(failure, "late", completed.time, "x", seq=completed.seq)], "sampler")
    assert report.divergences == ()
    assert completed.fact.subject("demo").text not in {p.subject for p in report.pending}


def test_a_core_that_fails_on_an_event_is_a_divergence_and_the_last() -> None:
    shaped, fact = first(SampleShaped)
    changed = altered(shaped, estimator="another", advantages=fact.advantages[:1])
    started = replace(demo_events()[0], fact=RunStarted(run="demo", config={"steps": "many"}), seq=1652)
    found = rerun([*changed, started, *demo_events()[1:]], "sampler").divergences
    # Advantages that are not about the group make no batch; the core goes on until it cannot.
    assert found[0].kind == "differs"
    assert [d.kind for d in found].count("fails") == 1
    assert (found[-1].kind, found[-1].seq) == ("fails", 1652)
    assert found[-1].recomputed.startswith("ValidationError: ")


def test_other_rules_are_named() -> None:
    started = demo_events()[0]
    assert isinstance(started.fact, RunStarted)
    assert not rerun(altered(started, rules=RULES), "sampler").other_rules
    # The recording is of rules 1, by which it would be decided the same today.
    assert rerun(demo_events(), "sampler").other_rules
    report = rerun(altered(started, rules=RULES + 1), "sampler")
    assert (report.rules, report.other_rules) == (RULES + 1, True)
    assert "likely cause" not in "\n".join(rerun_lines([report]))
    accepted, fact = first(SampleAccepted)
    both = [
        replace(e, fact=fact.model_copy(update={"pass_rate": 0.5})) if e.id == accepted.id else e
        for e in altered(started, rules=RULES + 1)
    ]
    told = list(rerun_lines([rerun(both, "sampler")]))
    assert told[-1] == (
        f"  likely cause: the run was made by decision rules {RULES + 1}, this version's are {RULES}"
    )


def test_every_kind_of_divergence_is_told_with_its_place_and_cause() -> None:
    accepted, fact = first(SampleAccepted)
    shaped, _ = first(SampleShaped, fact.sample)
    cause, at = cause_of(accepted), f"message {accepted.seq}, {fact.subject('demo').text}"
    swapped = {accepted.id: replace(shaped, seq=accepted.seq), shaped.id: replace(accepted, seq=shaped.seq)}
    cases: list[tuple[list[Event], list[str]]] = [
        (altered(accepted, pass_rate=0.5), [f"sampler: {at}: pass_rate differs", "recorded    0.5", f"decided on message {cause.seq}, sample.graded {cause.id}"]),
        (without(accepted), [f"{fact.subject('demo').text}: decided on message {cause.seq}, sample.graded {cause.id}, and never recorded, though the run went on", "then sampler: message"]),
        ([swapped.get(e.id, e) for e in demo_events()], ["recorded, and never decided", "is not before it in the log"]),
        ([*demo_events(), replace(accepted, id="again", seq=1652)], ["a second fact on a subject that is taken"]),
    ]  # fmt: skip
    for events, said in cases:
        told = "\n".join(rerun_lines([rerun(events, "sampler")]))
        assert "first divergence: sampler: " in told
        for each in said:
            assert each in told


def test_a_run_that_a_person_ended_has_no_decision_of_that() -> None:
    cut = list(demo_events()[:600])
    cancelled = RunStopped(run="demo", reason="cancelled", steps=0)
    report = rerun([*cut, Event(cancelled, "c", cut[-1].time, "cli", seq=601)], "mixer")
    assert report.divergences == ()
    assert report.compared == {
        "sequence.dispatched": sum(isinstance(e.fact, SequenceDispatched) for e in cut)
    }


@pytest.mark.parametrize(
    ("recorded", "recomputed", "found"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, None),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ("a[1].b", 2, 3)),
        ({"a": [1]}, {"a": [1, 2]}, ("a[1]", ABSENT, 2)),
        ({"a": 1}, {"a": 1, "b": None}, ("b", ABSENT, None)),
        ({"a": 0.0}, {"a": -0.0}, ("a", 0.0, -0.0)),
        ({"a": 1}, {"a": 1.0}, ("a", 1, 1.0)),
        ({"key": "x", "crc32c": 1}, {"key": "y", "crc32c": 2}, ("crc32c", 1, 2)),
    ],
)
def test_the_first_difference_is_by_bytes(recorded: Any, recomputed: Any, found: Any) -> None:
    assert first_difference(recorded, recomputed) == found
