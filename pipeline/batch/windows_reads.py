"""What the parts of a window read: columns and row ranges of payloads and sidecars, gathered into jobs. Pure.

Promises:
- of a payload only the columns that the pipeline stage has a use for are read, and of its routing only the blocks that have a
  layer of the stage;
- a token is read by the parts that have it, and by the one before it as its label: one row of halo a part;
- loss columns are read from a part's first to its last loss token, and not at all where it has none;
- what a job wants of one object is one read, with rows of each column for itself: how they are fetched is the store's to decide;
- a job is at most about `PART_BYTES`, so that a window is built with little beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from pipeline.batch.stages import stage_layers
from pipeline.batch.windows_rows import Array, Part, Row
from schemas.payload import ColumnHeader, PayloadHeader, Span

LOSS: tuple[str, ...] = ("loss_mask", "logprobs", "policy_version")
"""Payload columns in label space beside the tokens."""
SIDECAR = "advantages"
"""Column of a sidecar, which has a row for each loss token of its sequence."""
OFFSETS, IDS = "candidates.offsets", "candidates.ids"
PART_BYTES = 16 << 20
TOGETHER = 1 << 20
"""Bytes from which on a part is a job by itself: its columns are then views of what was fetched, not copies."""
_BLOCK = re.compile(r"routed_experts\.L(\d{1,6})-(\d{1,6})")
Got = Mapping[str, tuple[int, Array]]
"""What one part was given: by column, the first row of it and the rows."""


class Block(NamedTuple):
    """A column with the routing of layers [first, end)."""

    first: int
    end: int
    column: ColumnHeader


@dataclass(frozen=True)
class Routing:
    """The routing of a window: layers [first, end) of the policy, k experts each, of the widest type in the pack."""

    first: int
    end: int
    k: int
    dtype: str


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage wants of payloads."""

    first: bool
    last: bool
    routing: Routing | None = None
    candidates: bool = False
    routed: Mapping[str, tuple[Block, ...]] = field(default_factory=dict[str, tuple[Block, ...]])
    """By the key of a payload the routing that the stage has a use for."""

    def blocks(self, header: PayloadHeader) -> tuple[Block, ...]:
        return self.routed.get(header.key, ())

    def row_bytes(self, header: PayloadHeader) -> int:
        """Of one token of the payload, about."""
        routing = sum(_row_bytes(block.column) for block in self.blocks(header))
        return routing + 4 * (self.first or self.last) + 9 * self.last

    def has_candidates(self, header: PayloadHeader) -> bool:
        return self.candidates and any(column.name == OFFSETS for column in header.columns)


@dataclass(frozen=True)
class Read:
    """Columns of one object: of each the rows, `spans[column][i]` for part `parts[column][i]` of the window."""

    sequence: str
    header: PayloadHeader
    spans: Mapping[str, tuple[Span, ...]]
    parts: Mapping[str, tuple[int, ...]]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.spans)


@dataclass(frozen=True)
class Job:
    """Parts that are read together and can be written then. `bytes`: of what is read, about."""

    parts: tuple[int, ...]
    reads: tuple[Read, ...]
    bytes: int


