"""Batches for a packer, the packer in this process or its own, and what its ranks must get."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.batch.quarantine import Quarantine
from pipeline.checksum import crc32c
from pipeline.feed.feed import Feed
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import encode_payload, write_payload
from schemas.config import RunConfig
from schemas.facts import (
    BatchReplanned,
    BatchYielded,
    SequenceQuarantined,
    SourceShare,
    StepTrained,
    WindowPacked,
)
from schemas.keys import payload_key, plan_key, sidecar_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ContextMeta, ImageItem, Ref, Span
from schemas.plan import Plan, PlanChanges, PlanImages, PlanRows, PlanSequence
from services.packer import serve
from services.process import Context

DEADLINE_S = 40
LENGTH = 50
MICROBATCHES = 3
PENALIZED = 5
"""Loss tokens at the start of every sequence with a sidecar, whose advantage the plan sets to -7."""
Columns = dict[str, np.ndarray[Any, Any]]


def changed(config: RunConfig, **packer: float) -> RunConfig:
    """The configuration with other values of `packer`, unchecked, and a token budget that fits any memory."""
    batch = config.batch.model_copy(update={"token_budget": 16})
    return config.model_copy(update={"packer": config.packer.model_copy(update=packer), "batch": batch})


def flip(data: bytes) -> bytes:
    """Damage to the object's last column."""
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def columns_of(seed: int, length: int = LENGTH) -> Columns:
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) >= length // 2).astype(np.uint8)
    return {
        "tokens": rng.integers(1, 412, length, np.int32),  # of the tiny policy
        "loss_mask": mask,
        "logprobs": -rng.random(length, np.float32) * mask,
        "policy_version": mask.astype(np.int32),
        "segments": np.zeros((1, 5), np.int32),
    }


