"""What a trainer says of its steps: the facts that let the samplers go on and the engines load its weights.

    async with Reports.of(config) as reports:
        first = reports.last.step + 1 if reports.last else 1
        ...                                         # train step `first` on Feed.batch(first)
        await reports.trained(first, weights=ref, optimizer=ref, loss=..., grad_norm=..., kl=..., seconds=...)

Promises:
- a step is `batch.consumed`, `step.trained` and `policy.published` in the log, in this order, each once and caused by the one
  before; what a crash left out is made up for when the next process begins;
- a step is reported once, by one trainer, after the step before it; anything else is refused before it is in the log.

Report a step when its weights and its optimizer's state are where a crash does not reach them: no step up to the last reported
one is ever handed out again.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker, RunConfig, Store
from schemas.envelope import Event
from schemas.facts import BatchConsumed, BatchYielded, PolicyPublished, StepTrained
from schemas.keys import optimizer_key, weights_key
from schemas.payload import Ref

T = TypeVar("T")


class ReportRefused(RuntimeError):
    """A report that contradicts the log."""


async def yielded(log: Log, step: int) -> tuple[Event, BatchYielded]:
    """The batch of a step. Raises ReportRefused where there is none."""
    batch = await log.last("batch.yielded", "all", f"{step:06d}")
    if batch is None or not isinstance(batch.fact, BatchYielded):
        raise ReportRefused(f"step {step} cannot have been trained: run {log.run} has yielded no such batch")
    return batch, batch.fact


async def publish_step(log: Log, batch: Event, fact: StepTrained, sequences: int) -> None:
    """The three facts of a step, on a batch of `sequences`, as `yielded` gives it. Raises ReportRefused where another trainer has
    taken the step."""
    consumed = await log.publish(
        BatchConsumed(step=fact.step, sequences=sequences, loss_tokens=fact.loss_tokens), batch
    )
    trained = await log.publish(fact, consumed.event)
    if not trained.won:
        raise ReportRefused(
            f"step {fact.step} was trained by another ({trained.event.producer}); two trainers share run {log.run}: stop one"
        )
    await publish_policy(log, trained.event)


async def publish_policy(log: Log, trained: Event) -> None:
    """`policy.published` of a `step.trained`; one that is there already stands."""
    fact = trained.fact
    assert isinstance(fact, StepTrained)
    await log.publish(PolicyPublished(step=fact.step, weights=fact.weights), trained)


class Reports:
    """The reports of one trainer: of its rank 0 alone. `last`: the newest step that is trained, None before the first."""

    def __init__(
        self, broker: Broker, run: str, store: Store | None = None, producer: str = "trainer-0"
    ) -> None:
        """`store`: for weights that are given as bytes."""
        self._broker, self._run, self._settings, self._producer = broker, run, store, producer
        self._log: Log | None = None
        self._store: ObjectStore | None = None
        self.last: StepTrained | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Reports:
        return cls(config.broker, config.run, config.store)

    async def __aenter__(self) -> Reports:
        """Raises BrokerUnavailable."""
        log = await Log.connect(self._broker, self._run, self._producer, user="trainer")
        try:
            newest = await log.latest("step.trained")
            if newest is not None and isinstance(newest.fact, StepTrained):
                # The process before this one may have ended just there.
                await publish_policy(log, newest)
                self.last = newest.fact
            self._store = None if self._settings is None else ObjectStore.open(self._settings)
        except BaseException:
            await log.close()
            raise
        self._log = log
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._log is not None:
            await self._log.close()
            self._log = None

    async def trained(
        self,
        step: int,
        *,
        weights: Ref | bytes,
        optimizer: Ref | bytes,
        loss: float,
        grad_norm: float,
        kl: float,
        seconds: float,
        sequences: int | None = None,
        loss_tokens: int | None = None,
    ) -> StepTrained:
        """Says that `step` is taken. `weights` and `optimizer`: refs of objects of the run's store (engines load the weights from
        there), or their bytes, which are put there. `loss` per loss token, `kl` in nats per loss token, `seconds` of the step;
        `sequences` and `loss_tokens` that were trained: default, the batch's.

        Raises ReportRefused; ValueError for bytes without a store, or a number that is not finite; StoreUnavailable.
        """
        log = self._opened()
        done = self.last.step if self.last else 0
        if step != done + 1:
            what = "is reported already" if step <= done else "leaves some out"
            raise ReportRefused(
                f"report of step {step} {what}: run {log.run} is at step {done}, and takes step {done + 1}"
            )
        batch, told = await yielded(log, step)
        shares = told.sources.values()
        nonce = secrets.token_hex(4)
        fact = StepTrained(
            step=step,
            parent=self.last.weights if self.last else None,
            weights=await self._kept(weights_key(log.run, step, nonce), weights),
            optimizer=await self._kept(optimizer_key(log.run, step, nonce), optimizer),
            loss=loss,
            grad_norm=grad_norm,
            kl=kl,
            loss_tokens=sum(share.loss_tokens for share in shares) if loss_tokens is None else loss_tokens,
            seconds=seconds,
        )
        total = sum(share.sequences for share in shares) if sequences is None else sequences
        await publish_step(log, batch, fact, total)
        self.last = fact
        return fact

    async def fetch(self, ref: Ref) -> bytes:
        """An object of the run's store: the weights that a trainer goes on from. Raises ValueError without a store, ObjectMissing,
        ObjectDamaged, StoreUnavailable."""
        if self._store is None:
            raise ValueError(f"{ref.key} is in the run's store: give it")
        return bytes(await self._store.get(ref))

    def _opened(self) -> Log:
        if self._log is None:
            raise ReportRefused(f"the reports of run {self._run} are not open: use `async with`")
        return self._log

    async def _kept(self, key: str, given: Ref | bytes) -> Ref:
        if isinstance(given, Ref):
            return given
        if self._store is None:
            raise ValueError(f"{key}: bytes need a store: give the run's, or refs of what is in it")
        return await self._store.create(key, given)


class BlockingReports:
    """`Reports` for a trainer without an event loop: `with BlockingReports(Reports.of(config)) as reports: reports.trained(...)`."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        # Of its own, which runs on: the broker drops a client that does not answer its pings.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reports", daemon=True)

    @property
    def last(self) -> StepTrained | None:
        return self._reports.last

    def __enter__(self) -> BlockingReports:
        self._thread.start()
        try:
            self._wait(self._reports.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._reports.__aexit__())
        finally:
            self._end()

    def trained(self, step: int, **report: Any) -> StepTrained:
        """See `Reports.trained`."""
        return self._wait(self._reports.trained(step, **report))

    def fetch(self, ref: Ref) -> bytes:
        """See `Reports.fetch`."""
        return self._wait(self._reports.fetch(ref))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
