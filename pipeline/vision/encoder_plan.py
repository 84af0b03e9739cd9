"""Who encodes which image. Pure and deterministic: one outcome for one input, on every machine.

Promises: in a round (the micro-batches of one number, of all data-parallel ranks) each image is encoded once, whatever the
number of contexts that show it; loads are by longest-processing-time-first (Graham 1969), so the most loaded rank has at
most (4/3 - 1/(3 * ranks)) times the least possible; ranks that are equal in a round are told apart by all rounds before it,
so that the few images of small rounds do not all go to the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pipeline.vision.items import cost
from schemas.payload import ImageItem
from schemas.plan import PlanImages


def encoder_plan(
    rounds: Sequence[Sequence[ImageItem]], ranks: int, linear: float, quadratic: float
) -> PlanImages | None:
    """`rounds[j]`: every image of every context of the j-th micro-batches, duplicates and all (`items.shown`); `ranks`: dp *
    cp; `linear`, `quadratic`: see `items.cost`. None when there are no images. Raises ValueError for an image that has two
    sizes."""
    microbatch: list[int] = []
    digests: list[str] = []
    encoder: list[int] = []
    before = [0.0] * ranks
    for number, images in enumerate(rounds):
        weights: dict[str, float] = {}
        for image in images:
            weight = cost(image, linear, quadratic)
            if weights.setdefault(image.digest, weight) != weight:
                raise ValueError(
                    f"image {image.digest} has two sizes in micro-batch {number}: its contexts were made with different vision.*"
                )
        loads = [(0.0, before[rank], rank) for rank in range(ranks)]
        heapq.heapify(loads)
        for digest in sorted(weights, key=lambda digest: (-weights[digest], digest)):
            load, past, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + weights[digest], past, rank))
            microbatch.append(number)
            digests.append(digest)
            encoder.append(rank)
        for load, past, rank in loads:
            before[rank] = past + load
    if not digests:
        return None
    return PlanImages(microbatch=tuple(microbatch), digest=tuple(digests), encoder=tuple(encoder))


def lower_bound(weights: Sequence[float], ranks: int) -> float:
    """What no assignment of the weights to ranks can be below in its largest load: the mean; the largest; and of the ranks + 1
    largest, two that share a rank."""
    ordered = sorted(weights, reverse=True)
    if not ordered:
        return 0.0
    two = ordered[ranks - 1] + ordered[ranks] if len(ordered) > ranks else 0.0
    return max(sum(ordered) / ranks, ordered[0], two)
