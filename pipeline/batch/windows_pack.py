"""The arrays of a window, piece by piece as its parts are read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.batch.windows_plan import LABEL, Window, shapes
from pipeline.batch.windows_reads import IDS, LOSS, OFFSETS, SIDECAR, Got, Job, Routing, loss_extent, split
from pipeline.batch.windows_rows import Array, Part, Row

Piece = tuple[str, int, Array]
"""Array, first row of it, values: of the array's dtype, C-contiguous."""
_AT_ONCE = 1 << 20
"""Bytes of routing that are put together from several columns at a time: what a processor's cache holds, until it is written."""


def frame(window: Window) -> dict[str, Array]:
    """The arrays that need nothing read but candidate offsets: position_ids, cu_seqlens, cu_seqlens_padded, max_seqlen, and
    candidates.offsets where the window has it."""
    positions = np.zeros(window.tokens, np.int64)
    for _, start, end, dst in window.segments:
        # They go on through the padding; those of a dummy sequence count from its own beginning.
        positions[dst : dst + end - start] = np.arange(start, end)
    bounds = window.bounds
    found = {
        "position_ids": positions,
        "cu_seqlens": bounds.cu,
        "cu_seqlens_padded": bounds.cu_padded,
        "max_seqlen": np.array(bounds.max_seqlen, np.int32),
    }
    if window.has_candidates:
        sizes = np.zeros(window.tokens + 1, np.int64)
        for i, offsets in (window.offsets or {}).items():
            part = window.parts[i]
            row = window.rows[part.row]
            if (lost := loss_extent(row, part)) is not None:
                at = part.at(row, lost[0]) + np.flatnonzero(row.loss().mask(*lost))
                sizes[at + 1] = np.diff(offsets)
        found[OFFSETS] = np.cumsum(sizes)
    return found


def job_pieces(window: Window, job: Job, columns: Sequence[Mapping[str, Array]]) -> Iterator[Piece]:
    """What a job's reads gave, to be written where it belongs: rows [first, first + len(values)) of an array. Rows of which
    nothing is said are 0. `columns[i]` has the columns of `job.reads[i]`, its spans one after the other. Raises ValueError that
    names the sequence when they and the plan disagree."""
    given = split(job.reads, columns)
    for i in job.parts:
        yield from pieces(window, i, given.get(i, {}))


def pieces(window: Window, number: int, got: Got) -> Iterator[Piece]:
    """Of one part of the window, as `job_pieces`."""
    part, stage = window.parts[number], window.stage
    row = window.rows[part.row]
    shift = row.context.offset

    def cut(name: str, lo: int, hi: int) -> Array:
        first, column = got[name]
        return column[lo + shift - first : hi + shift - first]

    if stage.first:
        yield "tokens", part.dst, cut("tokens", *part.tokens(row)).astype(np.int64)
    if stage.last:
        first, end = part.labels(row)
        if first < end:
            yield "labels", part.dst, cut("tokens", first, end).astype(np.int64)
        if (lost := loss_extent(row, part)) is not None:
            advantages = got[SIDECAR][1] if row.sidecar is not None else None
            mask, logprobs, versions = (cut(name, *lost) for name in LOSS)
            dst = part.at(row, lost[0])
            for name, values in _loss(row, lost, mask, logprobs, versions, advantages):
                yield name, dst, np.ascontiguousarray(values, LABEL[name])
    if stage.routing is not None:
        blocks = [
            (block.first, cut(block.column.name, *part.tokens(row))) for block in stage.blocks(row.payload)
        ]
        if blocks:
            yield from _routing(stage.routing, part, blocks)
    if IDS in got:
        yield IDS, window.bases[number], np.ascontiguousarray(got[IDS][1])


