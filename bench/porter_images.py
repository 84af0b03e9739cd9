"""Images: what is uploaded, and how even the encoders' loads are."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from log_server import say
from porter_world import figure
from report import Figure

from pipeline.vision.encoder_plan import encoder_plan, lower_bound
from pipeline.vision.items import cost
from schemas.payload import ImageItem
from schemas.vision import Vision
from tests.unit.test_capture_showing import a_picture, uploaded

TURNS, SIBLINGS = 20, 8
SIDES = 24, 32
"""Pixels of a picture's height and width."""


async def images(ranks: int, count: int) -> list[Figure]:
    """20 turns of a screenshot each, 8 siblings; and one micro-batch number's images on so many ranks."""
    sent, without = await uploaded(TURNS, SIBLINGS, *SIDES)
    size = len(a_picture(*SIDES).data)
    say(f"images: {sent} uploads of {without} that whole requests would have had")
    vision, rng = Vision(), np.random.default_rng(0)
    items = [
        ImageItem(
            digest=f"{i:064x}",
            bytes=1,
            height=28,
            width=28,
            patches=int(patches),
            start=0,
            end=int(patches) // 4,
        )
        for i, patches in enumerate(np.clip(rng.lognormal(7, 0.8, count), 16, 16_384).astype(int) // 4 * 4)
    ]
    plan = encoder_plan([items], ranks, vision.linear_cost, vision.quadratic_cost)
    assert plan is not None
    weights = {item.digest: cost(item, vision.linear_cost, vision.quadratic_cost) for item in items}
    loads: dict[int, float] = defaultdict(float)
    for digest, rank in zip(plan.digest, plan.encoder, strict=True):
        loads[rank] += weights[digest]
    bound = lower_bound(list(weights.values()), ranks)
    # As frameworks do it that encode where the sequence is: in the order in which they come.
    turns = [sum(list(weights.values())[rank::ranks]) for rank in range(ranks)]
    return [
        # Small pictures, all of one size: it is the ratio that counts.
        figure("images.uploads", sent * size, "bytes", without * size / 10, without * size, "lower"),
        figure("images.encoders", max(loads.values()) / bound, "x", 1.05, max(turns) / bound, "lower"),
    ]
