"""Routing of contexts, turn by turn as the engine gave it, as the pieces of a payload's columns. Pure.

Promises: what is large is not copied, but where a payload's turns are of two types, or its layers go to several columns; a row
that no turn has (what was never an input: a context's last token) is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.batch.stages import stage_layers
from pipeline.engines.base import Routing

Column = npt.NDArray[np.generic]
_NAME = "routed_experts.L{}-{}"


def routed_rows(contexts: Iterable[tuple[int, Sequence[Routing]]]) -> list[Column]:
    """Rows [tokens, layers, k] of a payload's contexts, given as (tokens, routing of its turns from its own row 0, ascending),
    as pieces to be laid one after the other: of uint8 where all ids fit, else of uint16. No piece where no turn has any."""
    given = list(contexts)
    every = [routing.rows for _, routings in given for routing in routings]
    if not every:
        return []
    shape = every[0].shape[1:]
    wide = any(rows.dtype == np.uint16 and rows.max(initial=0) > 0xFF for rows in every)
    dtype = np.uint16 if wide else np.uint8
    pieces: list[Column] = []
    for tokens, routings in given:
        at = 0
        for routing in routings:
            if routing.start > at:
                pieces.append(np.zeros((routing.start - at, *shape), dtype))
                at = routing.start
            # The last turn has rows of what the template puts after it, which is no part of the context.
            rows = routing.rows[at - routing.start : tokens - routing.start]
            pieces.append(rows.astype(dtype, copy=False))
            at += len(rows)
        if at < tokens:
            pieces.append(np.zeros((tokens - at, *shape), dtype))
    return pieces


def by_stage(
    columns: Mapping[str, list[Column]], pp: int, pp_layers: Sequence[int]
) -> dict[str, list[Column]]:
    """A payload's columns with those of all layers' routing divided into one for each pipeline stage that has any, so that a
    stage reads its own. Raises ValueError where the policy's layers are not those that `pp_layers` divides."""
    found: dict[str, list[Column]] = {}
    for name, pieces in columns.items():
        if not name.startswith("routed_experts."):
            found[name] = pieces
            continue
        for first, end in stage_layers(pieces[0].shape[1], pp, pp_layers):
            if first < end:
                found[_NAME.format(first, end - 1)] = [piece[:, first:end] for piece in pieces]
    return found


def whole_name(pieces: Sequence[Column]) -> str:
    """The column's name when it has all layers."""
    return _NAME.format(0, pieces[0].shape[1] - 1)