def pack(window: Window, columns: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The whole window: the arrays of `shapes`. `columns[i]` has the columns of `window.reads[i]`. Raises ValueError as
    `job_pieces`."""
    framed = frame(window)
    packed = {
        name: framed[name] if name in framed else np.zeros(shape, dtype)
        for name, (dtype, shape) in shapes(window).items()
    }
    at = 0
    for job in window.jobs:
        for name, first, values in job_pieces(window, job, columns[at : at + len(job.reads)]):
            packed[name][first : first + len(values)] = values
        at += len(job.reads)
    if at != len(columns):
        raise ValueError(f"window of {at} reads was given the columns of {len(columns)}")
    return packed


def _loss(
    row: Row, lost: tuple[int, int], mask: Array, logprobs: Array, versions: Array, sidecar: Array | None
) -> Iterator[tuple[str, Array]]:
    """The label-space arrays of the tokens [lost), each [lost[1] - lost[0]]. `sidecar`: one for each loss token there."""
    spanned = row.loss().mask(*lost)
    # The plan's denominators were counted from the spans: a mask that differs would change the loss unseen.
    if not np.array_equal(spanned, mask):
        raise ValueError(
            f"{row.name()}: on tokens [{lost[0]}, {lost[1]}) the payload's loss mask has {int(mask.sum())} tokens that are not the "
            f"{int(spanned.sum())} of its loss spans"
        )
    # What a payload says of tokens that carry no loss here is of no use to a rank, and would depend on how a pack is cut.
    yield "logprobs", np.where(spanned, logprobs, np.float32(0))
    yield "policy_version", np.where(spanned, versions, np.int32(0))
    trained = spanned
    if sidecar is None and row.changes is None:
        yield "advantages", np.where(spanned, np.float32(row.advantage * row.scale), np.float32(0))
    else:
        at = np.flatnonzero(spanned)
        values, kept = _by_token(row, at + lost[0], sidecar)
        advantages = np.zeros(len(spanned), np.float32)
        advantages[at] = np.where(kept, values, 0)
        trained = spanned.copy()
        trained[at] = kept
        yield "advantages", advantages
    yield "loss_mask", trained
    yield "loss_weights", np.where(trained, np.float32(row.loss_weight), np.float32(0))


def _by_token(row: Row, tokens: Array, sidecar: Array | None) -> tuple[Array, Array]:
    """Of n loss tokens of a context the advantage, float64 [n], and whether they are trained, bool [n]."""
    plain = sidecar.astype(np.float64) if sidecar is not None else np.full(len(tokens), row.advantage)
    advantages, kept = plain * row.scale, np.ones(len(tokens), np.bool_)
    if (changes := row.changes) is not None:
        # The first span that ends after a token is the one that it may be in.
        span = np.searchsorted(changes.end, tokens, side="right")
        changed = np.append(changes.start, row.context.tokens)[span] <= tokens
        span = span[changed]
        advantages[changed] = changes.multiply[span] * plain[changed] + changes.add[span]
        kept[changed] = changes.keep[span]
    return advantages, kept


def _routing(wanted: Routing, part: Part, blocks: Sequence[tuple[int, Array]]) -> Iterator[Piece]:
    """The stage's layers of a part, from its blocks (first layer, rows): as they are, where one block has just those."""
    first, rows = blocks[0]
    layers = wanted.end - wanted.first
    if first == wanted.first and rows.shape[1:] == (layers, wanted.k) and rows.dtype == wanted.dtype:
        yield "routed_experts", part.dst, np.ascontiguousarray(rows)
        return
    k = wanted.k
    # Flat rows: numpy copies runs of layers * k, not of k.
    flat = [(low, low + block.shape[1], block.reshape(len(block), -1)) for low, block in blocks]
    size = max(1, _AT_ONCE // (layers * k * np.dtype(wanted.dtype).itemsize))
    for at in range(0, len(rows), size):
        end = min(at + size, len(rows))
        whole = np.empty((end - at, layers * k), wanted.dtype)
        for low, high, block in flat:
            a, b = max(low, wanted.first), min(high, wanted.end)
            whole[:, (a - wanted.first) * k : (b - wanted.first) * k] = block[
                at:end, (a - low) * k : (b - low) * k
            ]
        yield "routed_experts", part.dst + at, whole.reshape(-1, layers, k)
