"""What a packer does again after an outage: only what is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.feed.ahead import WindowId
from pipeline.store import ObjectDamaged, StoreUnavailable
from pipeline.vision.owners import Encode
from schemas.payload import ImageItem
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


async def test_an_image_is_on_its_way_with_its_object_and_its_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, written = list[int](), list[Any]()

    @asynccontextmanager
    async def record(at: WindowId, size: int) -> AsyncIterator[None]:
        entered.append(size)
        yield

    async def fetched(*_: object) -> None:
        return None

    monkeypatch.setattr("pipeline.feed.pixels.fetch_pixels", fetched)
    item = ImageItem(digest="0" * 64, bytes=1000, height=10, width=20, patches=4, start=0, end=1)
    draft = SimpleNamespace(write=lambda *given: written.append(given[:2]))
    image = Encode(item, 600, 1200, False)
    given = cast("Any", (None, "r", image, draft, SimpleNamespace(entered=record), WindowId(1, 0)))
    await building._image(*given)()  # pyright: ignore[reportPrivateUsage]
    assert (entered, written) == ([1000 + 2 * 600], [("images.pixels", 600)])


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
