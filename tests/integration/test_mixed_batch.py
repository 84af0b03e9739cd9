"""One batch of four harnesses: chat, tools, the shell and a scaffold in workspaces, from a real run's start to its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.check import load_checked
from tests.mixed_batch import ROOT, pool_and_source, run_mixed
from tests.scaffolds.install import ROOT as SCAFFOLDS
from tests.scaffolds.install import missing
from tests.workspace_parts import refusal

HARNESSES = {"sums": "chat", "products": "tool", "mixed-shell": "shell", "mixed-pi": "harbor"}


@pytest.mark.timeout(150)
@pytest.mark.skipif(bool(refusal()), reason=refusal())
async def test_four_harnesses_give_one_batch_and_a_step(tmp_path: Path) -> None:
    assert missing("pi") == ""
    sections = [
        pool_and_source("sums", "chat", "arithmetic", max_tokens=32),
        pool_and_source("products", "tool", "calculator", max_tokens=128),
        pool_and_source("mixed-shell", "shell", "harbor"),
        pool_and_source("mixed-pi", "harbor", "harbor", f'{{ agent = "pi", folder = "{SCAFFOLDS}" }}'),
    ]
    # pi keeps 16 Ki tokens free: in a smaller context it summarizes at once.
    await run_mixed(tmp_path, sections, HARNESSES, 32_768, 120)


def test_the_example_of_a_mixed_run_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("pi") == ""
    monkeypatch.chdir(ROOT)
    config = load_checked(ROOT / "examples/mixed.toml")
    assert {pool.harness for pool in config.pools} == {"chat", "tool", "shell", "harbor"}
    assert config.pool_hosts() == {"chat": 1, "tool": 1, "shell": 4, "scaffold": 8}
