"""Real parts for tests: one nats-server a session, a fresh run and a fresh file store a test."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pipeline.log import Log
from schemas.config import Broker
from schemas.config import Store as StoreConfig
from tests.natsserver import NatsServer

# A busy machine is slow, not wrong: time is no property of what these tests assert.
settings.register_profile("packtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("packtrain")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def broker(nats_server: NatsServer) -> Broker:
    return nats_server.broker


@pytest.fixture
def run_name() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
async def log(broker: Broker, run_name: str) -> AsyncIterator[Log]:
    log = await Log.connect(broker, run_name, "test")
    await log.create()
    yield log
    await log.close()


@pytest.fixture
def store(tmp_path: Path):
    from pipeline.store import ObjectStore

    return ObjectStore.open(StoreConfig(url=f"file://{tmp_path}/objects"))
