"""What `pipeline.store` promises, the same on files and on a real S3 server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession
from safetensors.numpy import load

from pipeline.checksum import crc32c
from pipeline.hosts.health import Health
from pipeline.hosts.metrics import Measures, serving
from pipeline.store import ObjectDamaged, ObjectExists, ObjectMissing, ObjectStore, StoreUnavailable
from pipeline.store.bucket import ensure_bucket
from pipeline.store.keys import BadKey
from pipeline.store.payload import read_columns, read_header, write_payload
from schemas.config import Store as StoreConfig
from schemas.payload import Ref, Span
from tests.backends import free_ports
from tests.s3server import S3Server


@pytest.fixture
def any_store(store_config: StoreConfig) -> ObjectStore:
    return ObjectStore.open(store_config, patience_s=5)


async def test_an_object_is_written_once_and_read_back_verified(any_store: ObjectStore) -> None:
    ref = await any_store.create("runs/r/a.bin", b"first")
    assert ref == Ref(key="runs/r/a.bin", bytes=5, crc32c=crc32c(b"first"))
    assert await any_store.get(ref) == b"first"
    assert await any_store.get("runs/r/a.bin") == b"first"
    with pytest.raises(ObjectExists, match=r"runs/r/a\.bin"):
        await any_store.create("runs/r/a.bin", b"other")
    with pytest.raises(ObjectExists):
        await any_store.create("runs/r/a.bin", b"first")
    assert await any_store.get(ref) == b"first"


async def test_of_many_writers_one_wins(any_store: ObjectStore) -> None:
    bodies = [bytes([i]) * 1000 for i in range(8)]
    results = await asyncio.gather(
        *[any_store.create("race", body) for body in bodies], return_exceptions=True
    )
    winners = [result for result in results if isinstance(result, Ref)]
    assert len(winners) == 1
    assert all(isinstance(result, Ref | ObjectExists) for result in results)
    assert await any_store.get(winners[0]) in bodies


async def test_an_object_is_copied_in_the_store_and_outlives_the_first(any_store: ObjectStore) -> None:
    ref = await any_store.create("runs/r/a.bin", b"first")
    before = any_store.counters.bytes_read, any_store.counters.bytes_written
    for _ in range(2):
        await any_store.copy("runs/r/a.bin", "runs/other/b.bin")
    assert (any_store.counters.bytes_read, any_store.counters.bytes_written) == before
    await any_store.remove(["runs/r/a.bin"])
    assert await any_store.get(ref.model_copy(update={"key": "runs/other/b.bin"})) == b"first"
    with pytest.raises(ObjectMissing, match=r"runs/r/a\.bin"):
        await any_store.copy("runs/r/a.bin", "runs/other/c.bin")
    assert await any_store.size("runs/other/c.bin") is None


async def test_an_empty_object(any_store: ObjectStore) -> None:
    ref = await any_store.create("empty", b"")
    assert await any_store.get(ref) == b""
    assert await any_store.get("empty") == b""
    assert await any_store.size("empty") == 0
    await any_store.create("full", b"x")
    with pytest.raises(ObjectDamaged):
        await any_store.get(Ref(key="full", bytes=0, crc32c=0))


async def test_what_is_not_there(any_store: ObjectStore) -> None:
    assert await any_store.size("nothing") is None
    for attempt in (any_store.get("nothing"), any_store.get_ranges("nothing", [(0, 1)])):
        with pytest.raises(ObjectMissing, match="nothing"):
            await attempt
    with pytest.raises(ObjectMissing):
        await any_store.get(Ref(key="nothing", bytes=0, crc32c=0))


async def test_ranges_come_in_the_order_asked_and_coalesced(any_store: ObjectStore) -> None:
    body = np.random.default_rng(0).integers(0, 256, 5 << 20, np.uint8).tobytes()
    await any_store.create("big", body)
    scope = any_store.scope()
    wanted = [(4 << 20, (4 << 20) + 7), (0, 3), (100, 200), (2, 50)]
    got = await scope.get_ranges("big", wanted)
    assert [bytes(view) for view in got] == [body[a:b] for a, b in wanted]
    assert all(view.readonly for view in got)
    assert scope.counters.operations == 2
    assert scope.counters.bytes_read == 200 + 7
    assert any_store.counters.bytes_read == 200 + 7
    assert any_store.counters.bytes_written == len(body)


@pytest.mark.parametrize(("start", "end"), [(5, 20), (10, 11), (20, 30)])
async def test_a_truncated_object_is_damage(any_store: ObjectStore, start: int, end: int) -> None:
    await any_store.create("short", b"0123456789")
    with pytest.raises(ObjectDamaged, match=r"short.*10 bytes"):
        await any_store.get_ranges("short", [(start, end)])
    for size in (9, 11):
        with pytest.raises(ObjectDamaged, match="10 bytes"):
            await any_store.get(Ref(key="short", bytes=size, crc32c=0))


async def test_an_altered_object_is_damage(any_store: ObjectStore) -> None:
    await any_store.create("altered", b"0123456789")
    with pytest.raises(ObjectDamaged, match="CRC32C"):
        await any_store.get(Ref(key="altered", bytes=10, crc32c=crc32c(b"0123456780")))


async def test_listing(any_store: ObjectStore) -> None:
    for key in ("runs/a/1", "runs/a/2", "runs/ab/3"):
        await any_store.create(key, key.encode())
    assert sorted([found async for found in any_store.list("runs/a/")]) == [("runs/a/1", 8), ("runs/a/2", 8)]
    assert len([found async for found in any_store.list()]) == 3


@pytest.mark.parametrize(
    "key", ["../up", "/abs", "a/../b", "a//b", "", "a b", "a/", "./a", "a" * 600, "é", "a\n", "a/.b"]
)
async def test_keys_that_leave_the_store_are_refused(any_store: ObjectStore, key: str) -> None:
    for attempt in (
        any_store.create(key, b"x"),
        any_store.get(key),
        any_store.size(key),
        any_store.get_ranges(key, [(0, 1)]),
    ):
        with pytest.raises(BadKey):
            await attempt


async def test_a_payload_by_columns_and_spans(any_store: ObjectStore) -> None:
    rows = 150_000
    columns = {
        "tokens": np.arange(rows, dtype=np.int32),
        "loss_mask": (np.arange(rows) % 2).astype(np.uint8),
        "logprobs": -np.arange(rows, dtype=np.float32),
        "policy_version": np.full(rows, 3, np.int32),
        "segments": np.zeros((4, 5), np.int32),
    }
    header = await write_payload(any_store, "runs/r/payloads/s/x-a1.safetensors", columns)
    assert await read_header(any_store, header.key) == header
    opened = load(await any_store.get(header.key))
    for name, column in columns.items():
        np.testing.assert_array_equal(opened[name], column)
    spans = [Span(start=149_990, end=rows), Span(start=65_530, end=65_540)]
    got = await read_columns(any_store, header, ["tokens", "logprobs"], spans)
    rows_read = np.r_[149_990:rows, 65_530:65_540]
    np.testing.assert_array_equal(got["tokens"], rows_read)
    np.testing.assert_array_equal(got["logprobs"], -rows_read.astype(np.float32))


async def test_operations_are_counted_by_kind(any_store: ObjectStore) -> None:
    await any_store.create("a", b"0123456789")
    await any_store.get_ranges("a", [(1, 4)])
    await any_store.size("a")
    assert [key async for key, _ in any_store.list()] == ["a"]
    await any_store.remove(["a"])
    with pytest.raises(ObjectMissing):
        await any_store.get_ranges("a", [(1, 4)])
    requests = any_store.requests
    assert {name: sum(of.counts) for name, of in requests.seconds.items()} == {
        "put": 1,
        "get": 2,
        "head": 1,
        "list": 1,
        "delete": 1,
    }
    assert dict(requests.bytes) == {"put": 10, "get": 3}
    assert dict(requests.errors) == {("get", "ObjectMissing"): 1}
    measures = Measures(requests=requests)
    async with (
        serving("127.0.0.1:0", "packer", measures, Health()),
        ClientSession() as client,
        client.get(measures.address) as answer,
    ):
        told = (await answer.text()).splitlines()
    for line in (
        'packtrain_store_seconds_count{operation="get"} 2.0',
        'packtrain_store_bytes_total{operation="put"} 10.0',
        'packtrain_store_errors_total{error="ObjectMissing",operation="get"} 1.0',
    ):
        assert line in told


# What only one kind of store can show.


def _s3(server: S3Server, **changes: str) -> StoreConfig:
    fields = {
        "url": "s3://plain/p",
        "endpoint": server.endpoint,
        "credentials_file": str(server.credentials_file),
    }
    return StoreConfig.model_validate(fields | changes)


async def test_a_bucket_is_made_once(s3_server: S3Server) -> None:
    config = _s3(s3_server, url="s3://made-once/p")
    assert ensure_bucket(config) is True
    assert ensure_bucket(config) is False
    with pytest.raises(ValueError, match="names no bucket"):
        ensure_bucket(StoreConfig.model_validate({"url": "file:///tmp/x"}))


async def test_wrong_credentials_are_told_without_the_secret(s3_server: S3Server, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"access_key": s3_server.access_key, "secret_key": "not-the-secret"}))
    store = ObjectStore.open(_s3(s3_server, credentials_file=str(wrong)))
    with pytest.raises(StoreUnavailable, match=r"s3://plain/p.*access denied.*credentials_file") as caught:
        await store.get("x")
    assert "not-the-secret" not in str(caught.value)
    with pytest.raises(StoreUnavailable, match="cannot make bucket"):
        ensure_bucket(_s3(s3_server, credentials_file=str(wrong)))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"access_key": "a"}', '{"access_key": "", "secret_key": "b"}', None]
)
def test_unusable_credentials_are_refused_at_the_door(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StoreUnavailable, match=r"keys\.json"):
        ObjectStore.open(
            StoreConfig.model_validate(
                {"url": "s3://bucket", "endpoint": "http://127.0.0.1:9", "credentials_file": str(path)}
            )
        )


async def test_a_store_that_is_down_is_named_after_bounded_retries(s3_server: S3Server) -> None:
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    store = ObjectStore.open(_s3(s3_server, endpoint=endpoint), patience_s=0.5)
    for attempt in (store.create("k", b"x"), store.get("k"), store.size("k")):
        with pytest.raises(StoreUnavailable, match=rf"s3://plain/p: no success in 0\.5 s.*{endpoint}"):
            await attempt
    with pytest.raises(StoreUnavailable, match=endpoint):
        ensure_bucket(_s3(s3_server, endpoint=endpoint))


async def test_an_outage_shorter_than_the_patience_is_not_seen(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "s3")
    server.start()
    try:
        config = _s3(server)
        ensure_bucket(config)
        store = ObjectStore.open(config, patience_s=60)
        ref = await store.create("before", b"0123456789")
        server.stop()
        reading = asyncio.create_task(store.get(ref))
        writing = asyncio.create_task(store.create("during", b"abc"))
        await asyncio.to_thread(server.start)
        assert await reading == b"0123456789"
        assert await store.get(await writing) == b"abc"
    finally:
        server.stop()


class LossyProxy:
    """Forwards to the server, and cuts the connection instead of passing on the answer to the next `lose` PUTs."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, port = endpoint.removeprefix("http://").partition(":")
        self._port = int(port)
        self.lose = 0
        self.puts = 0
        self.endpoint = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            body = await reader.readexactly(length)
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            # One request a connection, so that the end of the answer is the end of the stream.
            up_writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await up_reader.read()
            up_writer.close()
            if head.startswith(b"PUT"):
                self.puts += 1
                if self.lose > 0:
                    self.lose -= 1
                    return
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@pytest.fixture
async def lossy(s3_config: StoreConfig) -> AsyncIterator[tuple[LossyProxy, StoreConfig]]:
    proxy = LossyProxy(s3_config.endpoint)
    await proxy.start()
    yield proxy, s3_config.model_copy(update={"endpoint": proxy.endpoint})
    proxy.stop()


