"""Events and OpenTelemetry: one trace for a sample or a step, linked to what caused it, with an SDK or without, whatever a header says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from pipeline.log import Log, tracing
from pipeline.log.tracing import handling, publishing, trace_context
from schemas.config import Broker
from schemas.envelope import BodyTooLarge, Event, Message, decode, encode, new_event
from schemas.facts import Fact, RunStarted
from tests.recorded import demo_events

SAMPLE, OTHER, STEP = "arithmetic-000001", "arithmetic-000000", "000001"


def event_of(type_: str, correlation: str | None) -> Event:
    """The first of that type in the recorded demo, which was recorded before events had a traceparent."""
    return next(e for e in demo_events() if e.fact.type == type_ and e.correlation == correlation)


STARTED = event_of("run.started", None)
DISPATCHED, OTHER_DISPATCHED = (event_of("sequence.dispatched", sample).fact for sample in (SAMPLE, OTHER))
COMPLETED, GRADED, ACCEPTED, SHAPED = (
    event_of(f"sample.{name}", SAMPLE).fact for name in ("completed", "graded", "accepted", "shaped")
)
GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,16}", fullmatch=True)
W3C = r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[0-3]"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """An SDK for this test alone: a process's provider can be set only once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("packtrain"))
    yield exporter
    provider.shutdown()


def publish(fact: Fact, cause: Event | None, run: str = "r") -> Event:
    """What the log does around a publish: the event as a reader gets it."""
    with publishing(fact, run, cause) as traceparent:
        message: Message = encode(new_event(fact, "test", cause, traceparent), run)
    found = decode(message.subject, message.headers, message.body, 1)
    assert isinstance(found, Event)
    return found


def context_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def trace_of(event: Event) -> int:
    return trace_context(event).trace_id


def test_publish_handle_publish_is_one_linked_trace(spans: InMemorySpanExporter) -> None:
    first = publish(COMPLETED, None)
    with handling(first, "grader"):
        second = publish(GRADED, first)
    third = publish(SHAPED, second)
    named = {span.name: span for span in spans.get_finished_spans()}
    assert list(named) == [
        "publish sample.completed", "publish sample.graded", "process sample.completed", "publish sample.shaped",
    ]  # fmt: skip
    produced, handled = named["publish sample.completed"], named["process sample.completed"]
    answered, followed = named["publish sample.graded"], named["publish sample.shaped"]
    assert len({context_of(span)[0] for span in named.values()}) == 1
    # The first has a parent all the same, that nobody exports: it gives the trace its id.
    assert produced.parent is not None
    assert produced.parent.is_remote
    assert produced.parent.span_id not in {context_of(span)[1] for span in named.values()}
    assert not any(span.links for span in named.values())
    assert handled.parent is not None
    assert handled.parent.span_id == context_of(produced)[1]
    assert answered.parent is not None
    assert answered.parent.span_id == context_of(handled)[1]
    # Nobody handles the second event here: the third is a child of what its header says.
    assert followed.parent is not None
    assert followed.parent.span_id == context_of(answered)[1]
    for event, span in ((first, produced), (second, answered), (third, followed)):
        assert event.traceparent is not None
        assert event.traceparent.startswith("00-{:032x}-{:016x}-0".format(*context_of(span)))
        assert trace_context(event).trace_flags.sampled
    assert (produced.kind, handled.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(produced.attributes or {}) == {
        "messaging.system": "nats",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": "RL_r",
        "cloudevents.event_type": "sample.completed",
        "messaging.message.conversation_id": SAMPLE,
    }
    attributes = dict(handled.attributes or {})
    assert attributes["messaging.consumer.group.name"] == "grader"
    assert attributes["messaging.message.id"] == attributes["cloudevents.event_id"] == first.id
    assert attributes["messaging.message.conversation_id"] == SAMPLE
    assert (attributes["messaging.operation.type"], attributes["cloudevents.event_source"]) == (
        "process",
        "test",
    )


def test_several_publishes_at_once_are_siblings(spans: InMemorySpanExporter) -> None:
    cause = publish(COMPLETED, None)
    spans.clear()
    with publishing(ACCEPTED, "r", cause), publishing(SHAPED, "r", cause):
        assert not trace.get_current_span().get_span_context().is_valid
    parents = [span.parent.span_id for span in spans.get_finished_spans() if span.parent]
    assert parents == [trace_context(cause).span_id] * 2


def test_what_another_trace_causes_begins_in_its_own_with_a_link(spans: InMemorySpanExporter) -> None:
    started = publish(STARTED.fact, None)
    with handling(started, "dispatcher"):
        one, other = publish(DISPATCHED, started), publish(OTHER_DISPATCHED, started)
    named = {span.name: span for span in spans.get_finished_spans()}
    assert len({trace_of(started), trace_of(one), trace_of(other)}) == 3
    assert context_of(named["process run.started"])[0] == trace_of(started)
    dispatched = [span for span in spans.get_finished_spans() if span.name == "publish sequence.dispatched"]
    for event, span in zip((one, other), dispatched, strict=True):
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.is_remote) == (trace_of(event), True)
        assert [link.context for link in span.links] == [trace_context(started)]


