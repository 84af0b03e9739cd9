"""Scaffolds are there or their tests are skipped with the reason; pi and mini-swe-agent are installed when they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scaffolds.install import missing
from tests.scaffolds.stage import refusal
from tests.scaffolds.wire import keep_bodies


@pytest.fixture(scope="session")
def installed() -> Callable[[str], None]:
    """Sees to it that a scaffold can be played, or skips the test."""

    def see(name: str) -> None:
        if refusal():
            pytest.skip(refusal())
        if reason := missing(name):
            pytest.skip(reason)

    return see


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A scaffold takes seconds to start, and ten times that beside others on a small machine.
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True)
def _bodies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_bodies(monkeypatch)
