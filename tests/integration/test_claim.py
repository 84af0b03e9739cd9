"""A run's place in its store: made, tried, and never shared by two logs. On files, on a real S3 server, and on a bad one."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pipeline.config import Override, load
from pipeline.store import BadStore, StoreUnavailable
from pipeline.store.bucket import ensure_bucket
from schemas.config import RunConfig
from services.cli.claim import claim, claim_key, open_place
from services.cli.embedded import LaunchError
from tests.s3server import GUEST_BUCKET, S3Server, shared_store

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


def configured(url: str, endpoint: str = "", credentials: Path | str = "") -> RunConfig:
    values = {"url": url, "endpoint": endpoint, "credentials_file": str(credentials)}
    return load(DEMO, [Override("", ("store", key), value) for key, value in values.items()])


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = shared_store(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["file", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RunConfig:
    if request.param == "file":
        return configured(f"file://{tmp_path}/objects")
    server: S3Server = request.getfixturevalue("s3_server")
    return configured(f"s3://t-{secrets.token_hex(6)}/some/prefix", server.endpoint, server.credentials_file)


async def test_a_place_is_made_and_claimed_and_found_again(config: RunConfig) -> None:
    store = await open_place(config, resumed=False)
    await claim(store, config, "one", begun=False)
    # The launcher was killed after its claim, before the first service; then in mid-run.
    again = await open_place(config, resumed=True)
    await claim(again, config, "one", begun=False)
    await claim(again, config, "one", begun=True)
    assert await again.size(claim_key(config.run)) == await store.size(claim_key(config.run))


async def test_the_place_of_another_log_is_refused(config: RunConfig) -> None:
    store = await open_place(config, resumed=False)
    await claim(store, config, "one", begun=False)
    with pytest.raises(LaunchError, match=r"holds the objects of another run demo.*name another run"):
        await open_place(config, resumed=False)
    for begun in (False, True):
        with pytest.raises(LaunchError, match="holds the objects of another run demo"):
            await claim(store, config, "two", begun=begun)
    await claim(store, config, "one", begun=True)


async def test_a_run_whose_objects_are_elsewhere_does_not_go_on(config: RunConfig) -> None:
    store = await open_place(config, resumed=True)
    with pytest.raises(LaunchError, match=r"run demo has begun, but .* does not hold its objects"):
        await claim(store, config, "one", begun=True)
    assert await store.size(claim_key("demo")) is None


@pytest.fixture
async def forgetful() -> AsyncIterator[str]:
    """An S3 server that knows no conditional PUT: it replaces what is there."""
    held: dict[str, bytes] = {}

    async def answer(request: web.Request) -> web.Response:
        if request.method == "PUT":
            held[request.path] = await request.read()
            return web.Response(headers={"ETag": '"e"'})
        if request.path.count("/") > 1 and request.path not in held:
            return web.Response(status=404)
        dated = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"e"'}
        return web.Response(body=held.get(request.path, b""), headers=dated)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_store_that_replaces_objects_is_refused(
    forgetful: str, s3_server: S3Server, tmp_path: Path
) -> None:
    config = configured("s3://bucket/p", forgetful, s3_server.credentials_file)
    store = await open_place(config, resumed=False)
    with pytest.raises(LaunchError, match="ignores If-None-Match on PUT"):
        await claim(store, config, "one", begun=False)


async def test_a_user_of_one_bucket_needs_no_right_to_make_it(s3_server: S3Server) -> None:
    admin = configured(f"s3://{GUEST_BUCKET}/p", s3_server.endpoint, s3_server.credentials_file)
    guest = configured(f"s3://{GUEST_BUCKET}/p", s3_server.endpoint, s3_server.guest_file)
    with pytest.raises(StoreUnavailable, match=GUEST_BUCKET):
        await claim(await open_place(guest, resumed=False), guest, "one", begun=False)
    assert ensure_bucket(admin.store)
    await claim(await open_place(guest, resumed=False), guest, "one", begun=False)


def test_a_name_that_no_bucket_may_have_is_refused(s3_server: S3Server) -> None:
    with pytest.raises(BadStore, match="s3://No_/p"):
        ensure_bucket(configured("s3://No_/p", s3_server.endpoint, s3_server.credentials_file).store)


def test_keys_of_neither_file_nor_environment_are_left_to_the_first_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert not ensure_bucket(configured("s3://bucket/p", "http://127.0.0.1:9").store)
