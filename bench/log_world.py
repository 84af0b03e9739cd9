"""A run in the log, as long as is wanted, for the benchmark.

The run is made by the cores themselves: they decide on what comes back from the broker, and hosts, grader and trainer
that do at once what is asked of them stand in for the world. So every fact is one that a real run could have.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from log_server import say

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Decision
from pipeline.log import Log
from schemas.config import RunConfig
from schemas.envelope import Event, encode
from schemas.facts import (
    ALL,
    BatchConsumed,
    BatchYielded,
    Fact,
    PolicyPublished,
    RunStarted,
    SampleCompleted,
    SampleGraded,
    SampleShaped,
    SequenceDispatched,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
    StepTrained,
    WindowPacked,
)
from schemas.names import Subject, attempt_id
from schemas.payload import ColumnHeader, ContextMeta, PayloadHeader, Ref, Span

_BURST = 256
_COLUMNS = (
    ("tokens", "int32", 4),
    ("loss_mask", "uint8", 1),
    ("logprobs", "float32", 4),
    ("policy_version", "int32", 4),
    ("teacher_logprobs", "float32", 4),
    ("entropy", "float32", 4),
    ("values", "float32", 4),
    ("position_ids", "int32", 4),
    ("routed_experts.L0-15", "uint8", 128),
    ("routed_experts.L16-31", "uint8", 128),
)
_TURNS = (12, 4)
"""Model calls in the two contexts of a sequence."""
_TURN_TOKENS = 96
_SAMPLED = 40
_ROWS = sum(_TURNS) * _TURN_TOKENS
_VARIANTS = 256


def configured(run: str, groups: int) -> RunConfig:
    """Two sources of `groups` groups of 8 sequences a batch."""
    source = {"pool": "pool", "groups": groups, "environment": {"kind": "arithmetic"}}
    return RunConfig.model_validate(
        {
            "run": run,
            "steps": 1_000_000,
            "batch": {"dp": 4, "token_budget": 32_768},
            "pools": [{"name": "pool", "harness": "chat"}],
            "sources": [{"name": "math", **source}, {"name": "code", **source}],
        }
    )


class World:
    """What is around the cores. `answer` gives the facts that an event of theirs, or of one of these, brings about."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.version = 0
        self.random = random.Random(0)
        self.weights: Ref | None = None

    def answer(self, fact: Fact) -> Iterator[Fact]:
        match fact:
            case SequenceDispatched():
                yield SequenceOpened(
                    **_names(fact),
                    attempt=1,
                    pool=fact.pool,
                    task_index=fact.task_index,
                    host="agent-loop-0",
                    base_url="http://10.0.0.1:8080",
                    session=attempt_id(fact.sequence, 1),
                    budget_s=120.0,
                )
            case SequenceOpened():
                reward = float(self.random.random() < 0.5)
                yield SequenceVerified(**_names(fact), attempt=1, host=fact.host, reward=reward)
            case SequenceVerified(reward=reward):
                assert reward is not None
                yield self._finished(fact, reward)
            case SampleCompleted(source=source, sample=sample, rewards=rewards):
                yield SampleGraded(source=source, sample=sample, grader="none", rewards=rewards)
            case BatchYielded():
                for dp, microbatch in itertools.product(range(4), range(fact.microbatches)):
                    yield WindowPacked(
                        step=fact.step,
                        microbatch=microbatch,
                        dp=dp,
                        tokens=30_000,
                        bytes=10**6,
                        fetched=10**6,
                    )
                yield BatchConsumed(step=fact.step, sequences=1, loss_tokens=1)
            case BatchConsumed(step=step):
                parent, self.weights = (
                    self.weights,
                    Ref(key=f"runs/{self.run}/weights/{step:06d}", bytes=1, crc32c=0),
                )
                yield StepTrained(
                    step=step,
                    parent=parent,
                    weights=self.weights,
                    optimizer=Ref(key=f"runs/{self.run}/optimizer/{step:06d}", bytes=1, crc32c=0),
                    loss=0.015574540942907333,
                    grad_norm=1.3083746433258057,
                    kl=-2.7138348063364994e-09,
                    loss_tokens=1,
                    seconds=3.6086289419999957,
                )
            case StepTrained(step=step, weights=weights):
                self.version = step
                yield PolicyPublished(step=step, weights=weights)
            case _:
                pass

    def _finished(self, fact: SequenceVerified, reward: float) -> SequenceFinished:
        return SequenceFinished(
            **_names(fact),
            attempt=1,
            reward=reward,
            termination="completed",
            turns=sum(_TURNS),
            contexts=_contexts(self.version),
            payload=PayloadHeader(
                key=f"runs/{self.run}/payloads/{fact.source}/{fact.sequence}-a1.safetensors",
                bytes=2048 + _ROWS * sum(width for _, _, width in _COLUMNS),
                columns=_columns(self.random.randrange(_VARIANTS)),
            ),
        )


