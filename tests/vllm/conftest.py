"""One vLLM server at a time, started when the first test of its model asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.server import START_S, VllmServer

FOLDER = os.environ.get("PACKTRAIN_VLLM", "")
HERE = Path(__file__).parent
_MOE = ("--enable-return-routed-experts", "--return-sampling-mask")
Serve = Callable[..., VllmServer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if FOLDER else "needs a real vLLM: run `make vllm`"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(START_S + 120))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models() -> Path:
    return Path(FOLDER).absolute() / "models"


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Gives the server of a model, in place of the one before: two would not fit a small machine."""
    running: list[VllmServer] = []

    def of(model: str, *flags: str, interpreted: bool = False) -> VllmServer:
        if running and running[0].name == model:
            return running[0]
        if running:
            running.pop().stop()
        server = VllmServer(Path(FOLDER), model, *flags, interpreted=interpreted)
        server.start()
        print(f"vLLM with {model} answered after {server.start_s:.0f} s")
        running.append(server)
        return server

    yield of
    if running:
        running.pop().stop()


@pytest.fixture
def tiny(serve: Serve) -> VllmServer:
    server = serve("tiny")
    server.restore()
    return server


@pytest.fixture
def moe(serve: Serve) -> VllmServer:
    return serve("moe", *_MOE, interpreted=True)


@pytest.fixture
def smollm2(serve: Serve) -> VllmServer:
    return serve("smollm2")
