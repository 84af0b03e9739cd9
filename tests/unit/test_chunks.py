"""Rows in chunks: each scored once, upon enough of what is before it, by requests that are not too long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.signal.chunks import chunks, rows_of
from schemas.payload import Span


@given(st.data())
def test_every_row_is_scored_once_upon_its_overlap_by_requests_that_fit(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 40))
    overlap = data.draw(st.integers(0, window - 1))
    wanted = data.draw(st.sets(st.integers(0, 400)))
    rows = np.array(sorted(wanted), np.int64)
    found = chunks(rows, window, overlap)
    assert [row for chunk in found for row in chunk.rows] == sorted(wanted)
    for chunk in found:
        first, last = int(chunk.rows[0]), int(chunk.rows[-1])
        assert 0 <= chunk.start <= first - min(first, overlap)
        assert chunk.end == last + 1 <= chunk.start + window
    # One that begins later than the row gives no more than the overlap: what is before it was not needed.
    assert all(chunk.start in (0, int(chunk.rows[0]) - overlap) for chunk in found)
    if wanted and max(wanted) < window:
        assert [(chunk.start, chunk.end) for chunk in found] == [(0, max(wanted) + 1)]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(2, 64), st.integers(1, 63), st.data()
)
def test_joined_scores_are_those_of_each_rows_own_context(
    tokens: list[int], window: int, overlap: int, data: st.DataObject
) -> None:
    """A teacher that looks back no further than the overlap is scored exactly, in however many chunks."""
    row = np.array(tokens * 8, np.int64)
    overlap = min(overlap, window - 1)

    def scored(part: np.ndarray) -> np.ndarray:
        return np.array([part[max(0, i - overlap) : i + 1].sum() for i in range(len(part))])

    wanted = np.array(sorted(data.draw(st.sets(st.integers(0, len(row) - 1)))), np.int64)
    joined = [
        scored(row[chunk.start : chunk.end])[chunk.rows - chunk.start]
        for chunk in chunks(wanted, window, overlap)
    ]
    assert np.concatenate([np.empty(0), *joined]).tolist() == scored(row)[wanted].tolist()


def test_a_stretch_that_nobody_asks_about_is_not_sent() -> None:
    rows = rows_of([Span(start=3, end=5), Span(start=900, end=904)])
    found = chunks(rows, 100, 10)
    assert [(c.start, c.end, c.rows.tolist()) for c in found] == [
        (0, 5, [3, 4]),
        (890, 904, [900, 901, 902, 903]),
    ]


@pytest.mark.parametrize(("window", "overlap"), [(8, 8), (8, 9), (0, 0), (8, -1)])
def test_a_window_without_room_is_refused(window: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="must be smaller"):
        chunks(rows_of([Span(start=0, end=4)]), window, overlap)


def test_no_rows_need_no_request() -> None:
    assert chunks(rows_of([]), 8, 2) == []