@pytest.mark.parametrize("pieces", [[], [b"01234", b"56789"]], ids=["empty", "pieces"])
async def test_a_put_whose_answer_was_lost_is_ours(
    lossy: tuple[LossyProxy, StoreConfig], pieces: list[bytes]
) -> None:
    proxy, config = lossy
    store = ObjectStore.open(config)
    proxy.lose = 2
    await store.put("once", [memoryview(piece) for piece in pieces])
    assert proxy.puts == 3
    assert store.requests.retries["put"] == 2
    assert await store.get("once") == b"".join(pieces)


async def test_another_writers_bytes_are_not_taken_for_ours(lossy: tuple[LossyProxy, StoreConfig]) -> None:
    proxy, config = lossy
    store = ObjectStore.open(config)
    await store.create("taken", b"theirs....")
    proxy.lose = 1
    with pytest.raises(ObjectExists):
        await store.create("taken", b"0123456789")


def test_a_directory_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"file/objects.*make .* a directory") as caught:
        ObjectStore.open(StoreConfig.model_validate({"url": f"file://{tmp_path}/file/objects"}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/tmp/x",
        "ftp://x/y",
        "s3://",
        "file://host/x",
        "s3://a:b@bucket/p",
        "s3://bucket/../p",
        "s3://b/p?x=1",
    ],
)
def test_urls_that_are_no_store(url: str) -> None:
    with pytest.raises(ValueError):
        ObjectStore.open(StoreConfig.model_validate({"url": url, "endpoint": "http://127.0.0.1:1"}))


async def test_a_file_store_is_private_to_no_one_run(tmp_path: Path) -> None:
    first, second = (
        ObjectStore.open(StoreConfig.model_validate({"url": f"file://{tmp_path}/a%20b"})) for _ in range(2)
    )
    ref = await first.create("k", b"x")
    assert await second.get(ref) == b"x"
    assert (tmp_path / "a b" / "k").read_bytes() == b"x"


async def test_memory() -> None:
    store = ObjectStore.in_memory()
    ref = await store.create("k", memoryview(b"0123456789"))
    assert await store.get(ref) == b"0123456789"
    with pytest.raises(ObjectExists):
        await store.create("k", b"y")
