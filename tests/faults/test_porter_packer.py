"""Faults around a packer that is at work: its store goes in mid-pack, its ranks are killed, another comes for its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.feed.feed import Feed
from pipeline.feed.server import SocketTaken
from pipeline.feed.wire import socket_path
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from schemas.config import Broker, RunConfig
from schemas.config import Store as StoreConfig
from tests.packer_parts import (
    DEADLINE_S,
    check,
    columns_of,
    packed_facts,
    packer,
    process,
    take,
    until,
    yield_batch,
)
from tests.s3server import S3Server

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def packer_config(run_name: str, broker: Broker, tmp_path: Path) -> Iterator[RunConfig]:
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        yield RunConfig.model_validate(
            {
                "run": run_name,
                "directory": str(tmp_path),
                "broker": broker.model_dump(),
                "store": {"url": f"file://{tmp_path}/objects"},
                "batch": {"dp": 2},
                "packer": {"socket_dir": sockets},
                "pools": [{"name": "p", "harness": "chat"}],
                "sources": [{"name": "s", "pool": "p", "groups": 1, "environment": {"kind": "arithmetic"}}],
            }
        )


class Cut:
    """A way to a server. It passes `left` bytes of answers on; then it ends every connection, and takes no other until it is
    given more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.left = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _pass(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.left <= 0:
            writer.transport.abort()
            return
        far, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        asking = asyncio.create_task(self._ask(near, far_writer))
        with contextlib.suppress(ConnectionError):
            while self.left > 0 and (piece := await far.read(1 << 16)):
                self.left -= len(piece)
                writer.write(piece)
                await writer.drain()
        asking.cancel()
        for each in (writer, far_writer):
            each.transport.abort()

    async def _ask(self, near: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await near.read(1 << 16):
                far.write(piece)
                await far.drain()


async def test_a_store_that_goes_in_mid_pack_is_waited_for_and_the_window_is_whole(
    packer_config: RunConfig, log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "packtrain")
    length = 1 << 18
    server = S3Server(tmp_path / "s3")
    server.start()
    cut = Cut(int(server.endpoint.rpartition(":")[2]))
    try:
        direct = StoreConfig(
            url="s3://bucket/p", endpoint=server.endpoint, credentials_file=str(server.credentials_file)
        )
        ensure_bucket(direct)
        plan = await yield_batch(log, ObjectStore.open(direct), 1, length=length)
        payload = plan.sequences[0].payload.bytes
        # The plan comes through, and a part of the first window.
        cut.left = 1 << 20
        async with cut.open() as endpoint:
            store = ObjectStore.open(direct.model_copy(update={"endpoint": endpoint}), patience_s=0.5)
            async with packer(packer_config, log, store):
                await until(lambda: "waiting for the store" in caplog.text)
                assert cut.left <= 0 < store.counters.bytes_read < payload
                with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
                    reading = asyncio.create_task(asyncio.to_thread(take, feed, 1))
                    done, _ = await asyncio.wait([reading], timeout=1)
                    assert not done
                    cut.left = 1 << 40
                    got = await reading
    finally:
        server.stop()
    assert "the store is back" in caplog.text
    for microbatch, arrays in enumerate(got):
        original = columns_of(100 + microbatch * 2, length)
        np.testing.assert_array_equal(arrays["tokens"], original["tokens"])
        np.testing.assert_array_equal(arrays["logprobs"][:-1], original["logprobs"][1:])


RANK = """
import sys, time
from pipeline.feed.feed import Feed
batch = Feed(sys.argv[1]).batch(1)
held = next(batch)
print(int(held.arrays["tokens"].sum()), flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def rank(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank that takes a window and holds it; it has told the sum of its tokens."""
    running = subprocess.Popen([sys.executable, "-c", RANK, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert running.stdout is not None
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def windows_of(pid: int) -> int:
    """Descriptors of windows that a process has."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "packtrain-window" in str(link.readlink())
    return count


def connections_of(pid: int) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(link.readlink()).startswith("socket:")
    return count


async def test_ranks_that_are_killed_while_they_map_a_window_leave_the_packer_as_it_was(
    packer_config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    """Two tensor-parallel ranks share the window. One that is left has it whole; when both are gone, so is the window."""
    length = 1 << 18
    await yield_batch(log, store, 1, length=length)
    want = str(int(columns_of(100, length)["tokens"].sum())).encode()
    few = packer_config.packer.model_copy(update={"prefetch": 1})
    path = socket_path(packer_config, 0)
    before = sorted(each.name for each in Path("/dev/shm").iterdir())
    async with process(packer_config.model_copy(update={"packer": few}), tmp_path) as running:
        await packed_facts(log, 1)
        await until(lambda: windows_of(running.pid) == 1)
        connections = connections_of(running.pid)
        for _ in range(2):
            with rank(path) as one, rank(path) as other:
                for each in (one, other):
                    assert each.stdout is not None
                    assert (await asyncio.to_thread(each.stdout.readline)).strip() == want
                await until(lambda: windows_of(running.pid) == 2)  # with the next, which is built ahead
                one.kill()
                await until(lambda: connections_of(running.pid) == connections + 1)
                assert windows_of(running.pid) == 2
            await until(lambda: windows_of(running.pid) == 1)
            await until(lambda: connections_of(running.pid) == connections)
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            got = await asyncio.to_thread(take, feed, 1)
    assert str(int(got[0]["tokens"].sum())).encode() == want
    assert sorted(each.name for each in Path("/dev/shm").iterdir()) == before


async def test_a_second_packer_is_refused_and_the_first_goes_on_serving(
    packer_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    async with packer(packer_config, log):
        await yield_batch(log, store, 1)
        with Feed(socket_path(packer_config, 0), timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            first = await asyncio.to_thread(next, batch)
            got = [{name: array.copy() for name, array in first.arrays.items()}]
            with pytest.raises(SocketTaken, match="packer-0"):
                async with packer(packer_config, log) as task:
                    await task
            for each in await asyncio.to_thread(
                lambda: [{n: a.copy() for n, a in m.arrays.items()} for m in batch]
            ):
                got.append(each)
    check(1, 0, got)
