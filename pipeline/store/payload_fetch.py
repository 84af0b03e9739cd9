"""Which bytes of a payload object serve rows of some of its columns, and how those are verified. Pure.

Promises:
- every row that is returned was verified: in whole blocks of 65,536 rows by the header's CRC32C, in what is left of a block by
  the CRC32C of each granule, from the column's table of `schemas.payload.Checksums`; a column that no table is of is fetched
  in whole blocks;
- short columns (of at most 65,536 rows, at most 1 MiB of them together) are fetched as a whole, in one GET where at most so many
  bytes as make up that 1 MiB lie between them;
- of others, what lies between two ranges is fetched too only while all that is fetched stays within `WASTE` of the rows' own
  bytes, or where there would be more than `MOST_GETS` GETs;
- a span lies within one GET, so that it is a view of what was fetched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np

from pipeline.checksum import crc32c
from pipeline.store.errors import ObjectDamaged
from pipeline.store.payload_format import Column
from pipeline.store.ranges import COALESCE_GAP, Range, coalesce, thrifty
from schemas.payload import BLOCK_TOKENS, GRANULE_ROWS, ColumnHeader, PayloadHeader, Span

Spans: TypeAlias = Sequence[Span] | Mapping[str, Sequence[Span]] | None
"""Rows of all columns alike, or by column, or all rows."""

WASTE = 0.04
"""Bytes that may be fetched and dropped, as a part of those that are wanted."""
_Bytes: TypeAlias = Callable[[int, int], memoryview]
"""The object's bytes [start, end), which were fetched by one GET."""

MOST_GETS = 64
"""Of one read. A row of hundreds of turns has as many spans: so many small GETs cost more than what lies between."""


@dataclass(frozen=True)
class Fetch:
    """GETs of one object, and what becomes of their answers."""

    key: str
    gets: tuple[Range, ...]
    reads: tuple[_Read, ...]
    tables: Mapping[str, tuple[_Read, int]]
    """By column, for what is verified in granules: the rows of the table, and which of its columns."""

    @classmethod
    def of(cls, header: PayloadHeader, names: Sequence[str], spans: Spans, gap: int = COALESCE_GAP) -> Fetch:
        """`gap`: bytes between two ranges that may be fetched and dropped; 0: not one between two columns. Raises KeyError on a
        column that there is not, ValueError on a span outside it, ObjectDamaged on a header that contradicts itself."""
        columns = [_Read.of(header, name, _of_column(spans, name)) for name in names]
        short = (
            all(read.rows <= BLOCK_TOKENS for read in columns)
            and sum(read.column.bytes for read in columns if read.wanted) <= COALESCE_GAP
        )
        tabled = set[str]() if short else {name for table in header.checksums for name in table.columns}
        reads = [
            read.covering(GRANULE_ROWS if name in tabled else BLOCK_TOKENS)
            for read, name in zip(columns, names, strict=True)
        ]
        tables = _tables(header, reads)
        each = [read.ranges for read in (*reads, *dict.fromkeys(read for read, _ in tables.values()))]
        # With no gap to read over, a column's neighbours are not asked for, whatever gaps its own rows leave.
        groups = [[range_ for ranges in each for range_ in ranges]] if gap else each
        most = COALESCE_GAP if short else int((1 + WASTE) * sum(read.wanted for read in reads))
        gets = [
            get
            for ranges in groups
            for get in thrifty(ranges, most - sum(end - start for start, end in ranges), MOST_GETS, gap)
        ]
        return cls(header.key, tuple(coalesce(gets, 0)), tuple(reads), tables)

    @property
    def bytes(self) -> int:
        """That are fetched."""
        return sum(end - start for start, end in self.gets)

    def cut(self, bodies: Sequence[memoryview]) -> dict[str, list[Column]]:
        """By column a read-only view for each span, of the GETs' answers in order. Raises ObjectDamaged."""

        def fetched(start: int, end: int) -> memoryview:
            at = bisect_right(self.gets, start, key=lambda get: get[0]) - 1
            first = start - self.gets[at][0]
            return bodies[at][first : first + end - start]

        found: dict[str, list[Column]] = {}
        for read in self.reads:
            sums: dict[int, int] = {}
            if (table := self.tables.get(read.column.name)) is not None:
                rows, at = table
                for first, last in rows.runs:
                    part = rows.array(fetched, first, last)[:, at].view(np.uint32)
                    sums |= zip(range(first, last), part.tolist(), strict=True)
            read.verify(self.key, fetched, sums)
            found[read.column.name] = [read.array(fetched, span.start, span.end) for span in read.spans]
        return found


