"""One real S3 server a session, and the same store on files and on S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store.bucket import ensure_bucket
from schemas.config import Store as StoreConfig
from tests.s3server import S3Server, shared_store


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = shared_store(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_config(s3_server: S3Server) -> StoreConfig:
    """A bucket and a prefix of its own."""
    bucket = f"t-{secrets.token_hex(6)}"
    config = StoreConfig.model_validate(
        {
            "url": f"s3://{bucket}/some/prefix",
            "endpoint": s3_server.endpoint,
            "credentials_file": str(s3_server.credentials_file),
        }
    )
    ensure_bucket(config)
    return config


@pytest.fixture(params=["file", "s3"])
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    if request.param == "s3":
        return request.getfixturevalue("s3_config")
    return StoreConfig.model_validate({"url": f"file://{tmp_path}/objects"})
