"""Which layers a pipeline stage has: one rule for what is written by stage and for what a stage reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def stage_layers(layers: int, pp: int, pp_layers: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Of each of `pp` stages its layers with routing, [first, end), of `layers` that there are; a stage may have none.

    `pp_layers`: how many each has; empty: an even division, of which earlier stages get the rest. Raises ValueError where
    `pp_layers` has another number of stages or of layers.
    """
    counts = list(pp_layers) or [layers // pp + (stage < layers % pp) for stage in range(pp)]
    if len(counts) != pp or sum(counts) != layers:
        raise ValueError(
            f"batch.pp_layers {counts} are {sum(counts)} layers of {len(counts)} stages; the policy routes {layers} layers, and "
            f"batch.pp is {pp}: give the layers with routing of each stage"
        )
    return list(pairwise(accumulate(counts, initial=0)))