@dataclass(frozen=True)
class _Read:
    """A column, the rows of it that are wanted, and those that are fetched."""

    column: ColumnHeader
    spans: tuple[Span, ...]
    row: int
    """Bytes of one row."""
    runs: tuple[tuple[int, int], ...] = ()
    """Rows [start, end) that are fetched: ascending, apart."""

    @classmethod
    def of(cls, header: PayloadHeader, name: str, spans: Sequence[Span] | None) -> _Read:
        column = header.column(name)
        rows = column.shape[0] if column.shape else 0
        row = np.dtype(column.dtype).itemsize * prod(column.shape[1:])
        if (
            not column.shape
            or min(column.shape) < 0
            or rows * row != column.bytes
            or column.offset + column.bytes > header.bytes
            or len(column.crc32c) != -(-rows // BLOCK_TOKENS)
        ):
            raise ObjectDamaged(header.key, f"header of column {name} contradicts itself: {column!r}", name)
        wanted = tuple(spans) if spans is not None else (Span(start=0, end=rows),)
        for span in wanted:
            if not span.start <= span.end <= rows:
                raise ValueError(
                    f"payload {header.key}: rows [{span.start}, {span.end}) of column {name}, which has {rows}"
                )
        return cls(column, wanted, row)

    @property
    def rows(self) -> int:
        return self.column.shape[0]

    @property
    def wanted(self) -> int:
        """Bytes of the spans."""
        return sum(span.end - span.start for span in self.spans) * self.row

    @property
    def ranges(self) -> list[Range]:
        return [self._bytes(start, end) for start, end in self.runs]

    def covering(self, step: int) -> _Read:
        """The same with runs of whole steps, in rows, that cover the spans."""
        wanted = ((span.start, span.end) for span in self.spans if span.start < span.end and self.row)
        return replace(self, runs=_covering(wanted, step, self.rows))

    def partial(self) -> Iterator[tuple[int, int]]:
        """The rows of the runs that make up no whole block: their checksums are in a table."""
        for at, last in self.runs:
            first = min(-(-at // BLOCK_TOKENS) * BLOCK_TOKENS, last)
            tail = last if last == self.rows else max(first, last // BLOCK_TOKENS * BLOCK_TOKENS)
            yield from ((start, end) for start, end in ((at, first), (tail, last)) if start < end)

    def checks(self) -> Iterator[tuple[int, int, bool]]:
        """The rows [start, end) that one checksum each is of, and whether they are a whole block."""
        for at, last in self.runs:
            while at < last:
                block = min((at // BLOCK_TOKENS + 1) * BLOCK_TOKENS, self.rows)
                whole = at % BLOCK_TOKENS == 0 and block <= last
                end = block if whole else min(at + GRANULE_ROWS, last)
                yield at, end, whole
                at = end

    def verify(self, key: str, fetched: _Bytes, sums: Mapping[int, int]) -> None:
        """`sums`: of granules. Raises ObjectDamaged."""
        name = self.column.name
        for start, end, whole in self.checks():
            block = start // BLOCK_TOKENS
            written = self.column.crc32c[block] if whole else sums[start // GRANULE_ROWS]
            if (found := crc32c(fetched(*self._bytes(start, end)))) != written:
                raise ObjectDamaged(
                    key,
                    f"column {name}, block {block}, rows [{start}, {end}): CRC32C {found:08x}, written as {written:08x}",
                    name,
                    block,
                )

    def array(self, fetched: _Bytes, start: int, end: int) -> Column:
        shape = (end - start, *self.column.shape[1:])
        if start == end or not self.row:
            found = np.empty(shape, self.column.dtype)
        else:
            found = np.frombuffer(fetched(*self._bytes(start, end)), self.column.dtype).reshape(shape)
        found.flags.writeable = False
        return found

    def _bytes(self, start: int, end: int) -> Range:
        return self.column.offset + start * self.row, self.column.offset + end * self.row


def _of_column(spans: Spans, name: str) -> Sequence[Span] | None:
    return spans[name] if isinstance(spans, Mapping) else spans


def _tables(header: PayloadHeader, reads: Sequence[_Read]) -> dict[str, tuple[_Read, int]]:
    """The rows of tables that the reads need: of all columns of a table together."""
    granules = {
        read.column.name: [(start // GRANULE_ROWS, -(-end // GRANULE_ROWS)) for start, end in read.partial()]
        for read in reads
    }
    found: dict[str, tuple[_Read, int]] = {}
    for table in header.checksums:
        columns = [name for name in table.columns if granules.get(name)]
        if not columns:
            continue
        rows = {-(-header.column(name).shape[0] // GRANULE_ROWS) for name in columns}
        if len(rows) > 1 or not header.has(table.table, "int32", (*rows, len(table.columns))):
            raise ObjectDamaged(
                header.key, f"table {table.table} of checksums contradicts the header", table.table
            )
        read = _Read.of(header, table.table, ())
        wanted = (granule for name in columns for granule in granules[name])
        read = replace(read, runs=_covering(wanted, 1, read.rows))
        found |= {name: (read, table.columns.index(name)) for name in columns}
    return found


def _covering(wanted: Iterable[tuple[int, int]], step: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Runs of whole steps, ascending and apart, that cover what is wanted."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(wanted):
        first, last = start // step * step, min(-(-end // step) * step, rows)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return tuple(runs)
