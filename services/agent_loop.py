"""The agent-loop host: the model side of many sequences at once.

Promises:
- a sequence that has finished or failed is never run again: whatever is delivered twice, one `sequence.finished` or
  `sequence.failed` stands;
- an attempt ends in one verdict: the harness's, or ours when none comes within the budget (infra, `harness_timeout`);
- an infra failure is a new attempt, up to `agent_loop.max_attempts`, then `sequence.failed`; it is never a reward. Attempts
  are counted in the log: a delivery that came to none (the broker restarted, its host was told to stop) uses up none;
- the payload is in the store before `sequence.finished` is in the log, and the dispatch is acknowledged after both.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from pipeline.capture.renderer import ChatMLRenderer
from pipeline.capture.secret import load_run_key
from pipeline.capture.server import Capture
from pipeline.capture.session import Session
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.client import EngineClient, EngineUnavailable
from pipeline.engines.policies import policy_dir
from pipeline.log import Delivery, end_tasks, serve_work
from pipeline.secret_file import read_secret
from pipeline.store import ObjectExists, StoreUnavailable
from pipeline.store.keys import payload_key
from pipeline.store.payload import write_payload
from schemas.config import AgentLoop
from schemas.envelope import BodyTooLarge, Event
from schemas.facts import (
    Failure,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
)
from schemas.names import attempt_id
from schemas.payload import PayloadHeader
from services.process import Context

WORK = "agent-loop"
GRACE_S = 5.0
"""How long after the trial's budget a verdict that was given in time may still be under way."""
RETRY_S = 0.2
SHUTDOWN_S = 2.0
"""How long requests may take to end once their sessions are closed."""
_VERSION_POLL_S = 0.1
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


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to: a failure of the world, or a reward with the reason why the agent ended."""

    failure: Failure | None
    reward: float = 0.0
    termination: str = "completed"


def judge(verdict: SequenceVerified | None, *, turns: int, owed: bool, malformed: bool) -> Result:
    """The result of an attempt from the harness's verdict and what its session saw. Pure.

    `turns`: recorded turns; `owed`: whether the engine owed the agent an answer; `malformed`: whether the last turn
    held a tool call that did not parse.
    """
    if verdict is None:
        return Result(
            Failure(kind="infra", reason="harness_timeout", detail="no verdict within the trial's budget")
        )
    if verdict.failure is not None:
        return Result(verdict.failure)
    if verdict.reward is None:
        return Result(
            Failure(
                kind="infra", reason="missing_reward", detail="the verdict has neither reward nor failure"
            )
        )
    if verdict.termination == "agent_timeout" and owed:
        # Turns are bounded in tokens, so an answer that is still owed is the engine's slowness, not the policy's.
        return Result(
            Failure(kind="infra", reason="engine_timeout", detail="the agent ran out of time in a model call")
        )
    if turns == 0:
        return Result(
            Failure(
                kind="infra",
                reason="nothing_sampled",
                detail=f"the agent ended ({verdict.termination}) without a turn",
            )
        )
    ended = "malformed" if malformed and verdict.termination == "completed" else verdict.termination
    return Result(None, verdict.reward, ended)


def max_deliver(config: AgentLoop) -> int:
    """Deliveries of a dispatch. The limit of attempts comes first where attempts are made, and says more."""
    return config.max_attempts + _MORE_DELIVERIES


class Verdicts:
    """Hands each `sequence.verified` that is addressed to this host to whoever waits for it."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[SequenceVerified]] = {}

    def expect(self, attempt: str) -> asyncio.Future[SequenceVerified]:
        """Resolves when the attempt's verdict arrives; `forget` it in the end."""
        future: asyncio.Future[SequenceVerified] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = future
        return future

    def forget(self, attempt: str) -> None:
        self._waiting.pop(attempt, None)

    def arrived(self, fact: SequenceVerified) -> None:
        future = self._waiting.get(fact.id())
        if future is not None and not future.done():
            future.set_result(fact)


