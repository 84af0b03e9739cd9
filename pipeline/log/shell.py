"""The shell around a core: subscribe, fold, decide, publish.

Promises:
- decisions are those of the core on each prefix of the stream, so a restart, or a second process, makes the same;
- on a start in mid-run, facts that the stream shows to be decided are not published again, and those that were decided
  but never published (the process died in between) are;
- objects of a decision are in the store before its fact is in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pipeline.decision import Core, Decision
from pipeline.log.log import Log
from pipeline.log.tasks import end_tasks
from schemas.envelope import Event

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class _Waiting:
    decision: Decision
    cause: Event


async def run_core(
    log: Log, core: Core, write: Callable[[Mapping[str, bytes]], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Runs the core over the log until `stop` is set. `write` stores objects, and accepts those that exist."""
    folding = asyncio.create_task(_run(log, core, write))
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([folding, stopping], return_when=asyncio.FIRST_COMPLETED)
    await end_tasks((folding, stopping))
    if folding in done:
        folding.result()


async def _run(log: Log, core: Core, write: Callable[[Mapping[str, bytes]], Awaitable[None]]) -> None:
    head = await log.head()
    waiting: dict[str, _Waiting] = {}
    published: set[str] = set()
    # With what is no event: one of those may be the newest message of all.
    async for event in log.read():
        if isinstance(event, Event):
            subject = event.fact.subject(log.run).text
            core.fold(event)
            waiting.pop(subject, None)
            published.discard(subject)
            for decision in core.decide(event):
                decided = decision.fact.subject(log.run).text
                # The first decision on a subject stands: state moves on only when its fact comes back through the stream.
                if decided not in published:
                    waiting.setdefault(decided, _Waiting(decision, event))
        if event.seq < head:
            continue
        while waiting:
            burst = [waiting.pop(key) for key in list(waiting)[:_AT_ONCE]]
            published.update(w.decision.fact.subject(log.run).text for w in burst)
            for objects in (w.decision.objects for w in burst if w.decision.objects):
                await write(objects)
            await asyncio.gather(*(log.publish(w.decision.fact, w.cause) for w in burst))