def advantages_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random(LENGTH - LENGTH // 2, np.float32) - np.float32(0.5)


async def yield_batch(
    log: Log,
    store: ObjectStore,
    step: int,
    damage: Callable[[bytes], bytes | None] | None = None,
    sidecar: Callable[[bytes], bytes | None] | None = None,
    damaged: Collection[int] = range(2 * MICROBATCHES),
    length: int = LENGTH,
    image: ImageItem | None = None,
) -> Plan:
    """A batch of one sequence for each micro-batch of two ranks; the sequence's tokens depend on its place alone. The objects of
    the members `damaged` are what `damage` makes of them; None: there are none. With `sidecar` each has advantages by token, in an object of what it
    returns for the right one; None: in none. Both sequences of micro-batch 0 show the image, which rank 0 encodes."""
    places = [(dp, microbatch) for microbatch in range(MICROBATCHES) for dp in range(2)]
    sequences: list[PlanSequence] = []
    for member in range(len(places)):
        sequence = sequence_id(sample_id("s", step), member)
        key = payload_key(log.run, "s", attempt_id(sequence, 1))
        columns = columns_of(step * 100 + member, length)
        if damage is None or member not in damaged:
            header = await write_payload(store, key, columns)
        else:
            data, header = encode_payload(key, columns)
            if (spoilt := damage(data)) is not None:
                await store.create(key, spoilt)
        beside = None
        if sidecar is not None:
            made = {"advantages": advantages_of(step * 100 + member)}
            data, beside = encode_payload(sidecar_key(key, "advantages.0"), made, ())
            if (stored := sidecar(data)) is not None:
                await store.create(beside.key, stored)
        context = ContextMeta(
            offset=0,
            tokens=length,
            generated=length // 2,
            loss_spans=(Span(start=length // 2, end=length),),
            min_version=1,
            max_version=1,
            images=(image,) if image is not None and member < 2 else (),
        )
        sequences.append(
            PlanSequence(
                source="s",
                sample=sample_id("s", step),
                sequence=sequence,
                payload=header,
                contexts=(context,),
                advantages=beside,
            )
        )
    count = len(places)
    plan = Plan(
        run=log.run,
        step=step,
        policy_version=step - 1,
        dp=2,
        microbatches=MICROBATCHES,
        token_budget=max(1000, length),
        loss_tokens=count * length // 2,
        sequences=tuple(sequences),
        rows=PlanRows(
            sequence=tuple(range(count)),
            context=(0,) * count,
            dp=tuple(dp for dp, _ in places),
            microbatch=tuple(microbatch for _, microbatch in places),
            advantage=(1.0,) * count,
            loss_weight=(2 / (count * length),) * count,
        ),
        images=None if image is None else PlanImages(microbatch=(0,), digest=(image.digest,), encoder=(0,)),
        changes=None
        if sidecar is None
        else PlanChanges(
            row=tuple(range(count)),
            start=(LENGTH // 2,) * count,
            end=(LENGTH // 2 + PENALIZED,) * count,
            multiply=(0.0,) * count,
            add=(-7.0,) * count,
            keep=(True,) * count,
        ),
    )
    body = plan.model_dump_json().encode()
    await publish_batch(log, step, await store.create(plan_key(log.run, step, crc32c(body)), body))
    return plan


async def publish_batch(log: Log, step: int, ref: Ref) -> None:
    share = SourceShare(groups=1, sequences=6, tokens=300, loss_tokens=150, mean_reward=0.5, max_staleness=0)
    fact = BatchYielded(
        step=step,
        through=0,
        policy_version=step - 1,
        sources={"s": share},
        microbatches=MICROBATCHES,
        plan=ref,
    )
    await log.publish(fact)


async def decide_quarantine(
    log: Log, plan: Plan, count: int = 1
) -> tuple[list[SequenceQuarantined], BatchReplanned]:
    """Waits for so many sequences of the batch in quarantine, and decides on each as the sampler does. Returns the last decision."""
    facts: list[SequenceQuarantined] = []
    core = Quarantine()
    core.yielded(plan.step, [each.sequence for each in plan.sequences])
    async with asyncio.timeout(DEADLINE_S):
        async for event in log.subscribe("sequence.quarantined"):
            fact = event.fact
            if isinstance(fact, SequenceQuarantined) and fact.step == plan.step:
                core.quarantined(fact)
                decided = core.replanned(fact)
                assert decided is not None
                await log.publish(decided, event)
                facts.append(fact)
                if len(facts) == count:
                    return facts, decided
    raise AssertionError("the log has ended")


async def publish_trained(log: Log, step: int) -> None:
    ref = Ref(key="c", bytes=0, crc32c=0)
    fact = StepTrained(
        step=step,
        parent=None,
        weights=ref,
        optimizer=ref,
        loss=0,
        grad_norm=0,
        kl=0,
        loss_tokens=1,
        seconds=1,
    )
    await log.publish(fact)


@asynccontextmanager
async def packer(
    config: RunConfig, log: Log, store: ObjectStore | None = None, index: int = 0
) -> AsyncIterator[asyncio.Task[None]]:
    """The service in this process. Leaves when told to stop, and lets its exception out."""
    stop = asyncio.Event()
    opened = store or ObjectStore.open(config.store, patience_s=1)
    ctx = Context(config, f"packer-{index}", log, opened, stop, logging.getLogger("packtrain"), index)
    task = asyncio.create_task(serve(ctx))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task])
    task.result()


@asynccontextmanager
async def process(config: RunConfig, tmp_path: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The service as a process of its own."""
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    code = (
        "import asyncio, sys, pathlib\n"
        "from schemas.config import RunConfig\n"
        "from services.packer import serve\n"
        "from services.process import run_service\n"
        "config = RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text())\n"
        "asyncio.run(run_service(serve, config, 'packer-0', 0))\n"
    )
    with (tmp_path / "packer.log").open("ab") as out:
        running = subprocess.Popen(
            [sys.executable, "-c", code, str(file)], stderr=out, cwd=Path(__file__).parents[1]
        )
    try:
        yield running
    finally:
        running.kill()
        await asyncio.to_thread(running.wait)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def packed_facts(log: Log, count: int) -> list[WindowPacked]:
    found: list[WindowPacked] = []
    async with asyncio.timeout(DEADLINE_S):
        async for event in log.subscribe("window.packed"):
            assert isinstance(event.fact, WindowPacked)
            found.append(event.fact)
            if len(found) == count:
                break
    return found


def take(feed: Feed, step: int, revision: int = 0) -> list[Columns]:
    return [
        {name: array.copy() for name, array in batch.arrays.items()} for batch in feed.batch(step, revision)
    ]


def check(step: int, dp: int, got: list[Columns], sidecar: bool = False) -> None:
    assert len(got) == MICROBATCHES
    for microbatch, arrays in enumerate(got):
        original = columns_of(step * 100 + microbatch * 2 + dp)
        np.testing.assert_array_equal(arrays["tokens"], original["tokens"])
        np.testing.assert_array_equal(arrays["labels"], np.append(original["tokens"][1:], 0))
        np.testing.assert_array_equal(arrays["loss_mask"], np.append(original["loss_mask"][1:], 0))
        np.testing.assert_array_equal(arrays["logprobs"], np.append(original["logprobs"][1:], 0))
        advantages = np.ones(LENGTH - LENGTH // 2, np.float32)
        if sidecar:
            advantages = advantages_of(step * 100 + microbatch * 2 + dp)
            advantages[:PENALIZED] = -7
        whole = np.concatenate([np.zeros(LENGTH // 2 - 1, np.float32), advantages, [0]])
        np.testing.assert_array_equal(arrays["advantages"], whole)
        assert arrays["cu_seqlens"].tolist() == [0, LENGTH]


def window_fds() -> int:
    """Descriptors of windows that this process has."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += "packtrain-window" in str(link.readlink())
        except FileNotFoundError:
            continue  # the directory's own
    return count
