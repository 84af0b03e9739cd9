"""The causal life of a sample, a sequence and a batch, on the recorded demo and on made-up histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import orjson
import pytest

from pipeline.replay import NoSuchId, Trace, Tracer
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    PenaltyFactors,
    RunStarted,
    SampleAccepted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFinished,
    SequenceOpened,
    SequenceScored,
)
from schemas.payload import PayloadHeader
from services.cli.trace import lines
from tests.recorded import demo_events


def traced(id_: str, events: Sequence[Event] | None = None) -> Trace:
    tracer = Tracer("demo", id_)
    for event in events if events is not None else demo_events():
        tracer.feed(event)
    return tracer.trace()


def test_a_core_that_fails_ends_the_members_and_not_the_trace() -> None:
    events = list(demo_events())
    events[0] = replace(events[0], fact=RunStarted(run="demo", config={"steps": "none"}))
    tracer = Tracer("demo", "000001")
    for event in events:
        tracer.feed(event)
    assert len(tracer.trace().nodes) == 6
    assert tracer.trace().members == ()
    assert tracer.failed.startswith("message 1, run.started demo: ValidationError")


def test_every_event_of_a_sample_stands_under_the_event_that_it_was_decided_on() -> None:
    trace = traced("arithmetic-000001")
    by_id = {e.id: e for e in demo_events()}
    mine = [e for e in demo_events() if e.fact.correlation() in ("arithmetic-000001", "000001")]
    placed = {node.seq: node for node in trace.nodes}
    assert sorted(placed) == [e.seq for e in mine]
    assert len(trace.nodes) == len(mine)
    assert (trace.kind, trace.batch) == ("sample", 1)
    for event in mine:
        node = placed[event.seq]
        caused = by_id[event.causation or ""]
        assert node.after_s == (event.time - caused.time).total_seconds()
        assert node.producer == event.producer
        if node.cause is None:
            assert node.depth == 0
            assert node.outside == f"message {caused.seq}, {caused.fact.type} {caused.fact.id()}"
        else:
            assert (node.cause, node.outside) == (caused.seq, "")
            assert node.depth == placed[caused.seq].depth + 1
    assert trace.total_s == (max(e.time for e in mine) - min(e.time for e in mine)).total_seconds()


def test_a_sequence_has_its_own_attempts_its_sample_and_its_batch() -> None:
    trace = traced("arithmetic-000001-3")
    ids = [node.id for node in trace.nodes]
    assert {i for i in ids if i.startswith("arithmetic")} == {
        "arithmetic-000001",
        "arithmetic-000001-3",
        "arithmetic-000001-3-a1",
    }
    assert [node.type for node in trace.nodes][-1] == "policy.published"
    for of in ("arithmetic-000001-3-a1", "arithmetic-000001-3-large"):
        assert traced(of) == trace
    assert traced("arithmetic-000001-r1") == traced("arithmetic-000001")


def test_all_attempts_of_a_sequence_are_in_its_life() -> None:
    opened = next(e for e in demo_events() if isinstance(e.fact, SequenceOpened))
    assert isinstance(opened.fact, SequenceOpened)
    second = replace(
        opened,
        fact=opened.fact.model_copy(update={"attempt": 2}),
        id="second",
        seq=1652,
        time=opened.time + timedelta(seconds=60),
    )
    trace = traced(opened.fact.sequence, [*demo_events(), second])
    first = next(node for node in trace.nodes if node.type == "sequence.dispatched")
    assert [node.id for node in trace.nodes if node.cause == first.seq] == [
        f"{opened.fact.sequence}-a{n}" for n in (1, 2)
    ]
    assert trace.total_s > 60


def test_a_batch_has_its_samples_by_the_samplers_core_and_how_long_each_waited() -> None:
    for event in demo_events():
        if not isinstance(event.fact, BatchYielded):
            continue
        trace = traced(event.fact.id())
        assert trace == traced(str(event.fact.step))
        assert {node.type for node in trace.nodes} == {
            "batch.yielded",
            "window.packed",
            "batch.consumed",
            "step.trained",
            "policy.published",
        }
        assert len(trace.members) == sum(s.groups for s in event.fact.sources.values())
        assert sum(m.tokens for m in trace.members) == sum(s.tokens for s in event.fact.sources.values())
        for member in trace.members:
            assert traced(member.sample).batch == event.fact.step
            mine = [e for e in demo_events() if e.fact.correlation() == member.sample]
            shaped = next(e.time for e in mine if isinstance(e.fact, SampleShaped))
            sent = min(e.time for e in mine if isinstance(e.fact, SequenceDispatched))
            assert member.waited_s == (event.time - shaped).total_seconds()
            assert member.in_flight_s == (shaped - sent).total_seconds()


def test_a_rejected_sample_is_in_no_batch() -> None:
    rejected = next(e.fact for e in demo_events() if isinstance(e.fact, SampleRejected))
    trace = traced(rejected.sample)
    assert trace.batch is None
    assert [node.note for node in trace.nodes if node.type == "sample.rejected"] == [rejected.reason]


def test_scores_late_answers_and_shaping_anew_are_in_the_life_of_a_sample() -> None:
    mine = [e for e in demo_events() if e.fact.correlation() == "arithmetic-000001"]
    by_type = {e.fact.type: e for e in mine}
    graded, shaped = by_type["sample.graded"], by_type["sample.shaped"]
    finished, accepted = by_type["sequence.finished"], by_type["sample.accepted"]
    assert isinstance(graded.fact, SampleGraded)
    assert isinstance(shaped.fact, SampleShaped)
    assert isinstance(finished.fact, SequenceFinished)
    assert isinstance(accepted.fact, SampleAccepted)
    header = PayloadHeader(key="k", bytes=1, columns=())
    of = {"source": "arithmetic", "sample": "arithmetic-000001", "sequence": finished.fact.sequence}
    scored = SequenceScored.model_validate(
        {**of, "teacher": "big", "tokens": 7, "scores": header, "seconds": 2.0}
    )
    lost = SequenceScored.model_validate(
        {**of, "teacher": "small", "tokens": 0, "scores": None, "failure": "\x1b[31m"}
    )
    n = len(graded.fact.rewards)
    late = graded.fact.model_copy(
        update={"revision": 1, "quality": (0.5,) * n, "hacks": (True,) + (False,) * (n - 1)}
    )
    anew = shaped.fact.model_copy(
        update={"revision": 1, "by": "hook", "sidecars": (header, *(None,) * (n - 1))}
    )
    # Behind the log as it was, so that the rest of it stays what it was.
    head = demo_events()[-1].seq
    added = [
        replace(finished, fact=scored, id="x1", seq=head + 1, causation=finished.id),
        replace(finished, fact=lost, id="x2", seq=head + 2, causation=finished.id),
        replace(graded, fact=late, id="x3", seq=head + 3, causation=graded.causation),
        replace(shaped, fact=anew, id="x4", seq=head + 4, causation="x3"),
    ]
    events = [
        replace(e, fact=graded.fact.model_copy(update={"fallback": "no answer in 60 s"}))
        if e is graded
        else e
        for e in demo_events()
    ]
    shown = list(lines(traced("arithmetic-000001", [*events, *added])))
    for said in (
        "sample.graded arithmetic-000001 (fallback: no answer in 60 s)  ",
        f"sequence.scored {finished.fact.sequence}-big (7 tokens in 2.0 s)  ",
        f"sequence.scored {finished.fact.sequence}-small (not scored: \\u001b[31m)  ",
        "sample.graded arithmetic-000001-r1 (a late answer, quality 0.5 to 0.5, confirmed hacks: 1)  ",
        "  sample.shaped arithmetic-000001-r1 (anew, by token: 1)  ",
    ):
        assert sum(said in line for line in shown) == 1, said
    member = traced(finished.fact.sequence, [*events, *added])
    assert "sequence.scored" in {node.type for node in member.nodes}
    other = traced(
        "arithmetic-000001-0" if finished.fact.sequence[-1] != "0" else "arithmetic-000001-1",
        [*events, *added],
    )
    assert "sequence.scored" not in {node.type for node in other.nodes}


def test_a_batch_says_its_penalty_factors() -> None:
    batch = next(e for e in demo_events() if isinstance(e.fact, BatchYielded))
    weighed = batch.fact.model_copy(update={"factors": PenaltyFactors(alpha=1.25, beta=0.5)})
    events = [replace(e, fact=weighed) if e is batch else e for e in demo_events()]
    shown = list(lines(traced("1", events)))
    assert [
        line for line in shown if "batch.yielded 000001 (penalty factors alpha 1.250, beta 0.500)  " in line
    ]
    assert not [line for line in lines(traced("1")) if "penalty" in line]


def test_how_long_a_sample_waited_counts_from_its_first_advantages() -> None:
    batch = next(e for e in demo_events() if isinstance(e.fact, BatchYielded))
    before = traced("1").members[0]
    shaped = next(
        e for e in demo_events() if isinstance(e.fact, SampleShaped) and e.fact.sample == before.sample
    )
    assert isinstance(shaped.fact, SampleShaped)
    late = shaped.fact.model_copy(update={"revision": 1})
    events = list(demo_events())
    again = replace(shaped, fact=late, id="again", time=batch.time, causation=shaped.id)
    events.insert(events.index(shaped) + 1, again)
    assert traced("1", events).members[0] == before


def test_a_run_under_way_shows_what_there_is() -> None:
    dispatched = next(e for e in demo_events() if isinstance(e.fact, SequenceDispatched))
    trace = traced(dispatched.fact.id(), [e for e in demo_events() if e.seq <= dispatched.seq])
    assert (len(trace.nodes), trace.batch, trace.total_s) == (1, None, 0.0)


def test_a_cause_that_is_not_in_the_log_is_named_by_its_id() -> None:
    other = [replace(e, causation="f" * 32) if e.fact.type == "sample.accepted" else e for e in demo_events()]
    cut_off = [n for n in traced("arithmetic-000001", other).nodes if n.type == "sample.accepted"]
    assert [(n.outside, n.after_s) for n in cut_off] == [(f"event {'f' * 32}", None)]


def test_causes_that_point_forward_or_in_a_circle_leave_no_event_out() -> None:
    mine = [e for e in demo_events() if e.fact.correlation() == "arithmetic-000001"]
    ring = {e.id: mine[(i + 1) % len(mine)].id for i, e in enumerate(mine)}
    events = [replace(e, causation=ring.get(e.id, e.causation)) for e in demo_events()]
    assert {e.seq for e in mine} <= {node.seq for node in traced("arithmetic-000001", events).nodes}


def test_a_long_chain_of_causes_is_no_deep_recursion() -> None:
    opened = next(e for e in demo_events() if isinstance(e.fact, SequenceOpened))
    chain, events = opened, list(demo_events())
    for attempt in range(2, 3000):
        fact = opened.fact.model_copy(update={"attempt": attempt})
        chain = replace(opened, fact=fact, id=f"x{attempt}", seq=1652 + attempt, causation=chain.id)
        events.append(chain)
    trace = traced(opened.fact.correlation() or "", events)
    assert max(node.depth for node in trace.nodes) == 2999
    assert len(orjson.dumps(trace)) > 100_000
    assert len(list(lines(trace))) == len(trace.nodes) + 1


@pytest.mark.parametrize(
    ("id_", "said"),
    [
        ("arithmetic-00000", "near ones: arithmetic-000000, arithmetic-000000-0,"),
        ("aritmetic-000003", "near ones: arithmetic-000003"),
        ("99", "'000099'; batches: 000001 to 000005"),
        ("x", "ids are as arithmetic-000000, arithmetic-000000-0, 000001"),
    ],
)
def test_an_id_that_is_not_there_names_near_ones(id_: str, said: str) -> None:
    with pytest.raises(NoSuchId) as refused:
        traced(id_)
    assert said in refused.value.args[0]


def test_an_empty_log_has_nothing() -> None:
    with pytest.raises(NoSuchId, match="it has none yet"):
        traced("arithmetic-000000", [])
    with pytest.raises(NoSuchId, match="no batch is yielded yet"):
        traced("1", [])


def test_no_control_character_of_a_header_gets_out() -> None:
    events = [replace(e, producer="\x1b[31mred\r\n", causation="\x1b]0;x\x07") for e in demo_events()]
    assert all(line.isprintable() for line in lines(traced("arithmetic-000001-3", events)))


def test_the_lines_are_indented_under_their_causes() -> None:
    shown = list(lines(traced("arithmetic-000001-3")))
    assert shown[0] == "sequence arithmetic-000001-3, batch 000001: 14 events in 13.354 s"
    assert shown[1].endswith(
        "sequence.dispatched arithmetic-000001-3  dispatcher  (decided on message 1, run.started demo)"
    )
    depth = {line.split()[4]: line.index(line.split()[4]) for line in shown[1:]}
    assert depth["sequence.opened"] == depth["sequence.dispatched"] + 2
    assert depth["sequence.finished"] == depth["sequence.opened"] + 2
    assert depth["sample.completed"] == depth["sequence.dispatched"]
