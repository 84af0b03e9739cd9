"""The agent-loop host: the model side of many sequences at once.

Promises:
- a sequence that has finished or failed is never run again: whatever is delivered twice, one `sequence.finished` or
  `sequence.failed` stands;
- an attempt ends in one verdict: the harness's, or ours when none comes in time (infra, `harness_timeout`): within its
  budget, which counts from when a harness host takes it, and `agent_loop.queue_s` before that;
- no attempt is opened while the engine is away: it waits, however long that takes, and no attempt is counted;
- an infra failure is a new attempt, up to `agent_loop.max_attempts`, then `sequence.failed`; it is never a reward. Attempts
  are counted in the log: a delivery that came to none (the broker restarted, its host was told to stop) uses up none;
- the payload, and the images that it shows, are in the store before `sequence.finished` is in the log, and the dispatch is acknowledged after both;
- an attempt whose host died is finished from its journal when its verdict stands; a sequence that fails keeps the tokens
  of its last attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from nats.errors import Error as NatsError

from pipeline.capture.export import Export, export
from pipeline.capture.journal import HostJournal
from pipeline.capture.recovery import Recovered, Recovery
from pipeline.capture.rules import Rules
from pipeline.capture.server import Capture
from pipeline.capture.session import Session
from pipeline.capture.uploads import Uploads
from pipeline.engines.base import Engine
from pipeline.log import Delivery
from pipeline.signal.rules import NO_RULES, Judge
from schemas.config import AgentLoop
from schemas.envelope import Event
from schemas.facts import (
    Failure,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
)
from schemas.names import attempt_id
from services.agent_loop.ending import Ending
from services.agent_loop.judge import Result, judge, judge_recovered
from services.agent_loop.readiness import Readiness
from services.agent_loop.verdicts import Verdicts
from services.process import Context

GRACE_S = 5.0
"""How long after the trial's budget a verdict that was given in time may still be under way."""
AWAY_S = 1.0
"""How long the engine may have been away in a trial whose agent runs out of time, for that to be the policy's doing."""
RETRY_S = 0.2
_HAND_BACK_S = 0.5
_MORE_DELIVERIES = 5
"""Deliveries that may come to no attempt."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a dispatched sequence: its session is open and `sequence.opened` is in the log."""

    fact: SequenceDispatched
    number: int
    session: Session
    opened: Event
    verdict: asyncio.Future[SequenceVerified]


