"""One trial of a harness host: from `sequence.opened` to `sequence.verified`.

Promises:
- an attempt gets one verdict. One that was delivered before is not run again in the same session, whose history it
  would falsify: its first host was lost, which is an infra failure;
- what one agent raises becomes its own infra failure and touches no other tenant;
- a trial, verification included, ends within the budget that `sequence.opened` gives, counted from when a host takes it.
  One that waited for a host longer than the agent-loop host will wait for its verdict is refused;
- stopped by SIGTERM, it takes no more and hands back what it runs, whatever an environment is blocked in;
- the verdict says what the trial's phases took, and refers to what it left in the store, also when it failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pipeline.capture.secret import session_url, without_secrets
from pipeline.harnesses.base import Harness, InfraFailure, Phases, Trial, Verdict
from pipeline.harnesses.clock import VERIFY_SHARE
from pipeline.harnesses.environments.base import Environment
from pipeline.log import Delivery
from schemas.config import Timeouts
from schemas.facts import MAX_REWARD, Failure, SequenceOpened, SequenceVerified
from schemas.names import checked_name
from services.harness.artefacts import Stored
from services.process import Context

PHASES = ("queue", "start", "agent", "verify")
"""Whose seconds a verdict tells."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What a trial leaves beside its verdict; it grows while the trial runs, so that a failed one has it too."""

    artefacts: Stored
    took: dict[str, float]
    peak_bytes: list[int] = field(default_factory=list[int])


class Host:
    def __init__(
        self, ctx: Context, harness: Harness, environments: dict[str, Environment], run_key: bytes
    ) -> None:
        self._ctx = ctx
        self._harness = harness
        self._environments = environments
        self._run_key = run_key

    async def handle(self, delivery: Delivery) -> None:
        """One delivery of `sequence.opened`."""
        fact = delivery.event.fact
        assert isinstance(fact, SequenceOpened)
        queued = max(0.0, (datetime.now(UTC) - delivery.event.time).total_seconds())
        queue_s = self._ctx.config.agent_loop.queue_s
        left = budget_left(fact.budget_s, queue_s, queued)
        artefacts = Stored(
            self._ctx.store, self._ctx.run, fact.id(), self._run_key, fact.session, self._ctx.logger
        )
        traces = Traces(artefacts, {"queue": queued})
        if delivery.attempt > 1:
            found = _infra("harness_lost", "an earlier harness host took the trial and gave no verdict")
        elif left <= 0:
            found = _infra(
                "queue_spent",
                f"it waited {queued:.1f} s for a host: agent_loop.queue_s, {queue_s:g} s, and the budget, "
                f"{fact.budget_s:g} s, had passed; give its pool more hosts or tenants",
            )
        else:
            found = await self._run(fact, left, traces)
        await self._ctx.log.publish(verified(fact, found, traces), delivery.event)
        await delivery.ack()

    async def _run(self, fact: SequenceOpened, left: float, traces: Traces) -> Verdict | Failure:
        try:
            trial = self._trial(fact, left, traces)
            async with asyncio.timeout(left):
                verdict = await self._harness.run(trial)
            if not abs(verdict.reward) <= MAX_REWARD:
                return _infra("bad_reward", f"the harness gave the reward {verdict.reward}")
            checked_name(verdict.termination, "the termination that the harness gave")
            return verdict
        except TimeoutError:
            return _infra("harness_timeout", f"no verdict within {left:.1f} s")
        except InfraFailure as error:
            return _infra(error.reason, without_secrets(error.detail, self._run_key, fact.session))
        except (Exception, SystemExit) as error:
            # Adapters run other people's code: whatever it raises is this trial's failure alone, also `sys.exit()`.
            said = without_secrets(f"{type(error).__name__}: {error}", self._run_key, fact.session)
            failure = _infra("harness_error", said)
            self._ctx.logger.warning("harness error: %s", failure.detail, extra={"sequence": fact.sequence})
            return failure

    def _trial(self, fact: SequenceOpened, left: float, traces: Traces) -> Trial:
        environment = self._environments.get(fact.source)
        if environment is None:
            raise InfraFailure("unknown_source", f"source {fact.source!r} is not one of pool {fact.pool!r}'s")
        source = self._ctx.config.source(fact.source)
        limits = phases(source.timeouts)
        return Trial(
            session_url=session_url(fact.base_url, self._run_key, fact.session),
            behaviour=source.behaviour,
            environment=environment,
            task=environment.task(fact.task_index),
            agent_s=agent_s(limits, left),
            name=fact.id(),
            deadline=time.monotonic() + left,
            phases=limits,
            artefacts=traces.artefacts,
            took=traces.took,
            peak_bytes=traces.peak_bytes,
        )


def budget_left(budget_s: float, queue_s: float, queued: float) -> float:
    """Seconds that a trial has which waited `queued` seconds for a host; 0 or less: none. The agent-loop host waits
    `queue_s` and `budget_s` for the verdict, and no longer."""
    return min(budget_s, queue_s + budget_s - queued)


def phases(timeouts: Timeouts) -> Phases:
    """A source's limits; without one where it gives 0."""
    return Phases(timeouts.start_s or math.inf, timeouts.agent_s or math.inf, timeouts.verify_s or math.inf)


def agent_s(limits: Phases, left: float) -> float:
    """The agent's seconds where there is no sandbox: what is left without the verifier's."""
    verify = limits.verify_s if limits.verify_s < math.inf else VERIFY_SHARE * left
    return min(limits.agent_s, left - min(verify, left / 2))


def verified(fact: SequenceOpened, found: Verdict | Failure, traces: Traces) -> SequenceVerified:
    """The fact of an attempt's verdict."""
    failed = isinstance(found, Failure)
    return SequenceVerified(
        source=fact.source,
        sample=fact.sample,
        sequence=fact.sequence,
        attempt=fact.attempt,
        host=fact.host,
        reward=None if failed else found.reward,
        termination="failed" if failed else found.termination,
        failure=found if failed else None,
        artefacts=tuple(traces.artefacts.kept),
        seconds={phase: round(traces.took[phase], 3) for phase in PHASES if phase in traces.took},
        peak_bytes=max(traces.peak_bytes, default=0),
    )


def _infra(reason: str, detail: str) -> Failure:
    # A lone surrogate, as in an undecodable file name, has no place in an event.
    return Failure(kind="infra", reason=reason, detail=detail[:2000].encode(errors="replace").decode())
