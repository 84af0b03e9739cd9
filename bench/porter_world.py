"""Stores, payloads and plans for the benchmark of the porter."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from report import Figure

from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from pipeline.store.payload import write_payload
from schemas.config import Store as StoreConfig
from schemas.keys import payload_key
from schemas.parallel import LayoutName
from schemas.payload import ContextMeta, PayloadHeader, Span
from schemas.plan import Plan, PlanRows, PlanSequence

sys.path.insert(1, str(Path(__file__).parents[1]))
from tests.s3server import S3Server

Columns = dict[str, np.ndarray[Any, Any]]
LAYERS, TOP = 47, 8
ROUTING = f"routed_experts.L0-{LAYERS - 1}"
ROUTED = LAYERS * TOP
"""Expert indices of a token: one byte each where there are 256 experts or fewer."""
NARROW = 4 + 1 + 4 + 4
"""Bytes of a token in tokens, loss_mask, logprobs and policy_version."""
RUN, SOURCE = "bench", "s"


def figure(name: str, value: float, unit: str, goal: float, against: float, better: str = "higher") -> Figure:
    """`goal` 0: none, it is told only."""
    return {
        "name": f"porter.{name}",
        "value": round(value, 5),
        "unit": unit,
        "goal": round(goal, 5),
        "better": better,
        "against": round(against, 5),
    }


@asynccontextmanager
async def stores(directory: Path) -> AsyncIterator[dict[str, StoreConfig]]:
    """A store of files, and one of a SeaweedFS, by name; both on the disk of `directory`."""
    server = S3Server(directory / "s3server")
    await asyncio.to_thread(server.start)
    try:
        bucket = StoreConfig.model_validate(
            {
                "url": "s3://bench/porter",
                "endpoint": server.endpoint,
                "credentials_file": str(server.credentials_file),
            }
        )
        await asyncio.to_thread(ensure_bucket, bucket)
        yield {
            "files": StoreConfig.model_validate({"url": f"file://{directory}/objects"}),
            "s3": bucket,
        }
    finally:
        server.stop()


def columns_of(tokens: int, routing: bool, seed: int = 0) -> Columns:
    """A payload's columns. The policy sampled every token but the first: no column may be left out for any row."""
    rng = np.random.default_rng(seed)
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    columns: Columns = {
        "tokens": rng.integers(1, 150_000, tokens, np.int32),
        "loss_mask": mask,
        "logprobs": -rng.random(tokens, np.float32) * mask,
        "policy_version": mask.astype(np.int32),
        "segments": np.zeros((1, 5), np.int32),
    }
    if routing:
        columns[ROUTING] = rng.integers(0, 256, (tokens, LAYERS, TOP), np.uint8)
    return columns


async def written(
    store: ObjectStore, name: str, lengths: Sequence[int], routing: bool
) -> list[PayloadHeader]:
    """A payload of each length."""
    return [
        await write_payload(
            store, payload_key(RUN, SOURCE, f"{name}-{i}-a1"), columns_of(tokens, routing, seed=i)
        )
        for i, tokens in enumerate(lengths)
    ]


def plan_of(
    headers: Sequence[PayloadHeader], microbatches: int, cp: int = 1, layout: LayoutName = "megatron"
) -> Plan:
    """A plan of one context of each payload, dealt out to the micro-batches."""
    lengths = [header.column("tokens").shape[0] for header in headers]
    count, loss = len(headers), sum(lengths) - len(headers)
    sequences = tuple(
        PlanSequence(
            source=SOURCE,
            sample=f"{SOURCE}-000001",
            sequence=f"{SOURCE}-000001-{i}",
            payload=header,
            contexts=(
                ContextMeta(
                    offset=0,
                    tokens=tokens,
                    generated=tokens - 1,
                    loss_spans=(Span(start=1, end=tokens),),
                    min_version=1,
                    max_version=1,
                ),
            ),
        )
        for i, (header, tokens) in enumerate(zip(headers, lengths, strict=True))
    )
    plan = Plan(
        run=RUN,
        step=1,
        policy_version=0,
        dp=1,
        cp=cp,
        layout=layout,
        microbatches=microbatches,
        token_budget=sum(lengths) + 4096 * cp,
        loss_tokens=loss,
        sequences=sequences,
        rows=PlanRows(
            sequence=tuple(range(count)),
            context=(0,) * count,
            dp=(0,) * count,
            microbatch=tuple(sorted(i % microbatches for i in range(count))),
            advantage=(1.0,) * count,
            loss_weight=(1 / loss,) * count,
        ),
    )
    plan.check()
    return plan


async def in_turn(rounds: int, works: Sequence[Callable[[int], Awaitable[object]]]) -> list[float]:
    """Median seconds of each of the works, which take turns, so that what disturbs the machine disturbs all alike."""
    taken: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, times in zip(works, taken, strict=True):
            began = time.perf_counter()
            await work(number)
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in taken]


async def seconds(rounds: int, work: Callable[[int], Awaitable[object]]) -> float:
    """Median seconds of a round, after one that is not counted."""
    return (await in_turn(rounds, [work]))[0]
