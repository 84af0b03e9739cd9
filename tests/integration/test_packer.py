"""The packer against a real broker and a real store: what its ranks get, how far ahead, in how much memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import pytest

from pipeline.batch.windows import estimate
from pipeline.feed.feed import Feed, FeedError
from pipeline.feed.memfd import Draft, Layout, SealedWindow
from pipeline.feed.wire import Request, frame, receive_answer, socket_path
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import RunConfig
from tests.packer_parts import (
    DEADLINE_S,
    LENGTH,
    MICROBATCHES,
    changed,
    check,
    packed_facts,
    packer,
    publish_trained,
    take,
    until,
    yield_batch,
)


async def test_two_ranks_train_two_batches(packer_config: RunConfig, log: Log, store: ObjectStore) -> None:
    """The second has advantages by token, and penalties."""
    weights = 0.0
    async with packer(packer_config, log), packer(packer_config, log, index=1):
        with (
            Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as zero,
            Feed(socket_path(packer_config, 1), timeout_s=DEADLINE_S) as one,
        ):
            for step in (1, 2):
                reading = [asyncio.create_task(asyncio.to_thread(take, feed, step)) for feed in (zero, one)]
                by_token = step == 2
                # The ranks wait for it.
                await yield_batch(log, store, step, sidecar=(lambda data: data) if by_token else None)
                for dp, task in enumerate(reading):
                    got = await task
                    check(step, dp, got, by_token)
                    weights += sum(float(arrays["loss_weights"].sum()) for arrays in got)
                await publish_trained(log, step)
    assert weights == pytest.approx(2.0)
    facts = await packed_facts(log, 2 * 2 * MICROBATCHES)
    assert {(fact.step, fact.dp, fact.microbatch) for fact in facts} == {
        (step, dp, microbatch) for step in (1, 2) for dp in (0, 1) for microbatch in range(MICROBATCHES)
    }
    for fact in facts:
        assert fact.tokens == LENGTH
        assert fact.bytes > LENGTH * 44
        # Nothing but the named columns: 13 bytes a token, 4 of an advantage by token.
        needed = LENGTH * 13 + (LENGTH // 2 * 4 if fact.step == 2 else 0)
        assert needed <= fact.fetched < needed + 2000


async def test_windows_are_built_ahead_and_no_further(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    async with packer(changed(packer_config, prefetch=2), log):
        await yield_batch(log, store, 1)
        assert [
            fact.microbatch for fact in sorted(await packed_facts(log, 2), key=lambda f: f.microbatch)
        ] == [0, 1]
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            await asyncio.to_thread(next, batch)
            await packed_facts(log, 3)
            batch.close()


async def test_memory_is_bounded_and_the_ranks_go_on(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    await yield_batch(log, store, 1)
    async with packer(changed(packer_config, prefetch=1), log):
        size = (await packed_facts(log, 1))[0].bytes
    # Room for one window and a half: each is dropped before the next is built.
    async with packer(changed(packer_config, prefetch=8, memory_bytes=size * 3 // 2), log):
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            check(1, 0, await asyncio.to_thread(take, feed, 1))


async def test_windows_larger_than_they_were_thought_to_be_are_within_the_memory(
    packer_config: RunConfig, log: Log, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As candidate sets may be: nothing is known of them but their mean, until they are looked at."""
    await yield_batch(log, store, 1)
    async with packer(changed(packer_config, prefetch=1), log):
        size = (await packed_facts(log, 1))[0].bytes
    memory, standing = size * 3 // 2, list[int]()

    class Counted(Draft):
        def __init__(self, layout: Layout) -> None:
            super().__init__(layout)
            standing.append(sum(window_sizes().values()))

    monkeypatch.setattr("services.packer.steps.unknown_bytes", lambda window: -estimate(window))
    monkeypatch.setattr("services.packer.building.Draft", Counted)
    async with packer(changed(packer_config, prefetch=8, memory_bytes=memory), log):
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            check(1, 0, await asyncio.to_thread(take, feed, 1))
    assert len(standing) >= MICROBATCHES
    assert max(standing) <= memory


def window_sizes() -> dict[int, int]:
    """Bytes of the windows of which this process has a descriptor, by inode."""
    found: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "packtrain-window" in str(link.readlink()):
                found[link.stat().st_ino] = link.stat().st_size
    return found


async def test_a_window_over_the_budget_is_refused_with_the_number_needed(
    packer_config: RunConfig, log: Log, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    await yield_batch(log, store, 1)
    needed = r"needs \d+ bytes, packer\.memory_bytes is 1000; raise it to at least \d+"
    async with packer(changed(packer_config, memory_bytes=1000), log):
        # Told when the batch comes, for each of its windows, before anybody asks.
        await until(lambda: len(re.findall(needed, caplog.text)) == MICROBATCHES)
        with (
            Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed,
            pytest.raises(FeedError, match=needed),
        ):
            await asyncio.to_thread(take, feed, 1)


async def test_a_packer_without_room_for_its_largest_window_does_not_start(
    packer_config: RunConfig, log: Log
) -> None:
    budget = packer_config.batch.model_copy(update={"token_budget": 24_000})
    small = packer_config.model_copy(
        update={"batch": budget, "packer": packer_config.packer.model_copy(update={"memory_bytes": 1 << 20})}
    )
    with pytest.raises(ValueError, match=r"memory_bytes is 1048576: raise it to at least 1056000"):
        async with packer(small, log) as task:
            await asyncio.wait([task])
    assert not socket_path(packer_config, 0).exists()


async def test_trained_steps_are_over(packer_config: RunConfig, log: Log, store: ObjectStore) -> None:
    await yield_batch(log, store, 1)
    await publish_trained(log, 1)
    async with packer(packer_config, log):
        await yield_batch(log, store, 2)
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            check(2, 0, await asyncio.to_thread(take, feed, 2))
            with pytest.raises(FeedError, match="step 1 is trained already"):
                await asyncio.to_thread(take, feed, 1)
    assert {fact.step for fact in await packed_facts(log, 3)} == {2}


async def test_the_packer_and_its_rank_share_pages_that_neither_can_write(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    import mmap
    import socket

    await yield_batch(log, store, 1)
    async with packer(packer_config, log):
        await packed_facts(log, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
            rank.connect(str(socket_path(packer_config, 0)))
            rank.sendall(frame(Request(kind="ask", step=1, microbatch=0)))
            answer, fd = await asyncio.to_thread(receive_answer, rank, lambda: None)
            assert fd is not None
            assert (answer.microbatches, answer.last) == (MICROBATCHES, False)
            size = os.fstat(fd).st_size
            with pytest.raises(PermissionError):
                mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            window = SealedWindow(fd)
            assert window.meta["sequences"] == ["s-000001-0"]
            window.close()
