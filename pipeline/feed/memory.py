"""How large a window may become, before there is one. Pure.

Counted are the arrays of one value a token. What only payloads know (routing, candidates, images) comes on top, and is known
when a batch is planned.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.batch.layouts import pack_bounds, padded_length
from pipeline.batch.windows import row_arrays
from schemas.config import Batch, Packer


def token_bytes(pp: int, stages: int) -> int:
    """Bytes that a token takes in a window of that pipeline stage."""
    return sum(np.dtype(dtype).itemsize for dtype in row_arrays(pp == 0, pp == stages - 1).values())


def largest_rows(batch: Batch) -> int:
    """Rows of a rank's window of a micro-batch that is as full as may be, padding included."""
    multiple = padded_length(batch.layout, 1, batch.cp, batch.tp, batch.fp8)
    full = batch.token_budget // multiple * multiple
    return pack_bounds(batch.layout, [full], batch.cp, batch.tp, batch.fp8).total // batch.cp


def largest_window(batch: Batch, stages: Iterable[int]) -> int:
    """Bytes of the largest window that a batch could have on one of those pipeline stages."""
    return largest_rows(batch) * max(token_bytes(pp, batch.pp) for pp in stages)


def too_small(batch: Batch, packer: Packer, pp: int | None = None) -> str | None:
    """What is wrong with `packer.memory_bytes`, if it has no room for the largest window (of that pipeline stage, or of any)."""
    needed = largest_window(batch, range(batch.pp) if pp is None else (pp,))
    if needed <= packer.memory_bytes:
        return None
    return (
        f"a micro-batch of batch.token_budget = {batch.token_budget} tokens needs a window of {needed} bytes on each packer, and more "
        f"with packer.columns or images; packer.memory_bytes is {packer.memory_bytes}: raise it to at least {needed}, or lower "
        "batch.token_budget"
    )
