"""Packers of all coordinates of a trainer with context, tensor and pipeline parallelism: what each of its ranks gets, twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from pipeline.batch.windows import Read, Window, pack, plan_window, with_offsets, with_segments
from pipeline.checksum import crc32c
from pipeline.feed.feed import Feed, MicroBatch, open_feed
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload
from schemas.config import RunConfig
from schemas.facts import BatchReplanned
from schemas.keys import payload_key, plan_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ContextMeta, Span
from schemas.plan import Plan, PlanRows, PlanSequence
from tests.packer_parts import DEADLINE_S, Columns, packed_facts, packer, publish_batch, publish_trained

MICROBATCHES = 3
LENGTHS = (37, 16)
"""Tokens of the contexts of every sequence."""
LAYERS, K = 4, 2


@pytest.fixture
def config(packer_config: RunConfig) -> RunConfig:
    batch = {"dp": 1, "cp": 2, "tp": 2, "pp": 2, "layout": "megatron"}
    settings = packer_config.model_dump(mode="json")
    settings["packer"]["columns"] = ["routed_experts", "candidates"]
    settings["trainer"]["kind"] = "external"
    return RunConfig.model_validate({**settings, "batch": {**settings["batch"], **batch}})


@pytest.fixture
async def serving(config: RunConfig, log: Log) -> AsyncIterator[RunConfig]:
    async with AsyncExitStack() as stack:
        for number in range(config.batch.sizes.packers):
            await stack.enter_async_context(packer(config, log, index=number))
        yield config


def columns_of(seed: int) -> Columns:
    rng = np.random.default_rng(seed)
    mask, segments, at = np.zeros(sum(LENGTHS), np.uint8), [], 0
    for number, length in enumerate(LENGTHS):
        half = at + length // 2
        mask[half : at + length] = 1
        segments += [(at, half, 0, 0, number), (half, at + length, 1, 3, number)]
        at += length
    sets = rng.integers(0, 5, int(mask.sum()))
    return {
        "tokens": rng.integers(1, 999, at, np.int32),
        "loss_mask": mask,
        "logprobs": -rng.random(at, np.float32) * mask,
        "policy_version": mask.astype(np.int32),
        "segments": np.array(segments, np.int32),
        "routed_experts.L0-1": rng.integers(0, 255, (at, 2, K), np.uint8),
        "routed_experts.L2-3": rng.integers(0, 255, (at, 2, K), np.uint8),
        "candidates.offsets": np.concatenate([[0], np.cumsum(sets)]).astype(np.int64),
        "candidates.ids": rng.integers(0, 999, int(sets.sum()), np.int32),
    }


async def yield_batch(log: Log, store: ObjectStore, step: int) -> tuple[Plan, dict[str, Columns]]:
    """A batch of two sequences a micro-batch, of which the first one's loss spans are left to its payload."""
    originals: dict[str, Columns] = {}
    sequences: list[PlanSequence] = []
    for member in range(2 * MICROBATCHES):
        name = sequence_id(sample_id("s", step), member)
        key = payload_key(log.run, "s", attempt_id(name, 1))
        originals[key] = columns_of(step * 100 + member)
        header = await write_payload(store, key, originals[key])
        contexts, at = [], 0
        for length in LENGTHS:
            loss = length - length // 2
            spans = {"spilled": loss, "loss_spans": ()} if member == 0 else {"loss_spans": (Span(start=length // 2, end=length),)}  # fmt: skip
            place = {"offset": at, "tokens": length, "generated": loss, "min_version": 1, "max_version": 1}
            contexts.append(ContextMeta.model_validate({**place, **spans}))
            at += length
        sequences.append(
            PlanSequence(
                source="s",
                sample=sample_id("s", step),
                sequence=name,
                payload=header,
                contexts=tuple(contexts),
            )
        )
    rows = [(member, context) for member in range(len(sequences)) for context in range(len(LENGTHS))]
    loss = len(sequences) * sum(length - length // 2 for length in LENGTHS)
    plan = Plan(
        run=log.run,
        step=step,
        policy_version=step - 1,
        dp=1,
        cp=2,
        tp=2,
        layout="megatron",
        microbatches=MICROBATCHES,
        token_budget=1000,
        loss_tokens=loss,
        sequences=tuple(sequences),
        rows=PlanRows(
            sequence=tuple(member for member, _ in rows),
            context=tuple(context for _, context in rows),
            dp=(0,) * len(rows),
            microbatch=tuple(member // 2 for member, _ in rows),
            advantage=tuple(float(i) for i in range(len(rows))),
            loss_weight=(1 / loss,) * len(rows),
        ),
    )
    body = plan.model_dump_json().encode()
    await publish_batch(log, step, await store.create(plan_key(log.run, step, crc32c(body)), body))
    return plan, originals


def given(originals: Mapping[str, Columns], reads: Sequence[Read]) -> list[dict[str, Any]]:
    return [
        {
            name: np.concatenate([originals[read.header.key][name][s.start : s.end] for s in spans])
            for name, spans in read.spans.items()
        }
        for read in reads
    ]


def expected(
    plan: Plan, originals: Mapping[str, Columns], config: RunConfig, rank: int, microbatch: int, without: frozenset[str]
) -> Columns:  # fmt: skip
    """The window of the rank's packer, from the sequences' own columns, by the pure functions alone."""
    sizes = config.batch.sizes
    at = sizes.coordinate(sizes.packer_of(rank))
    window: Window = plan_window(
        plan, at.dp, microbatch, at.cp, at.pp, stages=sizes.pp, columns=config.packer.columns, without=without
    )
    window = with_segments(window, given(originals, window.segment_reads))
    if window.offset_reads:
        window = with_offsets(window, given(originals, window.offset_reads))
    return pack(window, given(originals, window.reads))


class Taken:
    """A micro-batch as it was, after it is closed."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self.arrays = {name: array.copy() for name, array in micro_batch.arrays.items()}
        self.meta, self.revision = micro_batch.meta, micro_batch.revision


def take(feed: Feed, step: int, revision: int = 0) -> list[Taken]:
    return [Taken(micro_batch) for micro_batch in feed.batch(step, revision)]


def same(got: Columns, wanted: Columns) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(got[name], array, err_msg=name)


async def everybody(config: RunConfig, step: int, revision: int = 0) -> list[list[Taken]]:
    """What every rank gets, from feeds that a process of its own would open: nothing is left of them afterwards."""
    feeds = [open_feed(config, rank, timeout_s=DEADLINE_S) for rank in range(config.batch.sizes.ranks)]
    try:
        # Threads of their own: those of the loop are the packers', and fewer than ranks.
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(len(feeds))
        with threads:
            return await asyncio.gather(
                *(loop.run_in_executor(threads, take, feed, step, revision) for feed in feeds)
            )
    finally:
        for feed in feeds:
            feed.close()


async def test_every_rank_gets_its_part_and_gets_it_again(
    serving: RunConfig, log: Log, store: ObjectStore
) -> None:
    """The trainer dies in step 2 after step 1 is in its checkpoint, and again after the step was planned anew."""
    batch = await yield_batch(log, store, 1)
    ranks = range(serving.batch.sizes.ranks)
    got = await everybody(serving, 1)
    for rank in ranks:
        for microbatch, taken in enumerate(got[rank]):
            same(taken.arrays, expected(*batch, serving, rank, microbatch, frozenset()))
            assert {name: taken.meta[name] for name in ("step", "microbatch", "layout", "tp", "cp_size")} == {
                "step": 1, "microbatch": microbatch, "layout": "megatron", "tp": 2, "cp_size": 2,
            }  # fmt: skip
            # Megatron's numbers: tensor-parallel fastest, then context, data and pipeline.
            assert (taken.meta["cp"], taken.meta["pp"]) == (rank // 2 % 2, rank // 4)
    first, last = got[0][0].arrays, got[-1][0].arrays
    assert "labels" not in first
    assert "tokens" not in last
    assert last["candidates.ids"].any()
    assert first["routed_experts"].shape[1:] == last["routed_experts"].shape[1:] == (2, K)
    facts = await packed_facts(log, serving.batch.sizes.packers * MICROBATCHES)
    assert {(fact.cp, fact.pp, fact.microbatch) for fact in facts} == {
        (cp, pp, microbatch) for cp in range(2) for pp in range(2) for microbatch in range(MICROBATCHES)
    }

    batch = await yield_batch(log, store, 2)
    await publish_trained(log, 1)
    once, twice = await everybody(serving, 2), await everybody(serving, 2)
    lost = batch[0].sequences[3].sequence
    await log.publish(BatchReplanned(step=2, revision=1, without=(lost,)))
    anew, again = await everybody(serving, 2, revision=1), await everybody(serving, 2, revision=1)
    for rank in ranks:
        for microbatch in range(MICROBATCHES):
            one, two = once[rank][microbatch], twice[rank][microbatch]
            same(one.arrays, expected(*batch, serving, rank, microbatch, frozenset()))
            same(two.arrays, one.arrays)
            assert two.meta == one.meta
            three, four = anew[rank][microbatch], again[rank][microbatch]
            assert (one.revision, three.revision, four.revision) == (0, 1, 1)
            same(three.arrays, expected(*batch, serving, rank, microbatch, frozenset({lost})))
            same(four.arrays, three.arrays)
    blank = anew[-1][1].arrays
    assert 0 < blank["loss_mask"].sum() < once[-1][1].arrays["loss_mask"].sum()


async def test_a_window_that_is_held_is_built_anew_when_it_is_left(
    serving: RunConfig, log: Log, store: ObjectStore
) -> None:
    """Two ranks of one packer: one trains on a window that the other one wants without a sequence."""
    plan, originals = await yield_batch(log, store, 1)
    with (
        open_feed(serving, 6, timeout_s=DEADLINE_S) as six,
        open_feed(serving, 7, timeout_s=DEADLINE_S) as seven,
    ):
        held = six.batch(1)
        await asyncio.to_thread(next, held)
        lost = plan.sequences[0].sequence
        await log.publish(BatchReplanned(step=1, revision=1, without=(lost,)))
        asking = seven.batch(1, revision=1)
        waiting = asyncio.create_task(asyncio.to_thread(lambda: Taken(next(asking))))
        # One that does not say so shares the copy: their collectives are of one window.
        with open_feed(serving, 7, timeout_s=DEADLINE_S) as sharing:
            shared = sharing.batch(1)
            assert (await asyncio.to_thread(next, shared)).revision == 0
            shared.close()
        assert not waiting.done()
        held.close()
        got = await waiting
        assert got.revision == 1
        same(got.arrays, expected(plan, originals, serving, 7, 0, frozenset({lost})))
        asking.close()


def test_a_feed_is_of_a_rank_that_there_is(config: RunConfig) -> None:
    with pytest.raises(ValueError, match="no rank 8"):
        open_feed(config, 8)
    with pytest.raises(ValueError, match=r"give the sizes \(dp, cp, tp, pp\)"):
        open_feed(config.packer.socket_dir, 0)
    by_config, by_sizes = open_feed(config, 5), open_feed(config.packer.socket_dir, 5, config.batch.sizes)
    assert by_config.path == by_sizes.path
    assert by_config.path.name == "packer-2.sock"
