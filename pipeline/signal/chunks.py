"""How a row that is too long for one request goes to a teacher: in chunks that overlap. Pure.

Promises: every row that is asked about is scored exactly once, upon at least `overlap` tokens before it, or all that there
are; a row that fits goes whole, up to the last row that is asked about, and its scores are exact; tokens that nobody needs,
for their own score or as the overlap of another's, are not sent.

Scores of a later chunk are those of a context that was cut: the teacher does not see what is before the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.payload import Span

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a row in one request, which answers for `rows`: int64, ascending, of the whole row."""

    start: int
    end: int
    rows: Rows


def rows_of(spans: Iterable[Span]) -> Rows:
    """The rows in the spans, one after the other."""
    return np.concatenate(
        [np.empty(0, np.int64), *(np.arange(span.start, span.end, dtype=np.int64) for span in spans)]
    )


def chunks(rows: Rows, window: int, overlap: int) -> list[Chunk]:
    """The requests that answer for `rows` (ascending, distinct), of at most `window` tokens each.

    Each begins `overlap` tokens before the first row that the ones before it leave, or at the row's begin if that fits.
    Raises ValueError unless 0 <= overlap < window.
    """
    if not 0 <= overlap < window:
        raise ValueError(f"an overlap of {overlap} tokens in a window of {window}: it must be smaller")
    found: list[Chunk] = []
    at = 0
    while at < len(rows):
        first = int(rows[at])
        start = 0 if first < window else first - overlap
        upto = int(np.searchsorted(rows, start + window))
        found.append(Chunk(start, int(rows[upto - 1]) + 1, rows[at:upto]))
        at = upto
    return found
