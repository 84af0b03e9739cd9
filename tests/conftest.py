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
from tests.natsserver import NatsServer, shared_broker

# A busy machine is slow, not wrong: time is no property of what these tests assert.
settings.register_profile("packtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("packtrain")


REAL_PARTS = ("faults", "scaffolds", "integration")
"""Folders whose files take longest, which are handed to the workers first: a long file that comes last is waited for alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of real processes gets a second run, on a machine that may starve one of them.

    One that needed it is listed as RERUN at the end of the run, and is a defect to look into.
    """
    here = Path(__file__).parent
    folders = {item: item.path.relative_to(here).parts[0] for item in items}
    for item, folder in folders.items():
        if folder in REAL_PARTS:
            item.add_marker(pytest.mark.flaky(reruns=1))
    order = {folder: place for place, folder in enumerate(REAL_PARTS)}
    items.sort(key=lambda item: order.get(folders[item], len(order)))


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    # Tests that end the broker's process have one of their own.
    server = shared_broker(tmp_path_factory.mktemp("nats"))
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
