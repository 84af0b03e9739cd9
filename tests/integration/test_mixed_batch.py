"""One batch of four harnesses: chat, tools, the shell and a scaffold in workspaces, from a real run's start to its step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.store import ObjectStore
from tests.capture_parts import served
from tests.launched import Launched, check_history, history
from tests.mixed_batch import check_batch, mixed, nothing_left, pool_and_source
from tests.scaffolds.install import ROOT as SCAFFOLDS
from tests.scaffolds.install import missing
from tests.scripted_engine import ServedPolicy
from tests.workspace_parts import refusal

pytestmark = [pytest.mark.timeout(150), pytest.mark.skipif(bool(refusal()), reason=refusal())]
HARNESSES = {"sums": "chat", "products": "tool", "mixed-shell": "shell", "mixed-pi": "harbor"}


def configuration(engine_url: str) -> str:
    return "".join(
        [
            f'run = "mixed"\nsteps = 1\n[engine]\nurl = "{engine_url}"\nmax_context = 16384\n',
            "[batch]\ndp = 2\ntoken_budget = 16384\n",
            pool_and_source("sums", "chat", "arithmetic", max_tokens=32),
            pool_and_source("products", "tool", "calculator", max_tokens=128),
            pool_and_source("mixed-shell", "shell", "harbor"),
            pool_and_source("mixed-pi", "harbor", "harbor", f'{{ agent = "pi", folder = "{SCAFFOLDS}" }}'),
        ]
    )


async def test_four_harnesses_give_one_batch_and_a_step(tmp_path: Path) -> None:
    assert missing("pi") == ""
    policy = ServedPolicy(mixed)
    async with served(policy.application()) as url:
        run = Launched(tmp_path, configuration(url), "mixed")
        run.start()
        log = await run.log()
        try:
            events = await asyncio.wait_for(history(run, log), 120)
            store = ObjectStore.open(load(run.home / "config.toml").store)
            await check_history(events, store, 1)
            await check_batch(events, store, policy, HARNESSES)
        finally:
            await log.close()
        assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    assert run.restarts() == {}
    for source in HARNESSES:
        assert nothing_left(source) == [MOUNT_POINT]