class Host:
    def __init__(
        self, ctx: Context, name: str, base_url: str, capture: Capture, engine: EngineClient
    ) -> None:
        self._ctx = ctx
        self._config = ctx.config.agent_loop
        self._name = name
        self._base_url = base_url
        self._capture = capture
        self._engine = engine
        self._verdicts = Verdicts()
        self._version = 0
        self._asking = asyncio.Lock()

    async def follow_verdicts(self) -> None:
        """Runs until cancelled. The host's name is new with each process, so all verdicts under it are ours."""
        async for event in self._ctx.log.subscribe("sequence.verified", source=self._name):
            if isinstance(event.fact, SequenceVerified):
                self._verdicts.arrived(event.fact)

    async def handle(self, delivery: Delivery) -> None:
        """One delivery of `sequence.dispatched`."""
        event = delivery.event
        fact = event.fact
        assert isinstance(fact, SequenceDispatched)
        if await self._decided(fact):
            await delivery.ack()
            return
        made, newest = await self._made(fact)
        if newest is not None and made >= self._config.max_attempts:
            if (left := _left(newest)) > 0:
                # Its host may live, and only have been out of the broker's sight: what it finishes is not to be lost.
                await delivery.retry(left)
                return
            lost = Failure(
                kind="infra", reason="attempts_lost", detail="its hosts were lost or handed it back each time"
            )
            await self._fail(event, fact, lost)
            await delivery.ack()
            return
        result = await self._attempt(event, fact, made + 1)
        if result is None:
            await delivery.ack()
            return
        self._ctx.logger.info(
            "attempt failed: %s (%s)", result.reason, result.detail, extra={"sequence": fact.sequence}
        )
        made, _ = await self._made(fact)
        if made >= self._config.max_attempts or delivery.attempt >= max_deliver(self._config):
            await self._fail(event, fact, result)
            await delivery.ack()
        else:
            await delivery.retry(RETRY_S)

    async def last_word(self, delivery: Delivery, reason: str) -> None:
        """A dispatch that becomes a dead letter is a failed sequence: its group does not wait for it."""
        event = delivery.event
        fact = event.fact
        assert isinstance(fact, SequenceDispatched)
        if not await self._decided(fact):
            lost = Failure(kind="infra", reason="dead_letter", detail=reason)
            await self._fail(event, fact, lost)

    async def _decided(self, fact: SequenceDispatched) -> bool:
        for type_ in (SequenceFinished.type, SequenceFailed.type):
            if await self._ctx.log.last(type_, fact.scope(), fact.sequence) is not None:
                return True
        return False

    async def _made(self, fact: SequenceDispatched) -> tuple[int, Event | None]:
        """(attempts at the sequence so far, the newest's `sequence.opened`): their numbers have no gaps."""
        made, newest = 0, None
        while True:
            name = attempt_id(fact.sequence, made + 1)
            opened = await self._ctx.log.last(SequenceOpened.type, fact.pool, name)
            if opened is None:
                return made, newest
            made, newest = made + 1, opened

    async def _fail(self, cause: Event, fact: SequenceDispatched, failure: Failure) -> None:
        made, _ = await self._made(fact)
        failed = SequenceFailed(
            source=fact.source,
            sample=fact.sample,
            sequence=fact.sequence,
            attempts=made,
            failure=failure,
        )
        await self._ctx.log.publish(failed, cause)

    async def _attempt(self, event: Event, fact: SequenceDispatched, first: int) -> Failure | None:
        """Runs one attempt to its `sequence.finished`; the failure if it came to none."""
        deadline = time.monotonic() + self._config.trial_budget_s
        if not await self._has_version(fact.min_policy_version, deadline):
            detail = f"the engine stayed below policy version {fact.min_policy_version} for {self._config.trial_budget_s:g} s"
            return Failure(kind="infra", reason="policy_version", detail=detail)
        async with self._opened(event, fact, first, deadline) as attempt:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic()) + GRACE_S):
                    verdict = await attempt.verdict
            except TimeoutError:
                verdict = None
            session = attempt.session
            owed = session.owed
            await self._capture.close(session)
            malformed = session.last is not None and session.last.malformed > 0
            result = judge(verdict, turns=session.turns, owed=owed, malformed=malformed)
            return result.failure or await self._finish(attempt, result)

    async def _has_version(self, wanted: int, deadline: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while self._version < wanted:
                    # One tenant asks for all that wait.
                    async with self._asking:
                        if self._version < wanted:
                            await self._ask_version(wanted)
        except TimeoutError:
            return False
        return True

    async def _ask_version(self, wanted: int) -> None:
        try:
            self._version = await self._engine.version()
        except EngineUnavailable as error:
            self._ctx.logger.info("waiting for the engine: %s", error)
        if self._version < wanted:
            await asyncio.sleep(_VERSION_POLL_S)

    @contextlib.asynccontextmanager
    async def _opened(
        self, event: Event, fact: SequenceDispatched, first: int, deadline: float
    ) -> AsyncIterator[Attempt]:
        """The session and its `sequence.opened`, under the first number from `first` on that nobody takes before."""
        behaviour = self._ctx.config.source(fact.source).behaviour
        number = first
        while True:
            name = attempt_id(fact.sequence, number)
            session = self._capture.open(name, behaviour)
            # Before it is published: a quick verdict may come before the broker's acknowledgement.
            verdict = self._verdicts.expect(name)
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
                    budget_s=max(0.001, deadline - time.monotonic()),
                )
                published = await self._ctx.log.publish(opened, event)
                if published.won:
                    yield Attempt(fact, number, session, published.event, verdict)
                    return
            finally:
                self._verdicts.forget(name)
                await self._capture.close(session)
            number += 1

    async def _finish(self, attempt: Attempt, result: Result) -> Failure | None:
        fact = attempt.fact
        exported = attempt.session.export()
        key = payload_key(self._ctx.run, fact.source, attempt_id(fact.sequence, attempt.number))
        try:
            payload: PayloadHeader = await write_payload(self._ctx.store, key, exported.columns)
        except StoreUnavailable as error:
            return Failure(kind="infra", reason="store_unavailable", detail=str(error)[:2000])
        except ObjectExists as error:
            return Failure(kind="infra", reason="payload_exists", detail=str(error)[:2000])
        finished = SequenceFinished(
            source=fact.source,
            sample=fact.sample,
            sequence=fact.sequence,
            attempt=attempt.number,
            reward=result.reward,
            termination=result.termination,
            turns=attempt.session.turns,
            contexts=exported.contexts,
            payload=payload,
        )
        try:
            await self._ctx.log.publish(finished, attempt.opened)
        except BodyTooLarge as error:
            return Failure(kind="infra", reason="event_too_large", detail=str(error)[:2000])
        return None


