"""The column `segments` as spans: what an event left to the payload because it had no room for it. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schemas.payload import Span

FLAG_SAMPLED, FLAG_LOSS = 1, 2
"""Bits of a segment's flags: the policy sampled it; its context trains it."""


def spans_of_segments(segments: npt.NDArray[np.int32], context: int) -> tuple[Span, ...]:
    """The loss spans of a context, as its ContextMeta would have them: one a segment that carries loss, ascending, from the
    context's own row 0.

    `segments`: the payload's whole column, int32 [S, 5] (start, end, role, flags, context; rows of the payload); `context`:
    index into the sequence's contexts. Raises ValueError where the context has no segment.
    """
    mine = segments[segments[:, 4] == context]
    if not len(mine):
        raise ValueError(f"no segment of {len(segments)} is of context {context}")
    # Segments cover their context without a gap, so that the first one tells where it begins.
    found = mine[(mine[:, 3] & FLAG_LOSS) != 0, :2] - mine[:, 0].min()
    return tuple(Span(start=start, end=end) for start, end in found.tolist())