def max_deliver(config: AgentLoop) -> int:
    """Deliveries of a dispatch. The limit of attempts comes first where attempts are made, and says more."""
    return config.max_attempts + _MORE_DELIVERIES


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that came to nothing: why, and what it had sampled."""

    failure: Failure
    attempt: int = 0
    exported: Export | None = None


def last_tokens(failed: Failed, before: Failed | None) -> Failed:
    """A failed attempt, with the tokens of the one `before` it when it sampled none itself."""
    if before is None or (failed.exported is not None and failed.exported.contexts):
        return failed
    return replace(failed, attempt=before.attempt, exported=before.exported)


class Host:
    def __init__(
        self,
        ctx: Context,
        name: str,
        base_url: str,
        capture: Capture,
        engine: Engine,
        uploads: Uploads,
        rules: Mapping[str, Rules] | None = None,
        journal: HostJournal | None = None,
        recovery: Recovery | None = None,
        judges: Mapping[str, Judge] | None = None,
    ) -> None:
        """`rules`: by pool; `judges`: by source."""
        self._ctx = ctx
        self._config = ctx.config.agent_loop
        self._name = name
        self._base_url = base_url
        self._capture = capture
        self._rules = rules or {}
        self._journal = journal
        self._recovery = recovery
        self._judges = judges or {}
        self._ending = Ending(ctx, uploads)
        self._verdicts = Verdicts()
        self._readiness = Readiness(engine, ctx.logger)
        # A dead host's journal may take seconds to read, and threads are few: one of them, not one a tenant.
        self._collecting = asyncio.Lock()

    async def follow_verdicts(self) -> None:
        """Runs until cancelled. The host's name is new with each process, so all verdicts under it are ours."""
        async for event in self._ctx.log.subscribe("sequence.verified", source=self._name):
            if isinstance(event.fact, SequenceVerified):
                self._verdicts.arrived(event.fact)

    async def handle(self, delivery: Delivery) -> None:
        """One delivery of `sequence.dispatched`."""
        try:
            await self._handle(delivery)
        except asyncio.CancelledError:
            # The host stops. Its journal is not to be collected before it is closed.
            if self._journal is not None and not delivery.settled:
                with contextlib.suppress(NatsError, OSError):
                    await delivery.retry(_HAND_BACK_S)
            raise

    async def _handle(self, delivery: Delivery) -> None:
        event = delivery.event
        fact = event.fact
        assert isinstance(fact, SequenceDispatched)
        opened = await self._opened_before(fact)
        if await self._decided(fact):
            await self._forget(opened)
            await delivery.ack()
            return
        lost = None
        if opened:
            lost = await self._collect(fact, opened[-1])
            if lost is None:
                await self._forget(opened)
                await delivery.ack()
                return
            if len(opened) >= self._config.max_attempts:
                if (left := self._left(opened[-1])) > 0 and not await self._hopeless(opened[-1]):
                    # Its host may live, and only have been out of the broker's sight: what it finishes is not to be lost.
                    await delivery.retry(left)
                    return
                await self._end(event, fact, lost, opened)
                await delivery.ack()
                return
        failed = await self._attempt(event, fact, len(opened) + 1)
        if failed is None:
            await self._forget(opened)
            await delivery.ack()
            return
        result = failed.failure
        self._ctx.logger.info(
            "attempt failed: %s (%s)", result.reason, result.detail, extra={"sequence": fact.sequence}
        )
        # Whatever it was: the next attempt looks whether the engine is there.
        self._readiness.doubt()
        opened = await self._opened_before(fact)
        if len(opened) >= self._config.max_attempts or delivery.attempt >= max_deliver(self._config):
            await self._end(event, fact, last_tokens(failed, lost), opened)
            await delivery.ack()
        else:
            await delivery.retry(RETRY_S)

    async def last_word(self, delivery: Delivery, reason: str) -> None:
        """A dispatch that becomes a dead letter is a failed sequence: its group does not wait for it."""
        event = delivery.event
        fact = event.fact
        assert isinstance(fact, SequenceDispatched)
        if not await self._decided(fact):
            failed = Failed(Failure(kind="infra", reason="dead_letter", detail=reason))
            await self._end(event, fact, failed, await self._opened_before(fact))

    async def _decided(self, fact: SequenceDispatched) -> bool:
        for type_ in (SequenceFinished.type, SequenceFailed.type):
            if await self._ctx.log.last(type_, fact.scope(), fact.sequence) is not None:
                return True
        return False

    async def _opened_before(self, fact: SequenceDispatched) -> list[Event]:
        """`sequence.opened` of the attempts so far, in order: their numbers have no gaps."""
        found: list[Event] = []
        while True:
            name = attempt_id(fact.sequence, len(found) + 1)
            opened = await self._ctx.log.last(SequenceOpened.type, fact.pool, name)
            if opened is None:
                return found
            found.append(opened)

    async def _end(
        self, cause: Event, fact: SequenceDispatched, failed: Failed, opened: Sequence[Event]
    ) -> None:
        """`opened`: of all attempts so far."""
        await self._ending.fail(cause, fact, len(opened), failed.failure, failed.attempt, failed.exported)
        await self._forget(opened)

    async def _forget(self, opened: Sequence[Event]) -> None:
        """The sequence is decided: dead hosts' journals of its attempts are needed no more."""
        if self._recovery is None:
            return
        for event in opened:
            assert isinstance(event.fact, SequenceOpened)
            if event.fact.host != self._name:
                async with self._collecting:
                    await asyncio.to_thread(self._recovery.forget, event.fact.host, event.fact.session)

    async def _collect(self, fact: SequenceDispatched, opened: Event) -> Failed | None:
        """What became of the attempt that another host opened: None when it is finished, from its host's journal."""
        assert isinstance(opened.fact, SequenceOpened)
        attempt = opened.fact.attempt
        lost = Failure(
            kind="infra", reason="attempts_lost", detail="its hosts were lost or handed it back each time"
        )
        found = await self._recovered(opened.fact)
        if found is None:
            return Failed(lost)
        source = self._ctx.config.source(fact.source)
        rules = self._judges.get(fact.source, NO_RULES)
        exported = await asyncio.to_thread(export, found.tree, source.behaviour.exclude, rules)
        stopped = any(flags & rules.stops for flags in found.tree.flags.values())
        verdict = await self._verdict(opened, found, stopped)
        result = judge_recovered(verdict, found, source.behaviour, source.effects, stopped=stopped)
        failure = result.failure
        if failure is None:
            failure = await self._ending.finish(
                opened, result.reward, result.termination, found.turns, exported
            )
        if failure is not None:
            self._ctx.logger.info(
                "attempt of a lost host not finished: %s (%s)", failure.reason, failure.detail,
                extra={"sequence": fact.sequence},
            )  # fmt: skip
            return Failed(lost if verdict is None else failure, attempt, exported)
        self._ctx.logger.info("finished from a lost host's journal", extra={"sequence": fact.sequence})
        return None

    async def _recovered(self, opened: SequenceOpened) -> Recovered | None:
        if self._recovery is None:
            return None
        async with self._collecting:
            return await asyncio.to_thread(self._recovery.session, opened.host, opened.session)

    async def _hopeless(self, opened: Event) -> bool:
        """Whether it is known that the attempt's host finishes it no more: it is dead, or the verdict is a failure."""
        fact = opened.fact
        assert isinstance(fact, SequenceOpened)
        verdict = await self._ctx.log.last(SequenceVerified.type, fact.host, fact.id())
        if verdict is not None and isinstance(verdict.fact, SequenceVerified) and verdict.fact.failure:
            return True
        if self._recovery is None:
            return False
        async with self._collecting:
            return await asyncio.to_thread(self._recovery.dead, fact.host)

    async def _verdict(self, opened: Event, found: Recovered, stopped: bool) -> SequenceVerified | None:
        """The attempt's verdict, once it is there: its host may have died while the agent's work was verified. An agent
        that was still at work will miss an answer, so its verdict is not waited for, unless a rule had `stopped` it."""
        fact = opened.fact
        assert isinstance(fact, SequenceOpened)
        last = await self._ctx.log.last(SequenceVerified.type, fact.host, fact.id())
        ended = stopped or found.finish not in (None, "tool_calls")
        if last is None and found.whole and ended:
            with contextlib.suppress(TimeoutError):
                # A harness host took it: its budget ends within one from now at the latest, wherever it waited before.
                async with asyncio.timeout(min(self._left(opened), fact.budget_s + GRACE_S)):
                    async for event in self._ctx.log.subscribe(
                        SequenceVerified.type, source=fact.host, start=opened.seq
                    ):
                        if event.fact.id() == fact.id():
                            last = event
                            break
        verdict = None if last is None else last.fact
        return verdict if isinstance(verdict, SequenceVerified) else None

    async def _attempt(self, event: Event, fact: SequenceDispatched, first: int) -> Failed | None:
        """Runs one attempt to its `sequence.finished`; the failure if it came to none."""
        timeouts = self._ctx.config.source(fact.source).timeouts
        budget = timeouts.trial_s or self._config.trial_budget_s
        if not await self._readiness.has_version(fact.min_policy_version, budget):
            detail = f"the engine stayed below policy version {fact.min_policy_version} for {budget:g} s"
            return Failed(Failure(kind="infra", reason="policy_version", detail=detail))
        await self._readiness.there()
        async with self._opened(event, fact, first, budget) as attempt:
            try:
                async with asyncio.timeout(self._left(attempt.opened)):
                    verdict = await attempt.verdict
            except TimeoutError:
                verdict = None
            session = attempt.session
            # An answer that came after all has cost the agent its time.
            owed = session.owed or session.away_s > AWAY_S
            await self._capture.close(session)
            malformed = session.last is not None and session.last.malformed > 0
            result = judge(
                verdict,
                turns=session.turns,
                owed=owed,
                malformed=malformed,
                refused=session.refused,
                stopped=bool(session.stopped),
                broken=session.broken,
                effects=self._ctx.config.source(fact.source).effects,
            )
            # Closed, so that nothing is added to it on the loop meanwhile.
            exported = await asyncio.to_thread(session.export)
            failure = result.failure or await self._finish(attempt, result, exported)
            return None if failure is None else Failed(failure, attempt.number, exported)

    @contextlib.asynccontextmanager
    async def _opened(
        self, event: Event, fact: SequenceDispatched, first: int, budget_s: float
    ) -> AsyncIterator[Attempt]:
        """The session and its `sequence.opened`, under the first number from `first` on that nobody takes before.

        The session lives as long as a trial may: one that begins when the queue's time is over has its budget still.
        """
        behaviour = self._ctx.config.source(fact.source).behaviour
        number = first
        while True:
            name = attempt_id(fact.sequence, number)
            rules = self._rules.get(fact.pool, Rules())
            deadline = time.monotonic() + self._config.queue_s + budget_s
            session = self._capture.open(
                name, behaviour, rules, deadline, self._journal, self._judges.get(fact.source, NO_RULES)
            )
            # Before it is published: a quick verdict may come before the broker's acknowledgement.
            verdict = self._verdicts.expect(name)
            stopped = False
            try:
                opened = SequenceOpened(
                    source=fact.source,
                    sample=fact.sample,
                    sequence=fact.sequence,
                    attempt=number,
                    pool=fact.pool,
                    task_index=fact.task_index,
                    host=self._name,
                    base_url=self._base_url,
                    session=name,
                    budget_s=budget_s,
                )
                published = await self._ctx.log.publish(opened, event)
                if published.won:
                    yield Attempt(fact, number, session, published.event, verdict)
                    return
            except asyncio.CancelledError:
                stopped = True
                raise
            finally:
                self._verdicts.forget(name)
                await self._capture.close(session)
                # Decided, or to be tried anew while this host lives: a host that stops, or dies, leaves its journal.
                if self._journal is not None and not stopped:
                    self._journal.forget(name)
            number += 1

    def _left(self, opened: Event) -> float:
        """Seconds within which the attempt's host, if it lives, comes to a result."""
        assert isinstance(opened.fact, SequenceOpened)
        age = (datetime.now(UTC) - opened.time).total_seconds()
        return self._config.queue_s + opened.fact.budget_s + GRACE_S - age

    async def _finish(self, attempt: Attempt, result: Result, exported: Export) -> Failure | None:
        if exported.excluded:
            self._ctx.logger.info(
                "left out of training: %s", exported.excluded, extra={"sequence": attempt.fact.sequence}
            )
        turns = attempt.session.turns
        return await self._ending.finish(attempt.opened, result.reward, result.termination, turns, exported)