def test_sequences_of_a_sample_share_a_trace_whoever_dispatches_them(spans: InMemorySpanExporter) -> None:
    first, second, *_ = (
        e.fact for e in demo_events() if e.fact.type == "sequence.dispatched" and e.correlation == SAMPLE
    )
    one, two = publish(first, event_of("policy.published", STEP)), publish(second, STARTED)
    again = publish(first, None)
    assert trace_of(one) == trace_of(two) == trace_of(again)
    assert len({event.traceparent for event in (one, two, again)}) == 3, "each is a span of its own"
    assert trace_of(publish(first, None, run="r2")) != trace_of(one)


def test_a_step_is_a_trace_that_links_to_a_sample(spans: InMemorySpanExporter) -> None:
    shaped = publish(SHAPED, None)
    yielded = publish(event_of("batch.yielded", STEP).fact, shaped)
    chain = [yielded]
    for type_ in ("window.packed", "batch.consumed", "step.trained", "policy.published"):
        chain.append(publish(event_of(type_, STEP).fact, chain[-1]))
    assert {trace_of(event) for event in chain} == {trace_of(yielded)}
    assert trace_of(yielded) != trace_of(shaped)
    _, first, *others = spans.get_finished_spans()
    assert [link.context for link in first.links] == [trace_context(shaped)]
    for before, span in zip(chain, others, strict=False):
        assert span.parent is not None
        assert (span.parent.span_id, len(span.links)) == (trace_context(before).span_id, 0)


def test_a_span_of_the_own_trace_stays_the_parent_of_what_another_trace_causes(
    spans: InMemorySpanExporter,
) -> None:
    completed = publish(COMPLETED, None)
    with handling(completed, "grader"):
        publish(GRADED, STARTED)
    _, graded, handled = spans.get_finished_spans()
    assert graded.parent is not None
    assert (graded.parent.trace_id, graded.parent.span_id) == context_of(handled)
    assert [link.context for link in graded.links] == [trace_context(STARTED)]


def test_work_on_another_trace_does_not_capture_a_publish(spans: InMemorySpanExporter) -> None:
    completed, other = publish(COMPLETED, None), publish(OTHER_DISPATCHED, None)
    with handling(other, "agent-loop"):
        caused, begun = publish(GRADED, completed), publish(DISPATCHED, None)
    assert trace_of(caused) == trace_of(begun) == trace_of(completed) != trace_of(other)
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_sampler_by_trace_id_keeps_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    for number in range(64):
        events: list[Event] = []
        for _ in range(2):  # Two processes, of which each has a sampler.
            provider = TracerProvider(sampler=TraceIdRatioBased(0.5))
            monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("packtrain"))
            completed = COMPLETED.model_copy(update={"sample": f"arithmetic-{number:06d}"})
            events.append(publish(completed, STARTED))
            events.append(
                publish(GRADED.model_copy(update={"sample": f"arithmetic-{number:06d}"}), events[-1])
            )
        flags = {trace_context(event).trace_flags.sampled for event in events}
        assert len(flags) == 1
        kept.append(flags.pop())
    assert 16 < sum(kept) < 48


