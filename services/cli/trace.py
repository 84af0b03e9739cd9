"""`packtrain trace`: the causal life of a sample, a sequence or a batch as a tree, with durations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from pipeline.replay import NoSuchId, Trace, Tracer
from pipeline.replay.trace import Member, Node
from schemas.envelope import Event
from schemas.facts import RunStarted
from schemas.names import checked_name
from services.cli.embedded import LaunchError
from services.cli.events import note_skipped
from services.cli.recording import open_recording
from services.cli.where import Where


async def show(
    id_: str,
    where: Where,
    file: Path | None,
    as_json: bool,
    write: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Writes the life of `id_`. Raises BadName for an id that can be none, LaunchError for one that is not in the log."""
    checked_name(id_, "id")
    async with open_recording(where, file) as recording:
        tracer = Tracer(recording.run, id_)
        first: Event | None = None
        async for event in recording.events():
            first = first or event
            tracer.feed(event)
        try:
            trace = tracer.trace()
        except NoSuchId as error:
            raise LaunchError(f"run {recording.run}: {error.args[0]}") from error
        if as_json:
            write(orjson.dumps({"run": recording.run, "trace": trace}).decode())
        else:
            for line in lines(trace):
                write(line)
        if first is not None and not isinstance(first.fact, RunStarted):
            note(
                f"the log of run {recording.run} begins at message {first.seq}, {first.fact.type}: what was before it is gone, and "
                "samples of batches are not known without it"
            )
        if tracer.failed:
            note(f"samples of batches are not known, as the core fails: {json.dumps(tracer.failed)[:300]}")
        note_skipped(recording.skipped, note)


def lines(trace: Trace) -> Iterator[str]:
    """One line an event: message, time, seconds since its cause, type, id, what is to be said of it, who; indented under its
    cause."""
    batch = f", batch {trace.batch:06d}" if trace.batch is not None and trace.kind != "batch" else ""
    counted = f"{len(trace.nodes)} event{'' if len(trace.nodes) == 1 else 's'}"
    yield f"{trace.kind} {trace.id}{batch}: {counted} in {trace.total_s:.3f} s"
    if trace.members:
        yield f"  {'sample':<24} {'sequences':>9} {'tokens':>8} {'staleness':>9} {'in flight':>10} {'waited':>10}"
        yield from (_member(member) for member in trace.members)
    yield from (_node(node) for node in trace.nodes)


def _member(member: Member) -> str:
    return (
        f"  {member.sample:<24} {member.sequences:>9} {member.tokens:>8,} {member.staleness:>9} "
        f"{member.in_flight_s:>8.3f} s {member.waited_s:>8.3f} s"
    )


def _node(node: Node) -> str:
    after = f"+{node.after_s:.3f} s" if node.after_s is not None else ""
    cause = f"  (decided on {node.outside})" if node.outside else ""
    note = f" ({node.note})" if node.note else ""
    what = f"{'  ' * node.depth}{node.type} {node.id}{json.dumps(note)[1:-1]}"
    # Who and which cause are headers, which anybody could have written: no control character gets out.
    who = json.dumps(node.producer)[1:-1]
    return (
        f"{node.seq:>7}  {node.time:%H:%M:%S.%f}"[:-3]
        + f" {after:>12}  {what}  {who}{json.dumps(cause)[1:-1]}"
    )