class _Wanted:
    """Rows of the objects of one sequence, as they are gathered."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[PayloadHeader, dict[str, list[tuple[int, Span]]]]] = {}

    def add(self, header: PayloadHeader, columns: Iterable[str], part: int, first: int, end: int) -> None:
        _, found = self._found.setdefault(header.key, (header, {}))
        for name in columns:
            found.setdefault(name, []).append((part, Span(start=first, end=end)))

    def reads(self, sequence: str) -> Iterator[Read]:
        for header, found in self._found.values():
            spans = {name: tuple(span for _, span in rows) for name, rows in found.items()}
            parts = {name: tuple(part for part, _ in rows) for name, rows in found.items()}
            yield Read(sequence, header, spans, parts)


def routing_of(
    headers: Iterable[PayloadHeader], stage: int, stages: int, pp_layers: Sequence[int]
) -> tuple[Routing | None, dict[str, tuple[Block, ...]]]:
    """The routing of a pack at a pipeline stage, and by key of each payload the columns with some of it; None where no payload has
    any, or the stage has no such layer. Raises ValueError where payloads differ in layers or experts, or the stages in layers."""
    found: tuple[int, int, str] | None = None
    dtype = "uint8"
    # Once a payload: names are parsed here, and asked for by every part of every row.
    every = {header.key: _blocks(header) for header in headers}
    for key, blocks in every.items():
        if not blocks:
            continue
        layers, k = blocks[-1].end, blocks[0].column.shape[2]
        if found is not None and found[:2] != (layers, k):
            raise ValueError(
                f"payload {key} routes {layers} layers to {k} experts, {found[2]} of the same pack {found[0]} to {found[1]}"
            )
        found = (layers, k, key)
        dtype = "uint16" if any(block.column.dtype == "uint16" for block in blocks) else dtype
    if found is None:
        return None, {}
    first, end = stage_layers(found[0], stages, pp_layers)[stage]
    if first == end:
        return None, {}
    wanted = {
        key: tuple(block for block in blocks if block.first < end and first < block.end)
        for key, blocks in every.items()
    }
    return Routing(first, end, found[1], dtype), wanted


def jobs(
    rows: Sequence[Row], parts: Sequence[Part], stage: Stage, offsets: Mapping[int, Array]
) -> Iterator[Job]:
    """What is read for parts, in their order but for neighbours of one sequence, which are read together while they are small.
    `offsets`: candidate offsets of parts, as `with_offsets` has checked them."""
    small: list[int] = []
    held = 0
    for i, part in enumerate(parts):
        row = rows[part.row]
        size = (part.end - part.start + 1) * stage.row_bytes(row.payload)
        if size >= TOGETHER:
            yield _job([i], rows, parts, stage, offsets, size)
            continue
        if small and (rows[parts[small[-1]].row].sequence != row.sequence or held + size > PART_BYTES):
            yield _job(small, rows, parts, stage, offsets, held)
            small, held = [], 0
        small.append(i)
        held += size
    if small:
        yield _job(small, rows, parts, stage, offsets, held)


def _job(
    chosen: Sequence[int],
    rows: Sequence[Row],
    parts: Sequence[Part],
    stage: Stage,
    offsets: Mapping[int, Array],
    size: int,
) -> Job:
    wanted = _Wanted()
    for i in chosen:
        row = rows[parts[i].row]
        for columns, first, end in _ranges(row, parts[i], stage):
            wanted.add(row.payload, columns, i, row.context.offset + first, row.context.offset + end)
        # Beside them: what has a row for each loss token, and each candidate.
        if stage.last and row.sidecar is not None and (lost := loss_extent(row, parts[i])) is not None:
            wanted.add(row.sidecar, (SIDECAR,), i, *_loss_rows(row, lost))
        if (found := offsets.get(i)) is not None and found[0] < found[-1]:
            wanted.add(row.payload, (IDS,), i, int(found[0]), int(found[-1]))
    return Job(tuple(chosen), tuple(wanted.reads(rows[parts[chosen[0]].row].sequence)), size)


def _ranges(row: Row, part: Part, stage: Stage) -> list[tuple[tuple[str, ...], int, int]]:
    """Payload columns and the context's tokens that a part reads of them."""
    (first, end), (label, last) = part.tokens(row), part.labels(row)
    found: list[tuple[tuple[str, ...], int, int]] = []
    if stage.first or stage.last:
        found.append((("tokens",), first if stage.first else label, last if stage.last else end))
    if stage.last and (lost := loss_extent(row, part)) is not None:
        found.append((LOSS, *lost))
    if blocks := stage.blocks(row.payload):
        found.append((tuple(block.column.name for block in blocks), first, end))
    return [each for each in found if each[1] < each[2]]


def loss_extent(row: Row, part: Part) -> tuple[int, int] | None:
    """[first, last + 1) of the loss tokens that a part predicts."""
    return row.loss().extent(*part.labels(row))


def _loss_rows(row: Row, lost: tuple[int, int]) -> tuple[int, int]:
    """Of the loss tokens in [lost) the rows of what has one for each loss token of the sequence."""
    spans = row.loss()
    return row.before + spans.count(lost[0]), row.before + spans.count(lost[1])


def offset_reads(rows: Sequence[Row], parts: Sequence[Part], stage: Stage) -> tuple[Read, ...]:
    """Where the candidate sets of parts' loss tokens begin and end."""
    by_sequence: dict[str, _Wanted] = {}
    for i, part in enumerate(parts):
        row = rows[part.row]
        if stage.has_candidates(row.payload) and (lost := loss_extent(row, part)) is not None:
            first, end = _loss_rows(row, lost)
            wanted = by_sequence.setdefault(row.sequence, _Wanted())
            wanted.add(row.payload, (OFFSETS,), i, first, end + 1)
    return tuple(read for name, wanted in by_sequence.items() for read in wanted.reads(name))


def split(
    reads: Sequence[Read], columns: Sequence[Mapping[str, Array]]
) -> dict[int, dict[str, tuple[int, Array]]]:
    """Columns per read (its spans one after the other) to what each part was given, as views. Raises ValueError on a column of
    another length."""
    found: dict[int, dict[str, tuple[int, Array]]] = {}
    for read, got in zip(reads, columns, strict=True):
        for name, spans in read.spans.items():
            column, at = got[name], 0
            total = sum(span.end - span.start for span in spans)
            if len(column) != total:
                raise ValueError(
                    f"sequence {read.sequence}: column {name} of {read.header.key} has {len(column)} rows, {total} were asked for"
                )
            for part, span in zip(read.parts[name], spans, strict=True):
                end = at + span.end - span.start
                found.setdefault(part, {})[name] = (span.start, column[at:end])
                at = end
    return found


def _blocks(header: PayloadHeader) -> list[Block]:
    """A payload's routing, by layer. Raises ValueError where its blocks do not make up all layers from 0."""
    found: list[Block] = []
    for column in header.columns:
        if match := _BLOCK.fullmatch(column.name):
            found.append(Block(int(match[1]), int(match[2]) + 1, column))
    found.sort(key=lambda block: block[:2])
    at = 0
    for block in found:
        shape = block.column.shape
        if (
            block.first != at
            or len(shape) != 3
            or shape[1:] != (block.end - at, found[0].column.shape[2])
            or block.column.dtype not in ("uint8", "uint16")
        ):
            raise ValueError(
                f"payload {header.key}: its routing {[(b.column.name, b.column.dtype, b.column.shape) for b in found]} does not make "
                "up layers from 0 on, uint8 or uint16 [tokens, layers, k]"
            )
        at = block.end
    return found


def _row_bytes(column: ColumnHeader) -> int:
    return np.dtype(column.dtype).itemsize * prod(column.shape[1:])
