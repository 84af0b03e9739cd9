"""A harness host: the environment side of many sequences of one pool at once.

Promises:
- an attempt gets one verdict. One that was delivered before is not run again in the same session, whose history it
  would falsify: its first host was lost, which is an infra failure;
- what one agent raises becomes its own infra failure and touches no other tenant;
- a trial, verification included, ends within the budget that `sequence.opened` gives, counted from that event's time;
- stopped by SIGTERM, it takes no more and hands back what it runs, whatever an environment is blocked in.
"""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime

from pipeline.capture.secret import session_url, without_secrets
from pipeline.harnesses.base import Harness, InfraFailure, Trial, Verdict
from pipeline.harnesses.environments.base import Environment
from pipeline.log import Delivery
from schemas.facts import Failure, SequenceOpened, SequenceVerified
from schemas.names import checked_name
from services.process import Context

VERIFY_SHARE = 0.2
"""Share of what is left of a trial's budget that is kept for verification."""


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
        left = fact.budget_s - max(0.0, (datetime.now(UTC) - delivery.event.time).total_seconds())
        if delivery.attempt > 1:
            found = _infra("harness_lost", "an earlier harness host took the trial and gave no verdict")
        elif left <= 0:
            found = _infra(
                "budget_spent", f"the trial's {fact.budget_s:g} s had passed before a host took it"
            )
        else:
            found = await self._run(fact, left)
        await self._ctx.log.publish(verified(fact, found), delivery.event)
        await delivery.ack()

    async def _run(self, fact: SequenceOpened, left: float) -> Verdict | Failure:
        try:
            async with asyncio.timeout(left):
                verdict = await self._harness.run(self._trial(fact, left))
            if not math.isfinite(verdict.reward):
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

    def _trial(self, fact: SequenceOpened, left: float) -> Trial:
        environment = self._environments.get(fact.source)
        if environment is None:
            raise InfraFailure("unknown_source", f"source {fact.source!r} is not one of pool {fact.pool!r}'s")
        return Trial(
            session_url=session_url(fact.base_url, self._run_key, fact.session),
            behaviour=self._ctx.config.source(fact.source).behaviour,
            environment=environment,
            task=environment.task(fact.task_index),
            agent_s=left * (1 - VERIFY_SHARE),
        )


def verified(fact: SequenceOpened, found: Verdict | Failure) -> SequenceVerified:
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
    )


def _infra(reason: str, detail: str) -> Failure:
    # A lone surrogate, as in an undecodable file name, has no place in an event.
    return Failure(kind="infra", reason=reason, detail=detail[:2000].encode(errors="replace").decode())
