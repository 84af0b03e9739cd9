"""The engine: continuous batching over one model, pausable and re-weightable in mid-generation.

Promises: requests join and leave the running batch between two steps; the event loop only schedules, model steps and
weight loads run on one worker thread, one at a time, so a token's version is the version its step ran under; a paused or
aborted request loses no sampled token; when a step fails every request fails with ``EngineDead`` and the engine says so,
it never answers with guessed tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Ids
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.engines.tiny.model import load_policy
from pipeline.engines.tiny.runner import ModelRunner
from pipeline.engines.tiny.scheduler import Scheduler, Sequence
from pipeline.engines.wire import PauseMode, SamplingParams

T = TypeVar("T")
STOP_S = 1.0
"""How long a stop waits for the step that is under way."""


class RequestRefused(ValueError):
    """A request that can never be served; the message names the field, the value and the limit."""


class EnginePaused(RuntimeError):
    """The engine takes no requests now; try again later."""


class EngineDead(RuntimeError):
    """A model step failed; the process must be replaced."""


@dataclass(slots=True)
class Counters:
    """Totals since start, for metrics; the server counts ``refused`` and ``unknown_fields``."""

    requests: int = 0
    refused: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    weight_loads: int = 0
    unknown_fields: int = 0


class TinyEngine:
    """One policy behind token-in/token-out. Construct anywhere; ``start`` and everything async on one event loop.

    policy_dir: directory with config.json and model.safetensors.
    max_running: requests in a step; more wait in arrival order.
    max_context: prompt plus output tokens of one request (also bounded by the model's positions).
    cache_tokens: tokens that the KV cache holds over all running requests; default: 16 whole contexts.
    """

    def __init__(
        self,
        policy_dir: str | Path,
        max_running: int = 64,
        max_context: int = 2048,
        cache_tokens: int | None = None,
        block_size: int = 16,
        max_prefill_tokens: int = 4096,
    ) -> None:
        config, state = load_policy(policy_dir)
        if max_context > config.max_position_embeddings:
            raise ValueError(
                f"max_context {max_context} exceeds the model's {config.max_position_embeddings} positions"
            )
        blocks = -(-(cache_tokens or 16 * max_context) // block_size) + 1
        self.config, self.max_context, self.counters = config, max_context, Counters()
        self.scheduler = Scheduler(max_running, blocks, block_size, max_prefill_tokens)
        self._runner = ModelRunner(config, state, blocks, block_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._ends: dict[Sequence, asyncio.Future[None]] = {}
        self._grown: dict[Sequence, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._driver: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        """The weight version that the next step runs under; 0 for the policy directory's own weights."""
        return self._runner.version

    @property
    def weight_bytes(self) -> int:
        """Size of the model's parameters in float32."""
        return self._runner.weight_bytes

    @property
    def paused(self) -> PauseMode | None:
        return self._paused

    @property
    def healthy(self) -> bool:
        """False before ``start``, after ``stop`` and once a step has failed."""
        return self._driver is not None and not self._driver.done() and self._failure is None

    async def start(self) -> None:
        """Start stepping. Idempotent."""
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive(), name="tiny-engine")

    async def stop(self) -> None:
        """Answer what is in flight with what it has, and stop. Idempotent. A step that is under way is waited for
        `STOP_S` seconds: a long prefill on a slow machine may outlast it, and nobody needs its tokens."""
        self._paused = "abort"
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(sequence)
            self._answer(sequence)
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver], timeout=STOP_S)
        self._thread.shutdown(wait=False)

    async def ended(self) -> None:
        """Waits until the engine has stopped; raises EngineDead if by a step that failed."""
        if self._driver is not None:
            await asyncio.wait([self._driver])
        if self._failure is not None:
            raise EngineDead(f"a model step failed: {self._failure!r}") from self._failure

    async def generate(self, token_ids: Ids[int], params: SamplingParams) -> Sequence:
        """Sample one continuation; the result holds output ids, log-probabilities (nats) and per-token versions.

        A caller that is cancelled takes its request out of the batch. Raises RequestRefused, EnginePaused or EngineDead.
        """
        sequence, ended = self._queue(token_ids, params)
        try:
            await ended
        finally:
            self._leave(sequence)
        return sequence

    @asynccontextmanager
    async def streaming(
        self, token_ids: Ids[int], params: SamplingParams
    ) -> AsyncGenerator[AsyncGenerator[Sequence, None], None]:
        """As `generate`, but gives the growing sequence whenever it has grown, and at its end. Leaving the context takes
        the request out of the batch. Raises RequestRefused and EnginePaused on entry, EngineDead also later."""
        sequence, ended = self._queue(token_ids, params)
        grown = self._grown[sequence] = asyncio.Event()

        async def growing() -> AsyncGenerator[Sequence, None]:
            while not ended.done():
                await grown.wait()
                grown.clear()
                if not ended.done():
                    yield sequence
            ended.result()
            yield sequence

        try:
            yield growing()
        finally:
            self._leave(sequence)

    async def score(
        self, token_ids: Ids[int], top_k: int
    ) -> tuple[Ids[float], Ids[Ids[int]], Ids[Ids[float]]]:
        """Of tokens 1 to T-1, given those before: their log-probabilities [T-1], the ids [T-1, k] and log-probabilities
        [T-1, k] of the likeliest, falling; at temperature 1 over the whole vocabulary. Raises RequestRefused, EngineDead.
        """
        self._alive()
        if (reason := self._misplaced(token_ids)) is not None:
            raise RequestRefused(reason)
        async with self._between_steps:
            return await self._on_thread(
                self._runner.score, tuple(token_ids), min(top_k, self.config.vocab_size)
            )

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. ``abort`` ends requests with what they have; ``wait`` lets them finish; ``keep`` freezes them.

        Returns once no step is being computed and, unless kept, nothing is in flight.
        """
        self._paused = mode
        self._wake.set()
        if mode == "wait" and self._ends:
            # Not gather, which would cancel them with a caller that goes away.
            await asyncio.wait(self._ends.values())
        async with self._between_steps:
            if mode == "abort":
                self._abort_all()

    async def resume(self) -> None:
        """Take requests and step again. Idempotent."""
        self._paused = None
        self._wake.set()

    async def load_weights(self, blob: bytes, version: int, mode: PauseMode = "keep") -> None:
        """Swap the weights between two steps; tokens sampled after it carry ``version``.

        ``keep`` goes on with the running requests and their caches; ``abort`` ends them first with their partial output;
        ``wait`` lets them finish first, while new requests are refused. An engine paused before is paused after.
        Raises ``runner.WeightsRefused`` and keeps the old weights when the blob does not fit.
        """
        if version < 0:
            raise ValueError(f"weight version {version} is negative")
        draining = mode == "wait" and self._paused is None
        try:
            if draining:
                await self.pause("wait")
            async with self._between_steps:
                if mode == "abort":
                    self._abort_all()
                await self._on_thread(self._runner.load_bytes, blob, version)
                self.counters.weight_loads += 1
        finally:
            # Unless somebody has paused it otherwise meanwhile.
            if draining and self._paused == "wait":
                await self.resume()

    async def set_version(self, version: int) -> None:
        """Rename the weights in use."""
        if version < 0:
            raise ValueError(f"weight version {version} is negative")
        async with self._between_steps:
            self._runner.version = version

    def _alive(self) -> None:
        if not self.healthy:
            why = "is not running" if self._failure is None else f"stopped after {self._failure!r}"
            raise EngineDead(f"the engine {why}") from self._failure

    def _queue(self, token_ids: Ids[int], params: SamplingParams) -> tuple[Sequence, asyncio.Future[None]]:
        self._alive()
        sequence = self._checked(token_ids, params)
        if self._paused in ("abort", "wait"):
            raise EnginePaused(f"the engine is paused (mode {self._paused}): retry after it resumes")
        try:
            self.scheduler.add(sequence)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        self.counters.requests += 1
        self.counters.prompt_tokens += len(sequence.prompt)
        ended = self._ends[sequence] = asyncio.get_running_loop().create_future()
        self._wake.set()
        return sequence, ended

    def _leave(self, sequence: Sequence) -> None:
        self._ends.pop(sequence, None)
        self._grown.pop(sequence, None)
        # Not ended means that the caller has gone; the driver reaps it before the next step.
        self.scheduler.abort(sequence)
        self._wake.set()

    def _misplaced(self, token_ids: Ids[int]) -> str | None:
        """What is wrong with a prompt by itself."""
        vocab = self.config.vocab_size
        if not token_ids:
            return "the prompt is empty: give at least one token id"
        if (bad := next((t for t in token_ids if not 0 <= t < vocab), None)) is not None:
            return f"token id {bad} is outside the vocabulary of {vocab}"
        if len(token_ids) >= self.max_context:
            return (
                f"the prompt has {len(token_ids)} tokens, the context {self.max_context}: no room to sample"
            )
        return None

    def _checked(self, token_ids: Ids[int], params: SamplingParams) -> Sequence:
        room = self.max_context - len(token_ids)
        reason = self._misplaced(token_ids)
        if reason is None and params.max_tokens is not None and params.max_tokens > room:
            reason = (
                f"max_tokens {params.max_tokens} after a prompt of {len(token_ids)} tokens exceeds the context of "
                f"{self.max_context} tokens: ask for at most {room}"
            )
        if reason is None and (gaps := params.distribution_gaps()):
            reason = f"sampling parameters that this engine does not implement: {', '.join(gaps)}"
        if reason is not None:
            raise RequestRefused(reason)
        eos = () if self.config.eos_token_id is None else (self.config.eos_token_id,)
        return Sequence(
            tuple(token_ids), params, params.max_tokens or room, frozenset((*params.stop_token_ids, *eos))
        )

    async def _drive(self) -> None:
        try:
            while True:
                self._wake.clear()
                async with self._between_steps:
                    worked = await self._advance()
                if worked:
                    # Let answers, new requests and whoever waits for the lock in, before the next step.
                    await asyncio.sleep(0)
                else:
                    await self._wake.wait()
        except Exception as error:
            self._failure = error
            for ended in self._ends.values():
                if not ended.done():
                    ended.set_exception(EngineDead(f"a model step failed: {error!r}"))
            for grown in self._grown.values():
                grown.set()

    async def _advance(self) -> bool:
        """Admit, then one prefill or decode step. False when there is nothing to do."""
        self.scheduler.reap()
        if self._paused in ("abort", "keep"):
            return False
        batch = self.scheduler.admit() or list(self.scheduler.running)
        if not batch:
            return False
        version, sampled = await self._on_thread(self._runner.step, batch)
        self.counters.steps += 1
        self.counters.sampled_tokens += len(batch)
        for sequence, one in zip(batch, sampled, strict=True):
            if self.scheduler.record(sequence, one, version):
                self._answer(sequence)
            elif (grown := self._grown.get(sequence)) is not None:
                grown.set()
        self.scheduler.reap()
        return True

    def _abort_all(self) -> None:
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(sequence)
        for sequence in self.scheduler.reap():
            self._answer(sequence)

    def _answer(self, sequence: Sequence) -> None:
        ended = self._ends.get(sequence)
        if ended is not None and not ended.done():
            ended.set_result(None)
        if (grown := self._grown.get(sequence)) is not None:
            grown.set()

    async def _on_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Run on the model's thread. A caller's cancellation waits for the call: the cache is never used by two."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