async def serve(ctx: Context) -> None:
    config = ctx.config
    run_key = load_run_key(config.agent_loop.run_key_file)
    renderer = ChatMLRenderer(PolicyTokenizer.load(policy_dir(config.engine.policy)))
    name = f"al-{ctx.index}-{secrets.token_hex(4)}"
    token_file = config.engine.token_file
    token = read_secret(token_file, "engine.token_file") if token_file else None
    async with EngineClient(config.engine.url, token, config.agent_loop.trial_budget_s) as engine:
        capture = Capture(run_key, renderer, engine, config.engine.max_context)
        runner = capture.runner(SHUTDOWN_S)
        await runner.setup()
        try:
            listening = _listen(config.agent_loop.bind)
            await web.SockSite(runner, listening).start()
            host = Host(
                ctx,
                name,
                _base_url(config.agent_loop.advertise or config.agent_loop.bind, listening),
                capture,
                engine,
            )
            work = await ctx.log.work(
                WORK,
                SequenceDispatched.type,
                ack_wait_s=config.agent_loop.ack_wait_s,
                max_deliver=max_deliver(config.agent_loop),
            )
            verdicts = asyncio.create_task(host.follow_verdicts())
            serving = asyncio.create_task(
                serve_work(work, config.agent_loop.tenants, host.handle, ctx.stop, host.last_word)
            )
            try:
                # Without its verdicts the host is deaf: its end, by an error, is the service's.
                done, _ = await asyncio.wait({verdicts, serving}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end_tasks((serving, verdicts))
        finally:
            await runner.cleanup()


def _left(opened: Event) -> float:
    """Seconds within which the attempt's host, if it lives, comes to a result."""
    assert isinstance(opened.fact, SequenceOpened)
    return opened.fact.budget_s + GRACE_S - (datetime.now(UTC) - opened.time).total_seconds()


def _listen(address: str) -> socket.socket:
    """A listening socket on a free port of the address; raises OSError that names `agent_loop.bind`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise OSError(
            f"agent_loop.bind {address!r}: {error.strerror or error}; use an address of this machine"
        ) from error


def _base_url(address: str, listening: socket.socket) -> str:
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{listening.getsockname()[1]}"
