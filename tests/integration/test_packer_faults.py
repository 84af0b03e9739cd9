"""The packer when things break: damaged objects, killed processes, a store that is away."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.feed.feed import Feed, FeedError
from pipeline.feed.server import SocketTaken
from pipeline.feed.wire import socket_path
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from schemas.config import RunConfig
from schemas.config import Store as StoreConfig
from schemas.payload import Ref
from tests.packer_parts import (
    DEADLINE_S,
    MICROBATCHES,
    Columns,
    changed,
    check,
    packed_facts,
    packer,
    process,
    publish_batch,
    take,
    until,
    window_fds,
    yield_batch,
)
from tests.s3server import S3Server


async def test_what_cannot_be_packed_is_told_to_the_rank_and_the_packer_lives(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    def flip(data: bytes) -> bytes:
        return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]

    await yield_batch(log, store, 1, damage=flip)
    await publish_batch(log, 2, Ref(key="runs/r/plans/missing.json", bytes=10, crc32c=0))
    await publish_batch(log, 3, await store.create("runs/r/plans/bad.json", b"{}"))
    await yield_batch(log, store, 4)
    await yield_batch(log, store, 5, sidecar=flip)
    await yield_batch(log, store, 6, sidecar=lambda _: None)
    async with packer(packer_config, log):
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            for step, message in (
                (1, r"object runs/.*-a1\.safetensors is damaged: column \w+, block 0"),
                (2, r"plan of step 2 cannot be used: no object runs/r/plans/missing\.json"),
                (3, r"runs/r/plans/bad\.json is no plan"),
                (5, r"object runs/.*-a1\.advantages\.0\.safetensors is damaged: column advantages, block 0"),
                (6, r"no object runs/.*-a1\.advantages\.0\.safetensors"),
            ):
                with pytest.raises(FeedError, match=message):
                    await asyncio.to_thread(take, feed, step)
            check(4, 0, await asyncio.to_thread(take, feed, 4))
            batch = feed.batch(1)
            with pytest.raises(FeedError, match="damaged"):
                await asyncio.to_thread(next, batch)


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
    await yield_batch(log, store, 1)
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
        finally:
            rank.kill()
            await asyncio.to_thread(rank.wait)
            if rank.stdout is not None:
                rank.stdout.close()
        await until(lambda: window_fds() == 1)
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            check(1, 0, await asyncio.to_thread(take, feed, 1))
    gc.collect()
    assert window_fds() == 0


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

    monkeypatch.setattr("services.packer._seal", broken)
    await yield_batch(log, store, 1)
    with pytest.raises(RuntimeError, match="boom"):
        async with packer(packer_config, log) as task, asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task])
