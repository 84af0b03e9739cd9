"""The shell around a core: subscribe, fold, decide, publish.

Promises:
- decisions are those of the core on each prefix of the stream, so a restart, or a second process, makes the same;
- on a start in mid-run, facts that the stream shows to be decided are not published again, and those that were decided
  but never published (the process died in between) are;
- objects of a decision are in the store before its fact is in the log;
- a start from a snapshot goes on as a refold would: a snapshot is taken only when everything that was decided up to its
  sequence is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pipeline.decision import Core, Decision
from pipeline.log.log import Log
from pipeline.log.patience import LogError
from pipeline.log.snapshot import Snapshots
from pipeline.log.tasks import end_tasks
from schemas.envelope import Event

_LOG = logging.getLogger("packtrain.shell")
_AT_ONCE = 256
SNAPSHOT_EVERY = 1_000
"""Messages between two snapshots, at least: so many are folded in a tenth of a second."""
_SNAPSHOT_COST = 20
"""A snapshot that takes t seconds is followed by 20 t without one: at most 5 % of the time goes into them."""

Write = Callable[[Mapping[str, bytes]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    decision: Decision
    cause: Event


async def run_core(
    log: Log,
    core: Core,
    write: Write,
    stop: asyncio.Event,
    name: str = "",
    caught_up: Callable[[], None] = lambda: None,
) -> None:
    """Runs a fresh core over the log until `stop` is set. `write` stores objects, and accepts those that exist.

    `name`: of the service, whose snapshots are used and made; empty: none. `caught_up` is called once, when it has folded what
    was in the log as it began, and all that it decided on is published. Raises LogError when the log has lost its
    beginning and no snapshot covers it.
    """
    shell = _Shell(log, core, write, Snapshots(log, name, core.STATE_VERSION) if name else None, caught_up)
    folding = asyncio.create_task(shell.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([folding, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks((folding, stopping))
    if folding in done:
        folding.result()


class _Shell:
    def __init__(
        self,
        log: Log,
        core: Core,
        write: Write,
        snapshots: Snapshots | None,
        caught_up: Callable[[], None],
    ) -> None:
        self.log = log
        self.core = core
        self.write = write
        self.snapshots = snapshots
        self.caught_up = caught_up
        self.waiting: dict[str, _Waiting] = {}
        # Subjects of what is published and has not come back through the stream.
        self.published: set[str] = set()
        self.kept = 0
        self.next_snapshot = 0.0

    async def run(self) -> None:
        await self._restore()
        head = await self.log.head()
        behind = self.kept < head
        if not behind:
            self.caught_up()
        # With what is no event: one of those may be the newest message of all.
        async for event in self.log.read(first=self.kept + 1):
            if isinstance(event, Event):
                self._fold(event)
            if event.seq < head:
                continue
            while self.waiting:
                await self._publish([self.waiting.pop(key) for key in list(self.waiting)[:_AT_ONCE]])
            await self._keep(event.seq)
            if behind:
                behind = False
                self.caught_up()

    def _fold(self, event: Event) -> None:
        subject = event.fact.subject(self.log.run).text
        self.core.fold(event)
        self.waiting.pop(subject, None)
        self.published.discard(subject)
        for decision in self.core.decide(event):
            decided = decision.fact.subject(self.log.run).text
            # The first decision on a subject stands: state moves on only when its fact comes back through the stream.
            if decided not in self.published:
                self.waiting.setdefault(decided, _Waiting(decision, event))

    async def _publish(self, burst: list[_Waiting]) -> None:
        self.published.update(w.decision.fact.subject(self.log.run).text for w in burst)
        for objects in (w.decision.objects for w in burst if w.decision.objects):
            await self.write(objects)
        await self.log.publish_all([(w.decision.fact, w.cause) for w in burst])

    async def _restore(self) -> None:
        snapshot = await self.snapshots.load() if self.snapshots is not None else None
        if snapshot is not None:
            self.core.load(snapshot.state["core"])
            self.published = set(snapshot.state["published"])
            self.kept = snapshot.seq
            _LOG.info("starts from a snapshot at %d", snapshot.seq)
        first = (await self.log.info()).state.first_seq
        if first > self.kept + 1:
            raise LogError(
                f"the log of run {self.log.run} begins at message {first}, and what was before is needed from {self.kept + 1} on: "
                "retention removed it (broker.max_age_s); a run must be shorter than that"
            )

    async def _keep(self, seq: int) -> None:
        now = time.monotonic()
        if self.snapshots is None or seq - self.kept < SNAPSHOT_EVERY or now < self.next_snapshot:
            return
        await self.snapshots.save(seq, {"core": self.core.dump(), "published": sorted(self.published)})
        self.kept = seq
        self.next_snapshot = time.monotonic() + _SNAPSHOT_COST * (time.monotonic() - now)