def test_a_publish_or_a_handler_that_fails_says_so_in_its_span(spans: InMemorySpanExporter) -> None:
    cause = publish(COMPLETED, None)
    spans.clear()
    with pytest.raises(ConnectionError), handling(cause, "grader"), publishing(GRADED, "r", cause):
        raise ConnectionError("the broker is away")
    produced, handled = spans.get_finished_spans()
    assert produced.status.status_code is handled.status.status_code is StatusCode.ERROR
    assert [event.name for event in (*produced.events, *handled.events)] == ["exception", "exception"]


def test_what_the_sdk_does_not_sample_stays_unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("packtrain"))
    event = publish(COMPLETED, None)
    assert re.fullmatch(W3C, event.traceparent or "")
    assert not trace_context(event).trace_flags.sampled
    monkeypatch.undo()
    assert publish(GRADED, event).traceparent == event.traceparent


async def test_without_an_sdk_a_sample_in_the_log_has_one_trace_id(
    broker: Broker, log: Log, run_name: str
) -> None:
    root = publish(COMPLETED, STARTED, run_name)
    assert re.fullmatch(W3C, root.traceparent or "")
    with handling(root, "grader"):
        child = publish(GRADED, root, run_name)
    assert child.traceparent == root.traceparent, "passed on: there is no span of ours in between"
    other = await Log.connect(broker, run_name, "other")
    assert (await other.publish(DISPATCHED, None)).event.traceparent == root.traceparent
    await other.close()
    cause = replace(event_of("sample.completed", SAMPLE), traceparent=GOOD)
    stored = (await log.publish(GRADED, cause)).event
    read = await log.last(GRADED.type, GRADED.scope(), GRADED.id())
    assert read == stored
    assert stored.traceparent == GOOD, "within a sample, a trace that an outsider began goes on"


async def test_what_the_log_stores_is_linked_to_its_spans(log: Log, spans: InMemorySpanExporter) -> None:
    cause = (await log.publish(COMPLETED)).event
    with handling(cause, "grader"):
        await log.publish_all([(GRADED, cause), (SHAPED, cause), (OTHER_DISPATCHED, cause)])
    named = {span.name: span for span in spans.get_finished_spans()}
    handled = context_of(named["process sample.completed"])
    for fact in (GRADED, SHAPED, OTHER_DISPATCHED):
        stored, span = await log.last(fact.type, fact.scope(), fact.id()), named[f"publish {fact.type}"]
        assert stored is not None
        assert (trace_context(stored).trace_id, trace_context(stored).span_id) == context_of(span)
        assert span.parent is not None
        own = fact is not OTHER_DISPATCHED
        assert ((span.parent.trace_id, span.parent.span_id) == handled) == own
        assert [link.context for link in span.links] == ([] if own else [trace_context(cause)])


