"""Accepted groups for the hook service, as the log and the store hold them, and the service in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload, write_sidecar
from schemas.config import Broker, RunConfig
from schemas.envelope import Event
from schemas.facts import (
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SequenceFinished,
    SequenceScored,
)
from schemas.keys import payload_key, sidecar_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ContextMeta, PayloadHeader, Span
from services.hook import serve
from services.process import Context

DEADLINE_S = 40
CONTEXTS = (
    ContextMeta(
        offset=0, tokens=40, generated=12, min_version=1, max_version=1,
        loss_spans=(Span(start=10, end=15), Span(start=30, end=37)),
    ),
    ContextMeta(
        offset=40, tokens=20, generated=6, min_version=1, max_version=1,
        loss_spans=(Span(start=4, end=10),), label="subagent",
    ),
)  # fmt: skip
SPILLED = (CONTEXTS[0], CONTEXTS[1].model_copy(update={"loss_spans": (), "spilled": 6}))
"""The same, but that the second one's spans are in the payload."""
SEGMENTS = np.array(
    [
        (0, 10, 1, 0, 0), (10, 15, 2, 3, 0), (15, 30, 3, 0, 0), (30, 37, 2, 3, 0), (37, 40, 1, 0, 0),
        (40, 44, 1, 0, 1), (44, 50, 2, 3, 1), (50, 60, 1, 0, 1),
    ],
    np.int32,
)  # fmt: skip
LENGTH, LOSS = 60, 18
ROWS = np.r_[10:15, 30:37, 44:50]
"""The loss tokens' rows of the payload."""
Array = np.ndarray[Any, Any]


def config_of(
    run: str, broker: Broker, url: str, sources: dict[str, Sequence[str | dict[str, Any]]]
) -> RunConfig:
    """A run whose sources have these hooks; all are scored by the teacher `large`."""
    return RunConfig.model_validate(
        {
            "run": run,
            "broker": broker.model_dump(),
            "store": {"url": url},
            "pools": [{"name": "p", "harness": "chat"}],
            "teachers": [{"name": "large"}],
            "sources": [
                {
                    "name": name, "pool": "p", "groups": 1, "group_size": 4, "environment": {"kind": "arithmetic"},
                    "teachers": ["large"], "hooks": [{"kind": h} if isinstance(h, str) else h for h in hooks],
                }
                for name, hooks in sources.items()
            ],
        }
    )  # fmt: skip


def logprobs(seed: int) -> Array:
    mask = np.isin(np.arange(LENGTH), ROWS)
    return np.where(mask, -np.random.default_rng(seed).random(LENGTH), 0).astype(np.float32)


@dataclass
class Group:
    """What was put into log and store. own, teacher: of each member the log-probabilities of its loss tokens."""

    source: str
    sample: str
    sequences: tuple[str, ...]
    payloads: tuple[PayloadHeader, ...]
    own: list[Array]
    teacher: list[Array | None]


class World:
    """The log and the store of a run, as the other services fill them."""

    def __init__(self, log: Log, store: ObjectStore) -> None:
        self.log = log
        self.store = store
        self.contexts = CONTEXTS

    async def complete(self, source: str, index: int, rewards: Sequence[float], unscored: int = -1) -> Group:
        """Everything that stands before a group is graded. unscored: the member that the teacher cannot score."""
        sample = sample_id(source, index)
        sequences = tuple(sequence_id(sample, member) for member in range(len(rewards)))
        members = [
            await self._member(source, sample, sequence, 100 * index + i, rewards[i], i == unscored)
            for i, sequence in enumerate(sequences)
        ]
        completed = SampleCompleted(
            source=source, sample=sample, sequences=sequences, rewards=tuple(rewards), failed=0
        )
        await self.log.publish(completed)
        payloads, own, teacher = zip(*members, strict=True)
        return Group(source, sample, sequences, payloads, list(own), list(teacher))

    async def _member(
        self, source: str, sample: str, sequence: str, seed: int, reward: float, unscored: bool
    ) -> tuple[PayloadHeader, Array, Array | None]:
        own, scores = logprobs(seed), logprobs(seed + 50)[ROWS]
        key = payload_key(self.log.run, source, attempt_id(sequence, 1))
        columns = {
            "tokens": np.arange(LENGTH, dtype=np.int32),
            "loss_mask": np.isin(np.arange(LENGTH), ROWS).astype(np.uint8),
            "logprobs": own,
            "policy_version": np.zeros(LENGTH, np.int32),
            "segments": SEGMENTS,
        }
        payload = await write_payload(self.store, key, columns)
        sidecar = (
            None
            if unscored
            else await write_sidecar(self.store, sidecar_key(key, "teacher.large"), {"logprobs": scores})
        )
        ids: dict[str, Any] = {"source": source, "sample": sample, "sequence": sequence}
        facts = [
            SequenceFinished(
                **ids, attempt=1, reward=reward, termination="completed", turns=1, contexts=self.contexts,
                payload=payload,
            ),
            SequenceScored(
                **ids, teacher="large", tokens=0 if unscored else LOSS, scores=sidecar,
                failure="too long" if unscored else None,
            ),
        ]  # fmt: skip
        for fact in facts:
            await self.log.publish(fact)
        return payload, own[ROWS], None if unscored else scores

    async def grade(self, group: Group, rewards: Sequence[float], revision: int = 0) -> None:
        fact = SampleGraded(
            source=group.source, sample=group.sample, revision=revision, grader="judge", rewards=tuple(rewards)
        )  # fmt: skip
        await self.log.publish(fact)

    async def accept(self, group: Group) -> None:
        fact = SampleAccepted(
            source=group.source, sample=group.sample, pass_rate=0.5, mean_reward=0.5, tokens=LENGTH, min_version=1
        )  # fmt: skip
        await self.log.publish(fact)

    async def group(self, source: str, index: int, rewards: Sequence[float], unscored: int = -1) -> Group:
        """An accepted group."""
        group = await self.complete(source, index, rewards, unscored)
        await self.grade(group, rewards)
        await self.accept(group)
        return group

    async def fact(self, type_: str, source: str, id_: str) -> Event:
        """The fact, once it is there."""
        async with asyncio.timeout(DEADLINE_S):
            while (event := await self.log.last(type_, source, id_)) is None:
                await asyncio.sleep(0.02)
        return event

    async def settled(self, consumer: str) -> None:
        """Until the consumer has nothing to do."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                info = await self.log.js.consumer_info(self.log.stream, consumer)
                if not info.num_ack_pending and not info.num_pending:
                    return
                await asyncio.sleep(0.02)

    async def count(self, type_: str) -> int:
        entity, _, fact = type_.partition(".")
        info = await self.log.js.stream_info(
            self.log.stream, subjects_filter=f"rl.{self.log.run}.{entity}.{fact}.>"
        )
        return sum((info.state.subjects or {}).values())


def context(config: RunConfig, log: Log, store: ObjectStore, stop: asyncio.Event) -> Context:
    return Context(config, "hook", log, store, stop, logging.getLogger("packtrain"))


@asynccontextmanager
async def hooking(
    config: RunConfig, log: Log, store: ObjectStore, **limits: Any
) -> AsyncIterator[asyncio.Task[None]]:
    """The service in this process. Leaves when told to stop, and lets its exception out."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(context(config, log, store, stop), **limits))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task])
    task.result()
