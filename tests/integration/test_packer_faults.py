"""The packer when things break: damaged objects, killed processes, a store that is away."""

from __future__ import annotations

import asyncio
import gc
import io
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from pipeline.feed.feed import Feed, FeedError
from pipeline.feed.server import SocketTaken
from pipeline.feed.wire import socket_path
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from schemas.config import RunConfig
from schemas.config import Store as StoreConfig
from schemas.keys import image_key
from schemas.payload import ColumnHeader, ImageItem, Ref
from schemas.plan import Plan
from tests.packer_parts import (
    DEADLINE_S,
    LENGTH,
    MICROBATCHES,
    Columns,
    changed,
    check,
    columns_of,
    decide_quarantine,
    flip,
    packed_facts,
    packer,
    process,
    publish_batch,
    publish_trained,
    take,
    until,
    window_fds,
    yield_batch,
)
from tests.s3server import S3Server


class Taken(NamedTuple):
    revision: int
    arrays: Columns


async def test_what_cannot_be_packed_is_told_to_the_rank_and_the_packer_lives(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    await yield_batch(log, store, 1, damage=flip)
    await publish_batch(log, 2, Ref(key="runs/r/plans/missing.json", bytes=10, crc32c=0))
    await publish_batch(log, 3, await store.create("runs/r/plans/bad.json", b"{}"))
    plan = await yield_batch(log, store, 4)
    await yield_batch(log, store, 5, sidecar=flip)
    await yield_batch(log, store, 6, sidecar=lambda _: None)
    await publish_batch(log, 7, await store.create("runs/r/plans/7.json", without_ids(plan, 7)))
    async with packer(wanting(packer_config, "candidates"), log):
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            for step, message in (
                (1, r"object runs/.*-a1\.safetensors is damaged: column \w+, block 0"),
                (2, r"plan of step 2 cannot be used: no object runs/r/plans/missing\.json"),
                (3, r"runs/r/plans/bad\.json is no plan"),
                (5, r"object runs/.*-a1\.advantages\.0\.safetensors is damaged: column advantages, block 0"),
                (6, r"no object runs/.*-a1\.advantages\.0\.safetensors"),
                (7, r"plan of step 7 cannot be used: .*has no column 'candidates\.ids'"),
            ):
                with pytest.raises(FeedError, match=message):
                    await asyncio.to_thread(take, feed, step)
            check(4, 0, await asyncio.to_thread(take, feed, 4))
            batch = feed.batch(1)
            with pytest.raises(
                FeedError, match=r"step 1 has lost 2 of its 6 sequences, .* allows 1: restore"
            ):
                await asyncio.to_thread(next, batch)


def wanting(config: RunConfig, *columns: str) -> RunConfig:
    return config.model_copy(update={"packer": config.packer.model_copy(update={"columns": columns})})


def without_ids(plan: Plan, step: int) -> bytes:
    """The plan as another step's, with payloads that have candidate offsets and no candidates."""
    offsets = ColumnHeader(
        name="candidates.offsets", dtype="int64", shape=(LENGTH // 2 + 1,), offset=0, bytes=208, crc32c=(0,)
    )
    sequences = tuple(
        each.model_copy(
            update={"payload": each.payload.model_copy(update={"columns": (*each.payload.columns, offsets)})}
        )
        for each in plan.sequences
    )
    return plan.model_copy(update={"step": step, "sequences": sequences}).model_dump_json().encode()


@pytest.mark.parametrize("missing", [False, True])
async def test_a_damaged_sequence_is_left_out_and_its_batch_is_trained(
    packer_config: RunConfig, log: Log, store: ObjectStore, missing: bool
) -> None:
    """The sequence is of micro-batch 1 of rank 0. Rank 1 does not meet the damage, but hears of it."""
    plan = await yield_batch(log, store, 1, damage=(lambda _: None) if missing else flip, damaged=[2])
    lost = plan.sequences[2].sequence
    async with packer(packer_config, log), packer(packer_config, log, index=1):
        with (
            Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as zero,
            Feed(socket_path(packer_config, 1), timeout_s=DEADLINE_S) as one,
        ):
            reading = asyncio.create_task(asyncio.to_thread(revisions, zero, 0))
            (fact,), decided = await decide_quarantine(log, plan)
            assert (fact.sequence, fact.reason) == (lost, "missing" if missing else "damaged")
            assert (decided.revision, decided.without) == (1, (lost,))
            got = await reading
            # The first one was built before, and does not have the sequence: it may be told as either.
            assert [micro_batch.revision for micro_batch in got][1:] == [1, 1]
            # The rank takes the step again, and gets the same, as does the one of the other packer.
            again = await asyncio.to_thread(revisions, zero, 1)
            other = await asyncio.to_thread(revisions, one, 1)
    assert [micro_batch.revision for micro_batch in again + other] == [1] * 2 * MICROBATCHES
    for first, second in zip(got, again, strict=True):
        assert first.arrays.keys() == second.arrays.keys()
        for name, array in first.arrays.items():
            np.testing.assert_array_equal(array, second.arrays[name])
    for dp, each in enumerate((again, other)):
        for microbatch, micro_batch in enumerate(each):
            original = columns_of(100 + microbatch * 2 + dp)
            kept = (dp, microbatch) != (0, 1)
            assert micro_batch.arrays["cu_seqlens"].tolist() == [0, LENGTH]
            np.testing.assert_array_equal(micro_batch.arrays["tokens"], original["tokens"] * kept)
            assert micro_batch.arrays["loss_weights"].any() == kept


def revisions(feed: Feed, revision: int) -> list[Taken]:
    return [
        Taken(each.revision, {name: array.copy() for name, array in each.arrays.items()})
        for each in feed.batch(1, revision)
    ]


async def test_columns_that_no_payload_has_are_told_of(
    packer_config: RunConfig, log: Log, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    await yield_batch(log, store, 1)
    async with packer(wanting(packer_config, "routed_experts"), log):
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            first, *_ = await asyncio.to_thread(take, feed, 1)
    assert "routed_experts" not in first
    assert "no payload of step 1 has routed_experts, which packer.columns asks for" in caplog.text


async def test_images_come_with_their_rank_and_a_missing_one_costs_all_that_show_it(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    pixels = np.arange(28 * 28 * 3, dtype=np.uint8).reshape(28, 28, 3)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    data = written.getvalue()
    item = ImageItem(
        digest=sha256(data).hexdigest(), bytes=len(data), height=28, width=28, patches=4, start=3, end=4
    )
    plan = await yield_batch(log, store, 1, image=item)
    lenient = changed(packer_config, quarantine=0.5)
    names = [each.sequence for each in plan.sequences[:2]]
    with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
        async with packer(lenient, log):
            facts, decided = await decide_quarantine(log, plan, 2)
            assert sorted(fact.sequence for fact in facts) == names
            assert {fact.key for fact in facts} == {image_key(log.run, item.digest)}
            assert decided.revision == 2
            got = await asyncio.to_thread(revisions, feed, 2)
            # The exchange keeps its form, for the other ranks': with a black image, which nobody looks at.
            assert got[0].arrays["images.pixels"].shape == (pixels.size,)
            assert not got[0].arrays["images.pixels"].any()
            assert not got[0].arrays["loss_weights"].any()
        await publish_trained(log, 1)
        await store.create(image_key(log.run, item.digest), data)
        await yield_batch(log, store, 2, image=item)
        async with packer(packer_config, log):
            first, second, _ = await asyncio.to_thread(take, feed, 2)
    np.testing.assert_array_equal(first["images.pixels"], pixels.reshape(-1))
    assert first["images.local"].tolist() == [3]
    assert first["images.send_counts"].tolist() == [1, 1]
    assert "images.pixels" not in second


async def test_a_killed_packer_comes_back_and_no_window_is_lost_or_repeated(
    packer_config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    await yield_batch(log, store, 1)
    got: list[Columns] = []
    with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
        batch = feed.batch(1)
        async with process(packer_config, tmp_path) as first:
            micro_batch = await asyncio.to_thread(next, batch)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait)
            # The window outlives the packer: the rank's map holds the memory.
            got.append({name: array.copy() for name, array in micro_batch.arrays.items()})
        reading = asyncio.create_task(
            asyncio.to_thread(lambda: [{n: a.copy() for n, a in m.arrays.items()} for m in batch])
        )
        async with process(packer_config, tmp_path):
            got += await reading
    check(1, 0, got)
    facts = await packed_facts(log, MICROBATCHES)
    assert sorted(fact.microbatch for fact in facts) == [0, 1, 2]


async def test_a_killed_rank_gives_its_window_back(
    packer_config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    """The rank is a process that takes a window and is killed while it holds it."""
    length = 1 << 20
    await yield_batch(log, store, 1, length=length)
    async with packer(changed(packer_config, prefetch=1), log):
        await packed_facts(log, 1)
        gc.collect()
        windows = window_fds()
        assert windows == 1
        code = (
            "import sys, time\n"
            "from pipeline.feed.feed import Feed\n"
            "batch = Feed(sys.argv[1]).batch(1)\n"
            "held = next(batch)\n"
            "print('held', flush=True)\n"
            "time.sleep(600)\n"
        )
        rank = subprocess.Popen(
            [sys.executable, "-c", code, str(socket_path(packer_config, 0))],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert rank.stdout is not None
            assert await asyncio.to_thread(rank.stdout.readline) == b"held\n"
            await until(lambda: window_fds() == 2)  # the held one, and the next one built ahead
            await until(lambda: window_bytes() > 50 * length)
        finally:
            rank.kill()
            await asyncio.to_thread(rank.wait)
            if rank.stdout is not None:
                rank.stdout.close()
        await until(lambda: window_fds() == 1)
        # The pages went with it: what is left is the window that is built ahead.
        await until(lambda: 25 * length < window_bytes() < 50 * length)
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            tokens = (await asyncio.to_thread(next, batch)).arrays["tokens"]
            np.testing.assert_array_equal(tokens, columns_of(100, length)["tokens"])
            del tokens
            batch.close()
    gc.collect()
    assert window_fds() == 0
    assert [path.name for path in Path("/dev/shm").iterdir() if "packtrain" in path.name] == []
    assert "packtrain-window" not in Path("/proc/self/maps").read_text()


def window_bytes() -> int:
    """Memory of the windows of which this process has descriptors: that of the whole machine has other tests' in it."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        # The directory's own is gone already.
        with suppress(FileNotFoundError):
            if "packtrain-window" in str(link.readlink()):
                total += link.stat().st_blocks * 512
    return total


async def test_a_store_outage_is_waited_out(packer_config: RunConfig, log: Log, tmp_path: Path) -> None:
    server = S3Server(tmp_path / "s3")
    server.start()
    try:
        settings: Mapping[str, str] = {
            "url": "s3://bucket/p",
            "endpoint": server.endpoint,
            "credentials_file": str(server.credentials_file),
        }
        store_config = StoreConfig.model_validate(settings)
        ensure_bucket(store_config)
        store = ObjectStore.open(store_config, patience_s=0.5)
        await yield_batch(log, store, 1)
        server.stop()
        async with packer(packer_config, log, store) as task:
            with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
                reading = asyncio.create_task(asyncio.to_thread(take, feed, 1))
                # Longer than the store's patience, so that the packer itself must wait.
                done, _ = await asyncio.wait([reading, task], timeout=2)
                assert not done
                await asyncio.to_thread(server.start)
                check(1, 0, await reading)
    finally:
        server.stop()


async def test_a_second_packer_of_the_same_coordinate_is_refused(packer_config: RunConfig, log: Log) -> None:
    async with packer(packer_config, log):
        await until(lambda: socket_path(packer_config, 0).exists())
        with pytest.raises(SocketTaken):
            async with packer(packer_config, log) as task:
                await task
    assert not socket_path(packer_config, 0).exists()


async def test_an_unforeseen_fault_ends_the_service_instead_of_leaving_ranks_to_wait(
    packer_config: RunConfig, log: Log, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr("services.packer.building.frame", broken)
    await yield_batch(log, store, 1)
    with pytest.raises(RuntimeError, match="boom"):
        async with packer(packer_config, log) as task, asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task])
