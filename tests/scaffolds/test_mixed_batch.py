"""One batch of Claude Code, OpenHands, OpenCode and Terminus: a real run over a scripted policy, to its step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mixed_batch import pool_and_source, run_mixed
from tests.scaffolds.install import ROOT
from tests.workspace_parts import refusal

NAMES = ("claude-code", "openhands", "opencode", "terminus")


@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(refusal()), reason=refusal())
async def test_four_scaffolds_give_one_batch_and_a_step(
    tmp_path: Path, installed: Callable[[str], None]
) -> None:
    for name in NAMES:
        installed(name)
    sections = [
        pool_and_source(
            f"mixed-{name}", "harbor", "harbor", f'{{ agent = "{name}", folder = "{ROOT}" }}', 4096, tenants=2
        )
        for name in NAMES
    ]
    await run_mixed(tmp_path, sections, {f"mixed-{name}": "harbor" for name in NAMES}, 131_072, 800)
