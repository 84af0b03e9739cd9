"""Finished sequences with real payloads, a teacher service around them, and what a model itself says of their tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.engines.tiny.model import Llama, load_policy
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload
from schemas.config import Broker, RunConfig
from schemas.facts import SequenceFinished, SequenceScored
from schemas.keys import payload_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ContextMeta, Span
from services import teacher
from services.process import Context
from tests.tiny_engine_parts import CONFIG


def teaching(
    tmp_path: Path, broker: Broker, run: str, teachers: Sequence[dict[str, Any]], **sources: list[str]
) -> RunConfig:
    """A run whose sources, by name, have these teachers."""
    source = {"pool": "p", "groups": 1, "group_size": 2, "environment": {"kind": "arithmetic"}}
    return RunConfig.model_validate(
        {
            "run": run,
            "directory": str(tmp_path),
            "broker": broker.model_dump(),
            "store": {"url": f"file://{tmp_path}/objects"},
            "pools": [{"name": "p", "harness": "chat"}],
            "teachers": list(teachers),
            "sources": [{"name": name, "teachers": named, **source} for name, named in sources.items()],
        }
    )


async def finished(
    store: ObjectStore,
    run: str,
    source: str,
    member: int,
    contexts: Sequence[tuple[list[int], list[tuple[int, int]]]],
    spill: bool = False,
) -> SequenceFinished:
    """A sequence of contexts, (tokens, loss spans) each, whose payload is in the store. spill: a third context leaves its spans to the
    payload's segments."""
    sample = sample_id(source, 0)
    sequence = sequence_id(sample, member)
    tokens = np.array([token for row, _ in contexts for token in row], np.int32)
    metas, at = [], 0
    segments: list[tuple[int, int, int, int, int]] = []
    for number, (row, spans) in enumerate(contexts):
        spilled = sum(end - start for start, end in spans) if number == 2 and spill else 0
        segments.append((at, at, 0, 0, number))
        segments += [(at + start, at + end, 2, 3, number) for start, end in spans]
        metas.append(
            ContextMeta(
                offset=at,
                tokens=len(row),
                generated=sum(end - start for start, end in spans),
                loss_spans=tuple(Span(start=start, end=end) for start, end in spans) if not spilled else (),
                spilled=spilled,
                min_version=0,
                max_version=0,
            )
        )
        at += len(row)
    payload = await write_payload(
        store,
        payload_key(run, source, attempt_id(sequence, 1)),
        {
            "tokens": tokens,
            "loss_mask": np.zeros(at, np.uint8),
            "logprobs": np.zeros(at, np.float32),
            "policy_version": np.zeros(at, np.int32),
            "segments": np.array(segments, np.int32),
        },
    )
    return SequenceFinished(
        source=source,
        sample=sample,
        sequence=sequence,
        attempt=1,
        reward=1.0,
        termination="completed",
        turns=1,
        contexts=tuple(metas),
        payload=payload,
    )


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count).tolist()


def said(policy: Path, row: Sequence[int]) -> torch.Tensor:
    """Log-probabilities over the vocabulary of tokens 1 to T-1, [T-1, V], by one forward pass."""
    config, state = load_policy(policy)
    model = Llama(config).eval()
    model.load_state_dict(state)
    with torch.inference_mode():
        return model(torch.tensor([row])).log_softmax(-1)[0, :-1]


@asynccontextmanager
async def serving(config: RunConfig, store: ObjectStore) -> AsyncIterator[None]:
    """The service on this loop; it is stopped in the end, and must end well."""
    log, stop = await Log.connect(config.broker, config.run, "teacher"), asyncio.Event()
    logger = logging.getLogger("packtrain.test")
    try:
        # A service that fails ends the test that waits for its answers.
        async with asyncio.TaskGroup() as group, asyncio.timeout(100):
            group.create_task(teacher.serve(Context(config, "teacher", log, store, stop, logger)))
            yield
            stop.set()
    finally:
        await log.close()


async def answers(log: Log, count: int) -> dict[tuple[str, str], SequenceScored]:
    """So many answers, by (sequence, teacher). Each is there once."""
    found: dict[tuple[str, str], SequenceScored] = {}
    async with asyncio.timeout(60):
        async for event in log.subscribe("sequence.scored"):
            assert isinstance(event.fact, SequenceScored)
            key = (event.fact.sequence, event.fact.teacher)
            assert key not in found
            found[key] = event.fact
            if len(found) == count:
                break
    return found