@functools.lru_cache(maxsize=8)
def _contexts(version: int) -> tuple[ContextMeta, ...]:
    contexts: list[ContextMeta] = []
    offset = 0
    for label, turns in zip(("main", "subagent"), _TURNS, strict=True):
        ends = range(_TURN_TOKENS, (turns + 1) * _TURN_TOKENS, _TURN_TOKENS)
        contexts.append(
            ContextMeta(
                label=label,
                offset=offset,
                tokens=turns * _TURN_TOKENS,
                generated=turns * _SAMPLED,
                loss_spans=tuple(Span(start=end - _SAMPLED, end=end) for end in ends),
                min_version=version,
                max_version=version,
            )
        )
        offset += turns * _TURN_TOKENS
    return tuple(contexts)


@functools.cache
def _columns(variant: int) -> tuple[ColumnHeader, ...]:
    """With checksums that a compression of the state finds no other of nearby."""
    columns: list[ColumnHeader] = []
    at = 2048
    for name, dtype, width in _COLUMNS:
        header = {
            "name": name,
            "dtype": dtype,
            "shape": (_ROWS,) if width <= 4 else (_ROWS, width),
            "offset": at,
            "bytes": _ROWS * width,
            "crc32c": (zlib.crc32(f"{variant} {name}".encode()),),
        }
        columns.append(ColumnHeader.model_validate(header))
        at += _ROWS * width
    return tuple(columns)


def _names(fact: SequenceDispatched | SequenceOpened | SequenceVerified) -> dict[str, Any]:
    return {"source": fact.source, "sample": fact.sample, "sequence": fact.sequence}


class Writer:
    """Writes the run into its log, by `Log.publish_all` in bursts of up to 256 facts."""

    def __init__(self, log: Log, groups: int) -> None:
        self.log = log
        self.seq = 0
        self.ends: list[int] = [0]
        """Stream sequences at which a step was over."""
        self.full = 0
        """Stream sequence before the newest batch, when the state holds most."""
        self.finished_bytes = 0
        """Of the body of a `sequence.finished`."""
        self._world = World(log.run)
        self._sampler = SamplerCore(log.run)
        self._mixer = MixerCore(log.run)
        self._next: deque[tuple[Fact, Event | None]] = deque()
        self._on_its_way: set[str] = set()
        self._add(RunStarted(run=log.run, config=configured(log.run, groups).decisions()), None)

    async def write(self, until: int, whole_steps: bool = False) -> int:
        """Events up to stream sequence `until`; `whole_steps`: and on to the end of a step, so that two stops are alike.

        The sequence of the last one.
        """
        told = time.monotonic()
        while self.seq < until or (whole_steps and self.seq != self.ends[-1]):
            burst: list[tuple[Fact, Event | None]] = []
            most = _BURST if whole_steps else min(_BURST, until - self.seq)
            while self._next and len(burst) < most:
                burst.append(self._next.popleft())
                if isinstance(burst[-1][0], PolicyPublished):
                    break
            if not burst:
                raise AssertionError(f"the run stands still at {self.seq}")
            for published in await self.log.publish_all(burst):
                assert published.won
                self._take(published.event)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"  {self.seq:,} events written")
        return self.seq

    def _add(self, fact: Fact, cause: Event | None) -> None:
        subject = fact.subject(self.log.run).text
        if subject not in self._on_its_way:
            self._on_its_way.add(subject)
            self._next.append((fact, cause))

    def _take(self, event: Event) -> None:
        self.seq = event.seq
        fact = event.fact
        self._sampler.fold(event)
        self._mixer.fold(event)
        self._on_its_way.discard(fact.subject(self.log.run).text)
        if isinstance(fact, PolicyPublished):
            self.ends.append(event.seq)
        elif isinstance(fact, BatchYielded):
            self.full = event.seq - 1
        elif isinstance(fact, SequenceFinished) and not self.finished_bytes:
            self.finished_bytes = len(encode(event, self.log.run).body)
        decided: list[Decision] = []
        # Left out is a call whose answer is known: the batch is decided and has not come back.
        if not isinstance(fact, SampleShaped) or self._batch_subject() not in self._on_its_way:
            decided += self._sampler.decide(event)
        decided += self._mixer.decide(event)
        for answer in (*(decision.fact for decision in decided), *self._world.answer(fact)):
            self._add(answer, event)

    def _batch_subject(self) -> str:
        return Subject(self.log.run, "batch", "yielded", ALL, f"{self._sampler.yielded + 1:06d}").text
