"""The training loop of one rank.

Promises:
- each step is taken once, on the batch of its number, from the newest `step.trained` in the log: a group that dies in
  mid-step starts again from the step before, so no sequence is trained into a policy twice;
- a step whose gradient is not finite ends the rank: the policy that it would ruin is never written;
- weights and optimizer state are in the store before `step.trained` says so; a step that was trained but not yet
  published is published at the next start.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from pipeline.engines.policies import policy_dir
from pipeline.engines.tiny.model import load_model, weights_from_bytes, weights_to_bytes
from pipeline.feed.feed import Feed, MicroBatch
from schemas.facts import BatchConsumed, PolicyPublished, StepTrained
from schemas.keys import optimizer_key, weights_key
from services.process import Context
from services.trainer import ranks
from services.trainer.loss import policy_loss
from services.trainer.model import label_logprobs, optimizer_from_bytes, optimizer_to_bytes

T = TypeVar("T")


class Rank:
    """One data-parallel rank. Runs on a thread of its own; `loop` is the event loop that owns log and store."""

    def __init__(self, ctx: Context, feed: Feed, loop: asyncio.AbstractEventLoop) -> None:
        self._ctx = ctx
        self._feed = feed
        self._loop = loop
        self._settings = ctx.config.trainer
        self._model = load_model(policy_dir(ctx.config.engine.policy))
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self._settings.lr, weight_decay=self._settings.weight_decay
        )
        self._last: StepTrained | None = None

    @property
    def _leads(self) -> bool:
        return self._ctx.index == 0

    def run(self) -> None:
        """Trains until the run's last step; raises FeedStopped when it is told to stop before."""
        self._restore()
        first = self._last.step + 1 if self._last else 1
        for step in range(first, self._ctx.config.steps + 1):
            self._step(step)

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _restore(self) -> None:
        newest = self._await(self._ctx.log.latest("step.trained")) if self._leads else None
        # Rank 0 reads for all: ranks that read at different moments could start from different steps.
        fact = ranks.agree(newest.fact if newest is not None else None)
        if not isinstance(fact, StepTrained):
            return
        self._model.load_state_dict(weights_from_bytes(self._await(self._ctx.store.get(fact.weights))))
        optimizer_from_bytes(self._optimizer, self._model, self._await(self._ctx.store.get(fact.optimizer)))
        self._last = fact
        if newest is not None:
            self._await(self._ctx.log.publish(PolicyPublished(step=fact.step, weights=fact.weights), newest))
        self._ctx.logger.info("resumed after step %d", fact.step, extra={"step": fact.step})

    def _step(self, step: int) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        sums, sequences = torch.zeros(4, dtype=torch.float64), set[str]()
        started = 0.0
        for micro_batch in self._feed.batch(step):
            # Waiting for the batch is not training time.
            started = started or time.monotonic()
            # A batch with fewer contexts than micro-batches has empty ones.
            if micro_batch.sequences:
                sums += self._backward(micro_batch)
                sequences.update(micro_batch.sequences)
        ranks.sum_gradients(self._model.parameters())
        loss, kl, _, tokens = ranks.sum_tensor(sums).tolist()
        total = len(ranks.union(sequences))
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise ValueError(
                f"step {step}: loss {loss} and gradient norm {norm} are not both finite, and the step is not taken; look at the "
                f"logprobs of its payloads (`packtrain payload show`) and at trainer.lr = {self._settings.lr}"
            )
        self._optimizer.step()
        if not self._leads:
            return
        weights, optimizer = (
            weights_to_bytes(self._model.state_dict()),
            optimizer_to_bytes(self._optimizer, self._model),
        )
        nonce = secrets.token_hex(4)
        written = self._await(self._ctx.store.create(weights_key(self._ctx.run, step, nonce), weights))
        fact = StepTrained(
            step=step,
            parent=self._last.weights if self._last else None,
            weights=written,
            optimizer=self._await(
                self._ctx.store.create(optimizer_key(self._ctx.run, step, nonce), optimizer)
            ),
            loss=loss,
            grad_norm=norm,
            kl=kl / max(tokens, 1),
            loss_tokens=int(tokens),
            seconds=time.monotonic() - started,
        )
        self._await(self._publish(fact, total))
        self._last = fact

    def _backward(self, micro_batch: MicroBatch) -> torch.Tensor:
        data = micro_batch.torch()
        logprobs = label_logprobs(self._model, data["tokens"], data["labels"], data["cu_seqlens"])
        terms = policy_loss(
            logprobs,
            data["logprobs"],
            data["advantages"],
            data["loss_weights"],
            self._settings.clip_low,
            self._settings.clip_high,
        )
        terms.loss.backward()
        return torch.stack([term.detach().double() for term in terms])

    async def _publish(self, fact: StepTrained, sequences: int) -> None:
        log = self._ctx.log
        batch = await log.last("batch.yielded", "all", fact.id())
        consumed = await log.publish(
            BatchConsumed(step=fact.step, sequences=sequences, loss_tokens=fact.loss_tokens), batch
        )
        trained = await log.publish(fact, consumed.event)
        if not trained.won:
            raise RuntimeError(
                f"step {fact.step} was trained by another group of ranks ({trained.event.producer}); two trainers share run "
                f"{log.run}: stop one"
            )
        await log.publish(PolicyPublished(step=fact.step, weights=fact.weights), trained.event)
        self._ctx.logger.info("trained step %d", fact.step, extra={"step": fact.step})