async def test_the_spans_of_a_burst_last_until_it_is_stored(
    log: Log, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, ended_before = log._client.request, []

    async def watch(*args, **kwargs):
        answer = await request(*args, **kwargs)
        ended_before.extend(span.name for span in spans.get_finished_spans())
        return answer

    monkeypatch.setattr(log._client, "request", watch)
    await log.publish_all([(GRADED, STARTED), (SHAPED, STARTED)])
    assert ended_before == []
    assert len(spans.get_finished_spans()) == 2
    spans.clear()
    with pytest.raises(BodyTooLarge):
        await log.publish_all(
            [(ACCEPTED, None), (GRADED.model_copy(update={"rewards": (0.5,) * 40_000}), None)]
        )
    assert [span.status.status_code for span in spans.get_finished_spans()] == [StatusCode.ERROR] * 2


def test_an_event_of_before_there_were_traces_has_one_that_follows_from_its_id(
    spans: InMemorySpanExporter,
) -> None:
    assert STARTED.traceparent is None
    with handling(STARTED, "dispatcher"):
        publish(DISPATCHED, STARTED)
    dispatched, handled = spans.get_finished_spans()
    assert context_of(handled)[0] == dispatched.links[0].context.trace_id == int(STARTED.id, 16)


@given(header=st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?"))
@example("")
@example("00-" + "0" * 32 + "-00f067aa0ba902b7-01")
@example("00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01")
@example("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
@example(GOOD + "-more")
@example(GOOD.upper())
@example(GOOD + "\n")
@example(GOOD + " " * 100_000)
@example("00-" + "a" * 1_000_000)
@example("٠٠-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
def test_a_hostile_header_is_never_raised_or_passed_on(header: str) -> None:
    cause = replace(event_of("sample.completed", SAMPLE), traceparent=header)
    with handling(cause, "grader"):
        inside = publish(GRADED, cause)
    outside, linked = publish(GRADED, cause), publish(OTHER_DISPATCHED, cause)
    own = trace_of(publish(GRADED, None))
    for event in (inside, outside):
        assert re.fullmatch(W3C, event.traceparent or "")
        assert trace_of(event) == own or f"{trace_of(event):032x}" == header[3:35]
    assert linked.traceparent == publish(OTHER_DISPATCHED, None).traceparent


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "ff" + GOOD[2:],
        GOOD + "-more",
        GOOD.upper(),
        GOOD + "\n",
    ],
)
def test_a_malformed_header_counts_as_none(bad: str) -> None:
    cause = event_of("sample.completed", SAMPLE)
    assert trace_context(replace(cause, traceparent=bad)) == trace_context(cause)
    assert publish(GRADED, replace(cause, traceparent=bad)).traceparent == publish(GRADED, None).traceparent
    assert publish(GRADED, replace(cause, traceparent=GOOD)).traceparent == GOOD
    newer = replace(cause, traceparent="01" + GOOD[2:] + "-what.ever")
    assert publish(GRADED, newer).traceparent == GOOD, "a newer version is read as far as this one goes"


@given(ids=st.lists(st.tuples(NAMES, st.none() | NAMES), min_size=2, max_size=8, unique=True))
@example(ids=[("r", None), ("r", "r"), ("rr", None), ("r-r", None), ("r", "-r")])
def test_every_run_and_correlation_has_a_trace_of_its_own(ids: list[tuple[str, str | None]]) -> None:
    events = [
        publish(
            STARTED.fact.model_copy(update={"run": run})
            if sample is None
            else GRADED.model_copy(update={"sample": sample}),
            None,
            run,
        )
        for run, sample in ids
    ]
    assert len({trace_of(event) for event in events}) == len(ids)
    assert all(re.fullmatch(W3C, event.traceparent or "") for event in events)


def test_the_trace_is_the_same_in_every_process() -> None:
    """Written down: a process of another version derives it too."""
    assert (
        publish(RunStarted(run="r", config={}), None).traceparent
        == "00-98d9df3e3e2eb9475728729c8b2011d0-347b41607770ee76-01"
    )
    assert publish(GRADED, None).traceparent == "00-864781a867281b43f52474bb8a9e452b-21c41f93bed9d258-01"


def test_a_process_that_sets_its_provider_after_the_import_has_spans() -> None:
    program = """
from pipeline.log.tracing import publishing
from schemas.facts import RunStarted
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)
with publishing(RunStarted(run="r", config={}), "r", None):
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert '"name": "publish run.started"' in done.stdout


def test_the_log_needs_no_sdk() -> None:
    program = "import sys, pipeline.log, pipeline.log.tracing; print(any('opentelemetry.sdk' in m for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
