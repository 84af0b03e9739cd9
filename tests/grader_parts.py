"""Groups of finished sequences with payloads, for tests of the grader service."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
from nats.js.errors import NotFoundError

from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.policies import TINY, policy_dir
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload
from schemas.config import Broker, RunConfig
from schemas.envelope import Event
from schemas.facts import SampleCompleted, SampleGraded, SequenceFinished
from schemas.keys import payload_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ROLES, ContextMeta, Span


def config(run: str, broker: Broker, directory: str, **grader: Any) -> RunConfig:
    """Two sources: `s`, judged as said, and `plain`, which nobody judges."""
    source = {"pool": "p", "groups": 1, "group_size": 2, "environment": {"kind": "arithmetic"}}
    return RunConfig.model_validate(
        {
            "run": run,
            "directory": directory,
            "broker": broker.model_dump(),
            "store": {"url": f"file://{directory}/objects"},
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [{"name": "s", **source, "grader": grader}, {"name": "plain", **source}],
        }
    )


async def completed(log: Log, store: ObjectStore, number: int = 1, source: str = "s") -> Event:
    """A group of two that passed, whose answers are "two" and "2", in the log and the store."""
    group = await members(log, store, number, source)
    return (await log.publish(group)).event


async def members(log: Log, store: ObjectStore, number: int, source: str = "s") -> SampleCompleted:
    tokenizer = PolicyTokenizer.load(policy_dir(TINY))
    sample = sample_id(source, number)
    for member, answer in enumerate(("two", "2")):
        asked, said = tokenizer.encode("1+1?"), tokenizer.encode(answer)
        rows, n = len(asked) + len(said), len(asked)
        mask = np.asarray([0] * n + [1] * len(said), np.uint8)
        columns = {
            "tokens": np.asarray([*asked, *said], np.int32),
            "loss_mask": mask,
            "logprobs": np.where(mask, -1, 0).astype(np.float32),
            "policy_version": np.zeros(rows, np.int32),
            "segments": np.asarray([[0, n, ROLES.index("user"), 0, 0], [n, rows, ROLES.index("assistant"), 0, 0]], np.int32),
        }  # fmt: skip
        sequence = sequence_id(sample, member)
        header = await write_payload(store, payload_key(log.run, source, attempt_id(sequence, 1)), columns)
        context = ContextMeta(
            offset=0, tokens=rows, generated=len(said), loss_spans=(Span(start=n, end=rows),), min_version=0, max_version=0
        )  # fmt: skip
        await log.publish(
            SequenceFinished(
                source=source, sample=sample, sequence=sequence, attempt=1, reward=1.0, termination="completed",
                turns=1, contexts=(context,), payload=header,
            )
        )  # fmt: skip
    ids = (sequence_id(sample, 0), sequence_id(sample, 1))
    return SampleCompleted(source=source, sample=sample, sequences=ids, rewards=(1.0, 1.0), failed=0)


async def graded(log: Log, number: int = 1, revision: int = 0, source: str = "s") -> SampleGraded:
    """The group's `sample.graded` of that revision, once it is there."""
    asked = SampleGraded(
        source=source, sample=sample_id(source, number), revision=revision, grader="x", rewards=()
    )
    async with asyncio.timeout(20):
        while (event := await log.last("sample.graded", source, asked.id())) is None:
            await asyncio.sleep(0.01)
    assert isinstance(event.fact, SampleGraded)
    return event.fact


async def settled(log: Log) -> None:
    """Every group that was completed is acknowledged."""
    async with asyncio.timeout(20):
        while True:
            # The service may not have begun to read.
            with contextlib.suppress(NotFoundError):
                info = await log.js.consumer_info(log.stream, "grader")
                if not info.num_ack_pending and not info.num_pending:
                    return
            await asyncio.sleep(0.01)


async def facts(log: Log) -> int:
    """How many `sample.graded` there are."""
    info = await log.js.stream_info(log.stream, subjects_filter=f"rl.{log.run}.sample.graded.>")
    return sum((info.state.subjects or {}).values())
