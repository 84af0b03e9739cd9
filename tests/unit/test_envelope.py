"""Events on the wire: every fact survives, and no message, however hostile, is more than refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.envelope import BodyTooLarge, Event, Invalid, Unknown, at, decode, encode, new_event
from schemas.facts import (
    FACTS,
    MAX_BODY,
    BatchConsumed,
    BatchReplanned,
    BatchYielded,
    Fact,
    Failure,
    LimitChanged,
    PolicyPublished,
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
    SequenceOpened,
    SequenceQuarantined,
    SequenceScored,
    SequenceVerified,
    SourceShare,
    StepTrained,
    WindowPacked,
)
from schemas.names import (
    sample_id,
    sequence_id,
)
from schemas.payload import ColumnHeader, ContextMeta, PayloadHeader, Ref, Span

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
COUNTS = st.integers(0, 2**40)
STEPS = st.integers(1, 10**7)
FLOATS = st.floats(-1e9, 1e9)
REFS = st.builds(Ref, key=st.just("runs/r/x-1.bin"), bytes=COUNTS, crc32c=st.integers(0, 2**32 - 1))
FAILURES = st.builds(Failure, kind=st.sampled_from(["infra", "model"]), reason=NAMES, detail=TEXT)
SAMPLE: dict[str, Any] = {"source": NAMES, "sample": NAMES}
SEQUENCE: dict[str, Any] = {**SAMPLE, "sequence": NAMES}
ATTEMPT: dict[str, Any] = {**SEQUENCE, "attempt": st.integers(1, 1000)}
REWARDS = st.lists(FLOATS, max_size=8).map(tuple)
HEADERS = st.builds(
    PayloadHeader,
    key=st.just("runs/r/payloads/s/s-000000-0-a1.safetensors"),
    bytes=COUNTS,
    columns=st.lists(
        st.builds(
            ColumnHeader,
            name=st.just("routed_experts.L0-3"),
            dtype=st.just("uint8"),
            shape=st.just((3, 2)),
            offset=COUNTS,
            bytes=COUNTS,
            crc32c=st.lists(st.integers(0, 2**32 - 1), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)


@st.composite
def contexts(draw: st.DrawFn) -> ContextMeta:
    edges = sorted(draw(st.sets(st.integers(1, 500), max_size=8)))
    spans = tuple(Span(start=a, end=b) for a, b in zip(edges[::2], edges[1::2], strict=False))
    lossy = sum(span.end - span.start for span in spans)
    oldest = draw(COUNTS)
    return ContextMeta(
        label=draw(NAMES),
        offset=draw(COUNTS),
        tokens=500,
        generated=draw(st.integers(lossy, 500)),
        loss_spans=spans,
        min_version=oldest,
        max_version=oldest + draw(COUNTS),
    )


@st.composite
def dispatches(draw: st.DrawFn) -> SequenceDispatched:
    source, size = draw(NAMES), draw(st.integers(1, 100))
    sample, member = sample_id(source, draw(st.integers(0, 10**8))), draw(st.integers(0, size - 1))
    return SequenceDispatched(
        source=source,
        sample=sample,
        sequence=sequence_id(sample, member),
        member=member,
        group_size=size,
        pool=draw(NAMES),
        task_index=draw(COUNTS),
        min_policy_version=draw(COUNTS),
    )


@st.composite
def verdicts(draw: st.DrawFn) -> SequenceVerified:
    failure = draw(st.none() | FAILURES)
    reward = None if failure else draw(FLOATS)
    rest = {name: draw(strategy) for name, strategy in ATTEMPT.items()}
    return SequenceVerified(**rest, host=draw(NAMES), reward=reward, termination=draw(NAMES), failure=failure)


@st.composite
def completions(draw: st.DrawFn) -> SampleCompleted:
    members = draw(st.lists(NAMES, max_size=8))
    return SampleCompleted(
        source=draw(NAMES),
        sample=draw(NAMES),
        sequences=tuple(members),
        rewards=tuple(draw(FLOATS) for _ in members),
        failed=draw(COUNTS),
    )


SHARES = st.builds(
    SourceShare,
    groups=COUNTS,
    sequences=COUNTS,
    tokens=COUNTS,
    loss_tokens=COUNTS,
    mean_reward=FLOATS,
    max_staleness=COUNTS,
)
STRATEGIES: dict[type[Fact], st.SearchStrategy[Any]] = {
    RunStarted: st.builds(
        RunStarted, run=NAMES, config=st.dictionaries(TEXT, TEXT | st.integers(0, 9) | st.none())
    ),
    LimitChanged: st.builds(
        LimitChanged,
        of=st.sampled_from(["pool", "source"]),
        name=NAMES,
        number=STEPS,
        concurrency=st.integers(0, 1_000_000),
    ),
    RunStopped: st.builds(
        RunStopped, run=NAMES, reason=st.sampled_from(["completed", "cancelled"]), steps=COUNTS
    ),
    SequenceDispatched: dispatches(),
    SequenceOpened: st.builds(
        SequenceOpened,
        **ATTEMPT,
        pool=NAMES,
        task_index=COUNTS,
        host=NAMES,
        base_url=st.just("http://127.0.0.1:1"),
        session=NAMES,
        budget_s=st.floats(0.1, 1e6),
    ),
    SequenceVerified: verdicts(),
    SequenceFinished: st.builds(
        SequenceFinished,
        **ATTEMPT,
        reward=FLOATS,
        termination=NAMES,
        turns=COUNTS,
        contexts=st.lists(contexts(), max_size=3).map(tuple),
        payload=HEADERS,
    ),
    SequenceFailed: st.builds(SequenceFailed, **SEQUENCE, attempts=COUNTS, failure=FAILURES),
    SequenceScored: st.builds(SequenceScored, **SEQUENCE, teacher=NAMES, tokens=COUNTS, scores=HEADERS),
    SequenceQuarantined: st.builds(
        SequenceQuarantined,
        **SEQUENCE,
        step=STEPS,
        reason=st.sampled_from(["damaged", "missing"]),
        key=st.just("runs/r/payloads/s/s-000000-0-a1.safetensors"),
        column=NAMES,
        block=st.none() | COUNTS,
        detail=TEXT,
    ),
    SampleCompleted: completions(),
    SampleGraded: st.builds(SampleGraded, **SAMPLE, grader=NAMES, rewards=REWARDS, fallback=st.none() | TEXT),
    SampleAccepted: st.builds(
        SampleAccepted, **SAMPLE, pass_rate=FLOATS, mean_reward=FLOATS, tokens=COUNTS, min_version=COUNTS
    ),
    SampleRejected: st.builds(
        SampleRejected, **SAMPLE, reason=st.sampled_from(["stale", "failed"]), pass_rate=st.none() | FLOATS
    ),
    SampleShaped: st.builds(SampleShaped, **SAMPLE, revision=COUNTS, estimator=NAMES, advantages=REWARDS),
    BatchReplanned: st.builds(
        BatchReplanned, step=STEPS, revision=STEPS, without=st.lists(NAMES, min_size=1, max_size=3).map(tuple)
    ),
    BatchYielded: st.builds(
        BatchYielded,
        step=STEPS,
        through=COUNTS,
        policy_version=COUNTS,
        sources=st.dictionaries(NAMES, SHARES, max_size=3),
        microbatches=STEPS,
        plan=REFS,
    ),
    WindowPacked: st.builds(
        WindowPacked, step=STEPS, microbatch=COUNTS, dp=COUNTS, tokens=COUNTS, bytes=COUNTS, fetched=COUNTS
    ),
    BatchConsumed: st.builds(BatchConsumed, step=STEPS, sequences=COUNTS, loss_tokens=COUNTS),
    StepTrained: st.builds(
        StepTrained,
        step=STEPS,
        parent=st.none() | REFS,
        weights=REFS,
        optimizer=REFS,
        loss=FLOATS,
        grad_norm=FLOATS,
        kl=FLOATS,
        loss_tokens=COUNTS,
        seconds=st.floats(0, 1e9),
    ),
    PolicyPublished: st.builds(PolicyPublished, step=STEPS, weights=REFS),
}
ANY_FACT = st.one_of(*STRATEGIES.values())
EXAMPLE = SampleCompleted(source="s", sample="s-000001", sequences=("s-000001-0",), rewards=(1.0,), failed=0)


def sealed(fact: Fact = EXAMPLE) -> tuple[str, dict[str, str], bytes]:
    message = encode(new_event(fact, "test"), "r")
    return message.subject, message.headers, message.body


def test_every_fact_has_a_strategy_here() -> None:
    assert {fact.type for fact in STRATEGIES} == set(FACTS)


@given(
    fact=ANY_FACT,
    run=NAMES,
    seq=st.integers(0, 2**60),
    ids=st.tuples(st.none() | NAMES, st.none() | NAMES, st.none() | st.just("00-ab-cd-01")),
)
def test_decode_is_the_inverse_of_encode(
    fact: Fact, run: str, seq: int, ids: tuple[str | None, str | None, str | None]
) -> None:
    event = Event(fact, "id", datetime.now(UTC), "test-0", *ids)
    message = encode(event, run)
    assert decode(message.subject, message.headers, message.body, seq) == at(event, seq)
    assert len(message.subject.split(".")) == 6


@given(
    subject=st.just(sealed()[0]) | st.text(max_size=60),
    headers=st.none()
    | st.dictionaries(
        st.sampled_from([*sealed()[1]]),
        st.text(max_size=40) | st.sampled_from([*sealed()[1].values(), "٣", "²", "0", "-1", "9" * 5000]),
    ).map(lambda changed: {**sealed()[1], **changed}),
    body=st.just(sealed()[2]) | st.binary(max_size=80) | st.just(b"[" * 20_000),
)
def test_no_message_makes_decode_raise(subject: str, headers: dict[str, str] | None, body: bytes) -> None:
    found = decode(subject, headers, body, 7)
    assert isinstance(found, Event | Unknown | Invalid)
    assert found.seq == 7
    if isinstance(found, Event):
        assert found.fact == EXAMPLE
        assert found.time.tzinfo is not None


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"ce-typeversion": "2"}, Unknown),
        ({"ce-typeversion": "999999999"}, Unknown),
        ({"ce-typeversion": "0"}, Invalid),
        ({"ce-typeversion": ""}, Invalid),
        ({"ce-typeversion": "9" * 5000}, Invalid),
        ({"ce-type": "sample.graded"}, Invalid),
        ({"ce-specversion": "0.3"}, Invalid),
        ({"ce-id": ""}, Invalid),
        ({"ce-time": "2026-01-01T00:00:00"}, Invalid),
        ({"ce-time": "yesterday"}, Invalid),
    ],
)
def test_what_a_changed_header_makes_of_an_event(headers: dict[str, str], kind: type) -> None:
    subject, good, body = sealed()
    assert type(decode(subject, {**good, **headers}, body, 1)) is kind


def test_an_event_on_another_ones_subject_is_none() -> None:
    _, headers, body = sealed()
    found = decode("rl.r.sample.completed.s.s-000002", headers, body, 1)
    assert isinstance(found, Invalid)
    assert "belongs on rl.r.sample.completed.s.s-000001" in found.reason


def test_a_body_over_the_limit_is_refused_with_size_limit_and_remedy() -> None:
    fact = RunStarted(run="r", config={"prompt": "x" * MAX_BODY})
    with pytest.raises(BodyTooLarge, match=rf"run\.started on .* limit {MAX_BODY}; put the growing part"):
        encode(new_event(fact, "test"), "r")
