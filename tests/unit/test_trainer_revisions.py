"""A batch that is planned anew while it is trained: no gradient of the older plan is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from pipeline.feed.feed import MicroBatch  # noqa: E402  # after importorskip
from pipeline.feed.memfd import SealedWindow, plan_layout, seal  # noqa: E402
from schemas.config import Engine, Trainer  # noqa: E402
from schemas.parallel import Sizes  # noqa: E402
from services.trainer import ranks  # noqa: E402
from services.trainer.loop import Rank  # noqa: E402
from tests.natsserver import free_port  # noqa: E402

LENGTH = 9


def micro_batch(index: int, revision: int) -> MicroBatch:
    """One context, of other tokens in each revision."""
    ids = np.random.default_rng(10 * index + revision).integers(1, 40, LENGTH)
    rows = {"tokens": ids, "labels": np.append(ids[1:], 0), "position_ids": np.arange(LENGTH)}
    loss = {
        name: np.full(LENGTH, value, np.float32)
        for name, value in (("logprobs", -3.0), ("advantages", 1.0), ("loss_weights", 0.1))
    }
    bounds = np.array([0, LENGTH], np.int32)
    arrays = {**rows, **loss, "cu_seqlens": bounds, "cu_seqlens_padded": bounds}
    meta = {"layout": "contiguous", "cp_size": 1, "cp_rank": 0, "sequences": [f"s-{index}-{revision}"]}
    layout = plan_layout(meta, {name: (str(a.dtype), a.shape) for name, a in arrays.items()})
    return MicroBatch(1, index, 2, SealedWindow(seal(layout, arrays)), revision)


class Given:
    """A feed whose packer learns of a new plan after the first micro-batch was given away."""

    def __init__(self, learns: bool) -> None:
        self.asked: list[int] = []
        self._newest = 1
        self._learns = learns

    def batch(self, step: int, revision: int = 0) -> Iterator[MicroBatch]:
        self.asked.append(revision)
        yield micro_batch(0, revision if self._learns else self._newest)
        yield micro_batch(1, self._newest)


@pytest.fixture
def mesh() -> Iterator[ranks.Mesh]:
    yield ranks.join(f"127.0.0.1:{free_port()}", 0, Sizes())
    ranks.leave()


def gradients(mesh: ranks.Mesh, feed: Given) -> tuple[Any, set[str], list[Any]]:
    config = SimpleNamespace(trainer=Trainer(), engine=Engine())
    context: Any = SimpleNamespace(config=config, index=0, logger=logging.getLogger("packtrain"))
    loop = asyncio.new_event_loop()
    try:
        given: Any = feed
        rank = Rank(context, given, mesh, loop)
        sums, sequences, _ = rank._gradients(1)
        return sums, sequences, [p.grad for p in rank._model.parameters() if p.grad is not None]
    finally:
        loop.close()


def test_a_step_of_two_revisions_is_taken_again_with_the_newest(mesh: ranks.Mesh) -> None:
    learning, knowing = Given(learns=True), Given(learns=False)
    sums, sequences, mine = gradients(mesh, learning)
    right, _, expected = gradients(mesh, knowing)
    assert (learning.asked, knowing.asked) == ([0, 1], [0])
    assert sequences == {"s-0-1", "s-1-1"}
    assert torch.equal(sums, right)
    assert len(mine) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
