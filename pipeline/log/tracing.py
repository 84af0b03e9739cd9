"""W3C trace context of events, joined to OpenTelemetry by its API alone: whoever installs an SDK sees spans.

Promises:
- a trace is the life of a sample, or of a step (`Fact.correlation`; the facts of the run itself are one more): it ends, so
  that a tracing back end can hold it, whatever the length of the run;
- its trace id follows from the run and the correlation, so whatever process begins it, with an SDK or without, the events
  of a correlation share it; an event that another trace caused has a link to its cause instead of a parent there;
- within a trace an event is a child of its cause, whose `traceparent` is taken as it is, also with another trace id; a
  publisher without an SDK passes on what it got, as W3C Trace Context says;
- what stands in a `traceparent` header came from outside: a malformed one is ignored, never raised and never passed on.

Attributes are those of OpenTelemetry's semantic conventions for messaging and CloudEvents.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    ProxyTracer,
    ProxyTracerProvider,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
)

from schemas.envelope import Event
from schemas.facts import Fact
from schemas.names import stream_name

_TRACER = trace.get_tracer("packtrain")
"""Stands for the provider's own as soon as the process has set one."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]{0,400})?")
_LONGEST = 512
_UUID = re.compile(r"[0-9a-f]{32}")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KNOWN_FLAGS = 0x03
"""Sampled, and random trace id. W3C: whoever writes version 00 sets the others to 0."""


@contextmanager
def publishing(fact: Fact, run: str, cause: Event | None) -> Generator[str]:
    """A PRODUCER span around the publish of the fact, not made the current one; gives the traceparent for its event's header.

    Its parent is the current span, if that is of the same trace; or else the cause, if that has the fact's correlation
    and a good traceparent; or else the one that every process derives for the correlation.
    """
    correlation = fact.correlation()
    header = cause.traceparent if cause is not None and cause.correlation == correlation else None
    # None that is longer is good, and what is remembered must not be anybody's to fill.
    header = header if header is None or len(header) <= _LONGEST else None
    if _silent():
        yield _passed_on(header, run, correlation)
        return
    stated = _read(header)
    attributes = {
        "messaging.system": "nats",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": stream_name(run),
        "cloudevents.event_type": fact.type,
    }
    if correlation is not None:
        attributes["messaging.message.conversation_id"] = correlation
    parent = _within(stated or _root(run, correlation))
    links = None if stated or cause is None else [Link(trace_context(cause))]
    span = _TRACER.start_span(f"publish {fact.type}", parent, SpanKind.PRODUCER, attributes, links)
    try:
        yield _text(span.get_span_context())
    except Exception as error:
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        span.end()


@contextmanager
def handling(event: Event, consumer: str) -> Generator[None]:
    """A CONSUMER span around what `consumer` does about the event, and the current one meanwhile."""
    attributes = {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.consumer.group.name": consumer,
        "messaging.message.id": event.id,
        "cloudevents.event_id": event.id,
        "cloudevents.event_type": event.fact.type,
        "cloudevents.event_source": event.producer,
        "cloudevents.event_subject": event.fact.id(),
    }
    if event.correlation is not None:
        attributes["messaging.message.conversation_id"] = event.correlation
    span = _TRACER.start_span(
        f"process {event.fact.type}", _within(trace_context(event)), SpanKind.CONSUMER, attributes
    )
    with trace.use_span(span, end_on_exit=True):
        yield


def trace_context(event: Event) -> SpanContext:
    """The event's place in its trace: what its traceparent says or, without a good one, what follows from its id."""
    # Our ids are UUIDs: such a trace is found by the id of the event that it begins with.
    return _read(event.traceparent) or _derived(event.id, event.id if _UUID.fullmatch(event.id) else None)


@functools.lru_cache(maxsize=4096)
def _passed_on(header: str | None, run: str, correlation: str | None) -> str:
    """The traceparent of an event where nobody makes spans: one text for nearly all of a correlation."""
    return _text(_read(header) or _root(run, correlation))


def _read(header: str | None) -> SpanContext | None:
    """What a traceparent says; None: there is none, or a malformed one."""
    found = _TRACEPARENT.fullmatch(header or "")
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    whole = version != "ff" and (version != "00" or more is None)
    if not (whole and int(trace_id, 16) and int(span_id, 16)):
        return None
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16) & _KNOWN_FLAGS))


def _silent() -> bool:
    """Whether there is no SDK, so that a span would be nothing but its parent: to make one takes as long as all else that
    we do about a publish."""
    return isinstance(_TRACER, ProxyTracer) and isinstance(trace.get_tracer_provider(), ProxyTracerProvider)


def _root(run: str, correlation: str | None) -> SpanContext:
    """The parent of the first spans of a correlation: no span of anybody's, but the same in every process."""
    # Neither may hold a zero byte or be empty (`schemas.names`): no two pairs are one text.
    return _derived(f"{run}\0{correlation or ''}")


def _derived(text: str, trace_id: str | None = None) -> SpanContext:
    """A remote parent that follows from a text, sampled: whether a trace is kept is the sampler's to say, by its id."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=24).digest()
    trace_id = trace_id or digest[:16].hex()
    return SpanContext(int(trace_id, 16) or 1, int.from_bytes(digest[16:]) or 1, True, _SAMPLED)


def _within(parent: SpanContext) -> Context | None:
    """The context that a child of `parent` is begun in; None: the current one, whose span is of the same trace."""
    if trace.get_current_span().get_span_context().trace_id == parent.trace_id:
        return None
    return trace.set_span_in_context(NonRecordingSpan(parent))


def _text(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
