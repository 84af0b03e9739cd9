"""What a packer does again after an outage: only what is left."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.store import ObjectDamaged, StoreUnavailable
from services.packer import building


async def test_after_an_outage_only_what_is_left_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store.outage.RETRY_S", 0.0)
    done, tried, under_way = list[int](), [0, 0, 0], asyncio.Event()

    def work(number: int) -> Any:
        async def run() -> None:
            tried[number] += 1
            if number == 1 and tried[1] < 3:
                await under_way.wait()
                raise StoreUnavailable("s3://b", "is away", "wait")
            if number == 2 and tried[2] == 1:
                under_way.set()
                await asyncio.Event().wait()  # in flight when another one fails: given up
            done.append(number)

        return run

    ctx = cast("Any", SimpleNamespace(logger=logging.getLogger("packtrain")))
    await building._all([work(0), work(1), work(2)], ctx)  # pyright: ignore[reportPrivateUsage]
    assert sorted(done) == [0, 1, 2]
    assert tried == [1, 3, 3] or tried == [1, 3, 2]


async def test_what_is_damaged_is_told_at_once_and_nothing_is_left_running() -> None:
    ended = asyncio.Event()

    async def damaged() -> None:
        raise ObjectDamaged("k", "a flipped bit", "tokens", 3)

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    ctx = cast("Any", SimpleNamespace(logger=logging.getLogger("packtrain")))
    with pytest.raises(ObjectDamaged, match="flipped"):
        await building._all([endless, damaged], ctx)  # pyright: ignore[reportPrivateUsage]
    assert ended.is_set()
