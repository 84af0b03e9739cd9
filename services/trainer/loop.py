"""The training loop of one rank.

Promises:
- each step is taken once, on the batch of its number, from the newest `step.trained` in the log: a group that dies in
  mid-step starts again from the step before, so no sequence is trained into a policy twice;
- a step whose gradient is not finite ends the rank: the policy that it would ruin is never written;
- no rank trains a batch of another revision than the others: a step of which any window was of an older one than the newest
  that any rank was given is taken again, before it changes a weight;
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
from pipeline.engines.tiny.model import load_model
from pipeline.feed.feed import Feed, MicroBatch
from pipeline.feed.reporting import publish_policy, publish_step, yielded
from schemas.facts import StepTrained
from schemas.keys import optimizer_key, weights_key
from services.process import Context
from services.trainer import ranks
from services.trainer.loss import Clip, policy_loss
from services.trainer.model import (
    label_logprobs,
    model_from_bytes,
    model_to_bytes,
    optimizer_from_bytes,
    optimizer_to_bytes,
)
from services.trainer.sharding import clip_gradients, divided_model
from services.trainer.windows import Place, window_logprobs

T = TypeVar("T")


class Rank:
    """One rank of dp x cp x tp. Runs on a thread of its own; `loop` is the event loop that owns log and store."""

    def __init__(self, ctx: Context, feed: Feed, mesh: ranks.Mesh, loop: asyncio.AbstractEventLoop) -> None:
        self._ctx = ctx
        self._feed = feed
        self._mesh = mesh
        self._loop = loop
        self._settings = ctx.config.trainer
        self._clip = Clip(
            self._settings.clip_low,
            self._settings.clip_high,
            self._settings.clip_positive_low,
            self._settings.clip_negative_high,
        )
        self._model = divided_model(load_model(policy_dir(ctx.config.engine.policy)), mesh)
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
        model_from_bytes(self._model, self._await(self._ctx.store.get(fact.weights)), self._mesh)
        blob = self._await(self._ctx.store.get(fact.optimizer))
        optimizer_from_bytes(self._optimizer, self._model, blob, self._mesh)
        self._last = fact
        if newest is not None:
            self._await(publish_policy(self._ctx.log, newest))
        self._ctx.logger.info("resumed after step %d", fact.step, extra={"step": fact.step})

    def _step(self, step: int) -> None:
        sums, sequences, started = self._gradients(step)
        ranks.sum_gradients(self._model.parameters(), self._mesh.batch)
        loss, kl, _, tokens = ranks.sum_tensor(sums, self._mesh.batch).tolist()
        # Context-parallel ranks have the same sequences, tensor-parallel ones the same windows: each counts once.
        total = len(ranks.union(sequences))
        norm = clip_gradients(self._model, self._mesh, self._settings.max_grad_norm)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise ValueError(
                f"step {step}: loss {loss} and gradient norm {norm} are not both finite, and the step is not taken; look at the "
                f"logprobs of its payloads (`packtrain payload show`) and at trainer.lr = {self._settings.lr}"
            )
        self._optimizer.step()
        weights, optimizer = (
            model_to_bytes(self._model, self._mesh),
            optimizer_to_bytes(self._optimizer, self._model, self._mesh),
        )
        if not self._leads:
            return
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
        batch, _ = self._await(yielded(self._ctx.log, step))
        self._await(publish_step(self._ctx.log, batch, fact, total))
        self._ctx.logger.info("trained step %d", step, extra={"step": step})
        self._last = fact

    def _gradients(self, step: int) -> tuple[torch.Tensor, set[str], float]:
        """Leaves the rank's part of the step's gradient in the parameters. Returns its part of the loss terms, the sequences of
        its windows, and when it was given the first."""
        revision = 0
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            sums, sequences, given = torch.zeros(4, dtype=torch.float64), set[str](), set[int]()
            started = 0.0
            for micro_batch in self._feed.batch(step, revision):
                # Waiting for the batch is not training time.
                started = started or time.monotonic()
                given.add(micro_batch.revision)
                # A batch with fewer contexts than micro-batches has empty ones.
                if micro_batch.sequences:
                    sums += self._backward(micro_batch)
                    sequences.update(micro_batch.sequences)
            newest = ranks.largest(max(given))
            if not ranks.largest(int(min(given) < newest)):
                return sums, sequences, started
            self._ctx.logger.warning(
                "step %d was planned anew (revision %d) while it was trained: its gradients are dropped, and it is taken again",
                step,
                newest,
                extra={"step": step},
            )
            revision = newest

    def _backward(self, micro_batch: MicroBatch) -> torch.Tensor:
        data, meta = micro_batch.torch(), micro_batch.meta
        if "images.pixels" in data:
            raise ValueError(
                f"step {micro_batch.step} shows images, and the reference trainer's policy has no vision encoder; set trainer.kind = "
                '"external" and train with one that has, or leave engine.vision.placeholder empty'
            )
        place = Place(meta["layout"], meta["cp_size"], meta["cp_rank"])
        if place.cp_size == 1 and "candidates.ids" not in data:
            # The whole pack, in order.
            logprobs = label_logprobs(self._model, data["tokens"], data["labels"], data["cu_seqlens_padded"])
        else:
            logprobs = window_logprobs(self._model, data, place, self._mesh)
        terms = policy_loss(logprobs, data["logprobs"], data["advantages"], data["loss_weights"], self._clip)
        terms.loss.backward()
        return torch.stack([term.detach().double() for term in terms])
