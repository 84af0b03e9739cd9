"""How an object is written: once, as a whole or not at all, and without a copy; the same on files and on a real S3 server."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import sys
from pathlib import Path

import pytest

from pipeline.store import ObjectExists, ObjectStore
from pipeline.store.objects import MAX_OBJECT
from pipeline.store.payload import describe_payload, read_header, write_payload
from schemas.config import Store as StoreConfig
from schemas.payload import BLOCK_TOKENS
from tests import payload_child

KILLS_AT = 8 << 20


@pytest.fixture
def any_store(store_config: StoreConfig) -> ObjectStore:
    return ObjectStore.open(store_config, patience_s=5)


async def test_an_object_in_pieces_is_written_once(any_store: ObjectStore) -> None:
    pieces = [memoryview(piece) for piece in (b"01", b"", b"2" * 100_000, b"3")]
    assert await any_store.put("pieces", pieces) == 100_003
    assert await any_store.get("pieces") == b"".join(pieces)
    with pytest.raises(ObjectExists):
        await any_store.put("pieces", pieces)


async def test_a_second_writer_of_an_attempt_is_told(any_store: ObjectStore) -> None:
    columns = payload_child.columns(3)
    header = await write_payload(any_store, payload_child.KEY, columns)
    with pytest.raises(ObjectExists, match=r"x-a1\.safetensors already exists"):
        await write_payload(any_store, payload_child.KEY, columns)
    assert describe_payload(payload_child.KEY, columns) == header == await read_header(any_store, header.key)


async def test_what_is_too_large_for_one_put_is_refused(any_store: ObjectStore) -> None:
    with (
        mmap.mmap(-1, MAX_OBJECT) as untouched,
        memoryview(untouched) as large,
        pytest.raises(ValueError, match=rf"object large is {MAX_OBJECT + 1} bytes, limit {MAX_OBJECT}"),
    ):
        await any_store.put("large", [large, memoryview(b"x")])
    assert await any_store.size("large") is None


async def test_a_writer_of_files_that_is_killed_leaves_nothing_under_the_key(tmp_path: Path) -> None:
    config = StoreConfig.model_validate({"url": f"file://{tmp_path}/objects"})
    writer = await _child("die", config)
    assert await writer.wait() == -signal.SIGXFSZ
    left = [path.stat().st_size for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert left == [payload_child.DIES_AT]  # it was in the middle
    await _nothing_is_there(ObjectStore.open(config))


async def test_a_writer_to_s3_that_is_killed_leaves_nothing_under_the_key(s3_config: StoreConfig) -> None:
    proxy = Proxy(s3_config.endpoint)
    await proxy.start()
    writer = await _child("write", s3_config.model_copy(update={"endpoint": proxy.endpoint}))
    proxy.kills.set_result(writer.pid)
    assert await writer.wait() == -signal.SIGKILL
    assert proxy.passed >= KILLS_AT
    await proxy.stop()
    await _nothing_is_there(ObjectStore.open(s3_config))


async def _nothing_is_there(store: ObjectStore) -> None:
    assert [found async for found in store.list()] == []
    assert await store.size(payload_child.KEY) is None
    header = await write_payload(store, payload_child.KEY, payload_child.columns(3))
    assert [found async for found in store.list()] == [(header.key, header.bytes)]


async def test_a_payload_is_written_from_the_memory_in_which_it_lies(
    tmp_path: Path, s3_config: StoreConfig
) -> None:
    """Less is resident beyond it than one block of one column."""
    files = StoreConfig.model_validate({"url": f"file://{tmp_path}/objects"})
    writer = await _child("measure", files, s3_config)
    assert writer.stdout is not None
    beyond = json.loads(await writer.stdout.read())
    assert await writer.wait() == 0
    assert max(beyond) < payload_child.WIDTH * BLOCK_TOKENS, beyond


async def _child(what: str, *configs: StoreConfig) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.payload_child",
        what,
        *[config.model_dump_json() for config in configs],
        stdout=asyncio.subprocess.PIPE,
    )


class Proxy:
    """Passes requests on, and kills a process once so many bytes of them have passed."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, port = endpoint.removeprefix("http://").partition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self.kills: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.passed = 0
        self.endpoint = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        _, up = await asyncio.open_connection(self._host, self._port)
        try:
            while piece := await reader.read(1 << 16):
                up.write(piece)
                await up.drain()
                self.passed += len(piece)
                if self.passed >= KILLS_AT:
                    os.kill(await self.kills, signal.SIGKILL)
                    return
        except ConnectionError:
            return
        finally:
            writer.close()
            up.close()
