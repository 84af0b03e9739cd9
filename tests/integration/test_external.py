"""A run on a broker and an object store that are given: a real nats-server, a real S3 server, and nothing else changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker
from schemas.config import Store as StoreConfig
from tests.launched import SMALL, Launched, check_history, history
from tests.s3server import S3Server, shared_store

DEADLINE_S = 240.0
STEPS = 2


@pytest.fixture
def s3_server(tmp_path: Path) -> Iterator[S3Server]:
    server = shared_store(tmp_path / "s3")
    server.start()
    yield server
    server.stop()


@pytest.mark.timeout(300)
async def test_a_run_on_a_given_broker_and_bucket_trains(
    tmp_path: Path, broker: Broker, run_name: str, s3_server: S3Server
) -> None:
    launched = Launched(tmp_path / "here", SMALL.replace('run = "small"', f'run = "{run_name}"'), run_name)
    given = (
        *("--store", "s3://made-by-the-run/some/prefix", "--store-endpoint", s3_server.endpoint),
        *("--store-credentials", str(s3_server.credentials_file)),
    )
    launched.start(
        *("--steps", str(STEPS)), *("--nats", broker.url, "--nats-token-file", broker.token_file), *given
    )
    assert launched.finish(DEADLINE_S) == 0, launched.told()
    log = await Log.connect(broker, run_name, "test")
    try:
        events = await history(launched, log)
    finally:
        await log.close()
    store = ObjectStore.open(
        StoreConfig(
            url="s3://made-by-the-run/some/prefix",
            endpoint=s3_server.endpoint,
            credentials_file=str(s3_server.credentials_file),
        )
    )
    await check_history(events, store, STEPS)
    state = launched.directory / "state"
    assert not (state / "nats").exists(), "an embedded broker was started"
    assert not (state / "objects").exists(), "objects went into files"
    # The same name, the same store, another broker: these objects are not its own.
    second = Launched(tmp_path / "there", launched.file.read_text(), run_name)
    second.start(*given)
    assert second.finish(60) == 1, second.told()
    assert f"holds the objects of another run {run_name}" in second.told()
    secret = s3_server.secret_key.encode()
    assert [path for path in state.rglob("*") if path.is_file() and secret in path.read_bytes()] == []
