"""Which requests run in the next step: a pure core, without tensors, clocks or I/O.

Promises: requests are admitted in arrival order and never overtaken; an admitted request owns, from admission to its end,
every KV block that it can ever need, so nothing that runs is preempted or runs out of memory; blocks are handed out once
and all come back; a request ends once, with one reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipeline.engines.wire import FinishReason, SamplingParams


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One request in flight. ``versions[i]`` is the weight version that output token i was sampled under."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop: frozenset[int]
    output: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    candidates: list[list[int]] = field(default_factory=list[list[int]])
    blocks: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the cache: all but the last sampled one, which the next step feeds."""
        return len(self.prompt) + len(self.output) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled for one sequence."""

    token: int
    logprob: float
    candidates: list[int]


class Scheduler:
    """Admission and per-request state; the caller drives it and computes the steps."""

    def __init__(self, max_running: int, blocks: int, block_size: int, max_prefill_tokens: int) -> None:
        self.max_running, self.block_size, self.max_prefill_tokens = (
            max_running,
            block_size,
            max_prefill_tokens,
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._capacity = blocks
        # Block 0 is where padded positions are written; it is never owned.
        self._free = list(range(blocks - 1, 0, -1))

    def blocks_for(self, sequence: Sequence) -> int:
        """Blocks that hold the prompt and every token that may be sampled (the last one is never fed back)."""
        tokens = len(sequence.prompt) + sequence.max_tokens - 1
        return -(-tokens // self.block_size)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Raises ValueError when it could not run even alone."""
        needed = self.blocks_for(sequence)
        if needed > self._capacity - 1:
            raise ValueError(
                f"a prompt of {len(sequence.prompt)} tokens with max_tokens {sequence.max_tokens} needs {needed} cache blocks of "
                f"{self.block_size}, the cache has {self._capacity - 1}: lower max_tokens or raise the engine's cache_tokens"
            )
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move what fits from the queue to the running set; the result is one prefill batch, padded to its longest.

        A prefill batch holds ``max_prefill_tokens`` padded tokens, or one longer prompt alone, so that running requests
        wait for a bounded prefill between two steps.
        """
        admitted: list[Sequence] = []
        longest = 0
        while self.waiting and len(self.running) < self.max_running:
            head = self.waiting[0]
            longest = max(longest, len(head.prompt))
            if admitted and longest * (len(admitted) + 1) > self.max_prefill_tokens:
                break
            needed = self.blocks_for(head)
            if needed > len(self._free):
                break
            head.blocks = [self._free.pop() for _ in range(needed)]
            self.running.append(self.waiting.popleft())
            admitted.append(head)
        return admitted

    def record(self, sequence: Sequence, sampled: Sampled, version: int) -> bool:
        """Append one sampled token; end the sequence at a stop token or its limit. True when it ended.

        A sequence that ended while the step ran (its client left) keeps its end and takes no token.
        """
        if sequence.finish_reason is not None:
            return True
        sequence.output.append(sampled.token)
        sequence.logprobs.append(sampled.logprob)
        sequence.versions.append(version)
        sequence.candidates.append(sampled.candidates)
        if sampled.token in sequence.stop:
            sequence.finish_reason = "stop"
        elif len(sequence.output) == sequence.max_tokens:
            sequence.finish_reason = "length"
        return sequence.finish_reason is not None

    def abort(self, sequence: Sequence) -> None:
        """End a request where it stands, keeping what it sampled. Its blocks return at the next ``reap``."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"

    def reap(self) -> list[Sequence]:
        """Drop every ended request from the queue and the running set and take back its blocks.

        Only between steps: a step that is being computed still writes to the blocks of the sequences it was given.
        """
        ended = [s for s in (*self.running, *self.waiting) if s.finish_reason is not None]
        if ended:
            self.running = [s for s in self.running if s.finish_reason is None]
            self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
            for sequence in ended:
                self._free.extend(sequence.blocks)
                sequence.blocks = []
        return ended
