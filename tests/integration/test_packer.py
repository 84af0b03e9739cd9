"""The packer against a real broker, real stores and real processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checksum import crc32c
from pipeline.feed.feed import Feed, FeedError
from pipeline.feed.memfd import SealedWindow
from pipeline.feed.server import SocketTaken
from pipeline.feed.wire import Request, frame, receive_answer, socket_path
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from pipeline.store.payload import encode_payload, write_payload
from schemas.config import Broker, RunConfig
from schemas.config import Store as StoreConfig
from schemas.facts import BatchYielded, SourceShare, StepTrained, WindowPacked
from schemas.keys import payload_key, plan_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ContextMeta, Ref, Span
from schemas.plan import Plan, PlanRows, PlanSequence
from services.packer import serve
from services.process import Context
from tests.s3server import S3Server

DEADLINE_S = 40
LENGTH = 50
MICROBATCHES = 3
Columns = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pt") as directory:
        yield Path(directory)


@pytest.fixture
def config(run_name: str, broker: Broker, tmp_path: Path, sockets: Path) -> RunConfig:
    environment = {"kind": "arithmetic"}
    return RunConfig.model_validate(
        {
            "run": run_name,
            "directory": str(tmp_path),
            "broker": broker.model_dump(),
            "store": {"url": f"file://{tmp_path}/objects"},
            "batch": {"dp": 2},
            "packer": {"socket_dir": str(sockets)},
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [{"name": "s", "pool": "p", "groups": 1, "environment": environment}],
        }
    )


def changed(config: RunConfig, **packer: int) -> RunConfig:
    return config.model_copy(update={"packer": config.packer.model_copy(update=packer)})


def columns_of(seed: int) -> Columns:
    rng = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) >= LENGTH // 2).astype(np.uint8)
    return {
        "tokens": rng.integers(1, 999, LENGTH, np.int32),
        "loss_mask": mask,
        "logprobs": -rng.random(LENGTH, np.float32) * mask,
        "policy_version": mask.astype(np.int32),
        "segments": np.zeros((1, 5), np.int32),
    }


async def yield_batch(
    log: Log, store: ObjectStore, step: int, damage: Callable[[bytes], bytes] | None = None
) -> Plan:
    """A batch of one sequence for each micro-batch of two ranks; the sequence's tokens depend on its place alone."""
    places = [(dp, microbatch) for microbatch in range(MICROBATCHES) for dp in range(2)]
    sequences: list[PlanSequence] = []
    for member in range(len(places)):
        sequence = sequence_id(sample_id("s", step), member)
        key = payload_key(log.run, "s", attempt_id(sequence, 1))
        columns = columns_of(step * 100 + member)
        if damage is None:
            header = await write_payload(store, key, columns)
        else:
            data, header = encode_payload(key, columns)
            await store.create(key, damage(data))
        context = ContextMeta(
            offset=0,
            tokens=LENGTH,
            generated=LENGTH // 2,
            loss_spans=(Span(start=LENGTH // 2, end=LENGTH),),
            min_version=1,
            max_version=1,
        )
        sequences.append(
            PlanSequence(
                source="s",
                sample=sample_id("s", step),
                sequence=sequence,
                payload=header,
                contexts=(context,),
            )
        )
    count = len(places)
    plan = Plan(
        run=log.run,
        step=step,
        policy_version=step - 1,
        dp=2,
        microbatches=MICROBATCHES,
        token_budget=1000,
        loss_tokens=count * LENGTH // 2,
        sequences=tuple(sequences),
        rows=PlanRows(
            sequence=tuple(range(count)),
            context=(0,) * count,
            dp=tuple(dp for dp, _ in places),
            microbatch=tuple(microbatch for _, microbatch in places),
            advantage=(1.0,) * count,
            loss_weight=(2 / (count * LENGTH),) * count,
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
            [sys.executable, "-c", code, str(file)], stderr=out, cwd=Path(__file__).parents[2]
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


def take(feed: Feed, step: int) -> list[Columns]:
    return [{name: array.copy() for name, array in batch.arrays.items()} for batch in feed.batch(step)]


def check(step: int, dp: int, got: list[Columns]) -> None:
    assert len(got) == MICROBATCHES
    for microbatch, arrays in enumerate(got):
        original = columns_of(step * 100 + microbatch * 2 + dp)
        np.testing.assert_array_equal(arrays["tokens"], original["tokens"])
        np.testing.assert_array_equal(arrays["labels"], np.append(original["tokens"][1:], 0))
        np.testing.assert_array_equal(arrays["loss_mask"], np.append(original["loss_mask"][1:], 0))
        np.testing.assert_array_equal(arrays["logprobs"], np.append(original["logprobs"][1:], 0))
        assert arrays["cu_seqlens"].tolist() == [0, LENGTH]


async def test_two_ranks_train_two_batches(config: RunConfig, log: Log, store: ObjectStore) -> None:
    weights = 0.0
    async with packer(config, log), packer(config, log, index=1):
        with (
            Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as zero,
            Feed(socket_path(config, 1), timeout_s=DEADLINE_S) as one,
        ):
            for step in (1, 2):
                reading = [asyncio.create_task(asyncio.to_thread(take, feed, step)) for feed in (zero, one)]
                await yield_batch(log, store, step)  # the ranks wait for it
                for dp, task in enumerate(reading):
                    got = await task
                    check(step, dp, got)
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
        assert LENGTH * 13 <= fact.fetched < LENGTH * 13 + 2000


async def test_windows_are_built_ahead_and_no_further(
    config: RunConfig, log: Log, store: ObjectStore
) -> None:
    async with packer(changed(config, prefetch=2), log):
        await yield_batch(log, store, 1)
        assert [
            fact.microbatch for fact in sorted(await packed_facts(log, 2), key=lambda f: f.microbatch)
        ] == [0, 1]
        with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            await asyncio.to_thread(next, batch)
            await packed_facts(log, 3)
            batch.close()


async def test_memory_is_bounded_and_the_ranks_go_on(config: RunConfig, log: Log, store: ObjectStore) -> None:
    await yield_batch(log, store, 1)
    async with packer(changed(config, prefetch=1), log):
        size = (await packed_facts(log, 1))[0].bytes
    # Room for one window and a half: each is dropped before the next is built.
    tight = config.model_copy(
        update={
            "packer": config.packer.model_construct(
                socket_dir=config.packer.socket_dir, prefetch=8, memory_bytes=size * 3 // 2
            )
        }
    )
    async with packer(tight, log):
        with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
            check(1, 0, await asyncio.to_thread(take, feed, 1))


async def test_a_window_over_the_budget_is_refused_with_the_number_needed(
    config: RunConfig, log: Log, store: ObjectStore
) -> None:
    await yield_batch(log, store, 1)
    small = config.model_copy(
        update={
            "packer": config.packer.model_construct(
                socket_dir=config.packer.socket_dir, prefetch=2, memory_bytes=1000
            )
        }
    )
    async with packer(small, log):
        with (
            Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed,
            pytest.raises(
                FeedError, match=r"needs \d+ bytes, packer\.memory_bytes is 1000; raise it to at least \d+"
            ),
        ):
            await asyncio.to_thread(take, feed, 1)


async def test_what_cannot_be_packed_is_told_to_the_rank_and_the_packer_lives(
    config: RunConfig, log: Log, store: ObjectStore
) -> None:
    def flip(data: bytes) -> bytes:
        return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]

    await yield_batch(log, store, 1, damage=flip)
    await publish_batch(log, 2, Ref(key="runs/r/plans/missing.json", bytes=10, crc32c=0))
    await publish_batch(log, 3, await store.create("runs/r/plans/bad.json", b"{}"))
    await yield_batch(log, store, 4)
    async with packer(config, log):
        with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
            for step, message in (
                (1, r"object runs/.*-a1\.safetensors is damaged: column \w+, block 0"),
                (2, r"plan of step 2 cannot be used: no object runs/r/plans/missing\.json"),
                (3, r"runs/r/plans/bad\.json is no plan"),
            ):
                with pytest.raises(FeedError, match=message):
                    await asyncio.to_thread(take, feed, step)
            check(4, 0, await asyncio.to_thread(take, feed, 4))
            batch = feed.batch(1)
            with pytest.raises(FeedError, match="damaged"):
                await asyncio.to_thread(next, batch)


async def test_trained_steps_are_over(config: RunConfig, log: Log, store: ObjectStore) -> None:
    await yield_batch(log, store, 1)
    await publish_trained(log, 1)
    async with packer(config, log):
        await yield_batch(log, store, 2)
        with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
            check(2, 0, await asyncio.to_thread(take, feed, 2))
            with pytest.raises(FeedError, match="step 1 is trained already"):
                await asyncio.to_thread(take, feed, 1)
    assert {fact.step for fact in await packed_facts(log, 3)} == {2}


async def test_a_killed_packer_comes_back_and_no_window_is_lost_or_repeated(
    config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    await yield_batch(log, store, 1)
    got: list[Columns] = []
    with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
        batch = feed.batch(1)
        async with process(config, tmp_path) as first:
            micro_batch = await asyncio.to_thread(next, batch)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait)
            # The window outlives the packer: the rank's map holds the memory.
            got.append({name: array.copy() for name, array in micro_batch.arrays.items()})
        reading = asyncio.create_task(
            asyncio.to_thread(lambda: [{n: a.copy() for n, a in m.arrays.items()} for m in batch])
        )
        async with process(config, tmp_path):
            got += await reading
    check(1, 0, got)
    facts = await packed_facts(log, MICROBATCHES)
    assert sorted(fact.microbatch for fact in facts) == [0, 1, 2]


async def test_a_killed_rank_gives_its_window_back(
    config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    """The rank is a process that takes a window and is killed while it holds it."""
    await yield_batch(log, store, 1)
    async with packer(changed(config, prefetch=1), log):
        await packed_facts(log, 1)
        gc.collect()
        windows = _window_fds()
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
            [sys.executable, "-c", code, str(socket_path(config, 0))],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert rank.stdout is not None
            assert await asyncio.to_thread(rank.stdout.readline) == b"held\n"
            await until(lambda: _window_fds() == 2)  # the held one, and the next one built ahead
        finally:
            rank.kill()
            await asyncio.to_thread(rank.wait)
            if rank.stdout is not None:
                rank.stdout.close()
        await until(lambda: _window_fds() == 1)
        with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
            check(1, 0, await asyncio.to_thread(take, feed, 1))
    gc.collect()
    assert _window_fds() == 0


def _window_fds() -> int:
    """Descriptors of windows that this process has."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += "packtrain-window" in str(link.readlink())
        except FileNotFoundError:
            continue  # the directory's own
    return count


async def test_the_packer_and_its_rank_share_pages_that_neither_can_write(
    config: RunConfig, log: Log, store: ObjectStore
) -> None:
    import mmap
    import socket

    await yield_batch(log, store, 1)
    async with packer(config, log):
        await packed_facts(log, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
            rank.connect(str(socket_path(config, 0)))
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


async def test_a_store_outage_is_waited_out(config: RunConfig, log: Log, tmp_path: Path) -> None:
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
        async with packer(config, log, store) as task:
            with Feed(socket_path(config, 0), timeout_s=DEADLINE_S) as feed:
                reading = asyncio.create_task(asyncio.to_thread(take, feed, 1))
                # Longer than the store's patience, so that the packer itself must wait.
                done, _ = await asyncio.wait([reading, task], timeout=2)
                assert not done
                await asyncio.to_thread(server.start)
                check(1, 0, await reading)
    finally:
        server.stop()


async def test_a_second_packer_of_the_same_coordinate_is_refused(config: RunConfig, log: Log) -> None:
    async with packer(config, log):
        await until(lambda: socket_path(config, 0).exists())
        with pytest.raises(SocketTaken):
            async with packer(config, log) as task:
                await task
    assert not socket_path(config, 0).exists()


async def test_an_unforeseen_fault_ends_the_service_instead_of_leaving_ranks_to_wait(
    config: RunConfig, log: Log, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr("services.packer._seal", broken)
    await yield_batch(log, store, 1)
    with pytest.raises(RuntimeError, match="boom"):
        async with packer(config, log) as task, asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task])
