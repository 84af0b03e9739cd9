"""The configuration of a run whose packers are tested, with its own socket directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.config import Broker, RunConfig


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pt") as directory:
        yield Path(directory)


@pytest.fixture
def packer_config(run_name: str, broker: Broker, tmp_path: Path, sockets: Path) -> RunConfig:
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
