"""A window as metadata: its place, its geometry, what it reads, and the arrays that it will be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, prod
from typing import Any

import numpy as np

from pipeline.batch.layouts import Bounds, Segment, pack_bounds, segments
from pipeline.batch.segments import spans_of_segments
from pipeline.batch.windows_reads import (
    IDS,
    OFFSETS,
    PART_BYTES,
    Job,
    Read,
    Stage,
    jobs,
    offset_reads,
    routing_of,
    split,
)
from pipeline.batch.windows_rows import Array, Part, Row, Spans, check_spans, parts_of, rows_of
from schemas.parallel import LayoutName
from schemas.payload import Span
from schemas.plan import Plan

INPUT: dict[str, str] = {"tokens": "int64"}
LABEL: dict[str, str] = {
    "labels": "int64",
    "loss_mask": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "loss_weights": "float32",
    "policy_version": "int32",
}
"""Arrays of one value a row, [T], in label space: row t describes the token that it predicts."""
PACKED: dict[str, str] = {**INPUT, "position_ids": "int64", **LABEL}
"""Arrays of one value a row, [T], and their dtypes, that a window of a single stage has."""


@dataclass(frozen=True, eq=False)
class Window:
    """What one (dp, cp, pp) has of one micro-batch. `rows`: all contexts of its pack, which cp_size context-parallel ranks
    share, of which it is number cp_rank; `segments` and `parts`: what it has of them, ascending by dst. `tokens`: its rows T."""

    run: str
    step: int
    microbatch: int
    dp: int
    cp: int
    pp: int
    layout: LayoutName
    tp: int
    cp_size: int
    cp_rank: int
    group: int
    revision: int
    rows: tuple[Row, ...]
    bounds: Bounds
    segments: tuple[Segment, ...]
    parts: tuple[Part, ...]
    stage: Stage
    offsets: Mapping[int, Array] | None = field(default=None)
    """Of parts with loss tokens whose payload has candidates: where their sets begin and end in it, int64 [loss tokens + 1]."""

    @property
    def tokens(self) -> int:
        return self.bounds.total // self.cp_size

    @cached_property
    def segment_reads(self) -> tuple[Read, ...]:
        """The columns `segments` of the payloads that have loss spans which the window needs: for `with_segments`."""
        if not self.stage.last:
            return ()
        found: dict[str, Read] = {}
        for part in self.parts:
            row = self.rows[part.row]
            if row.spans is None:
                whole = Span(start=0, end=row.payload.column("segments").shape[0])
                found.setdefault(
                    row.sequence, Read(row.sequence, row.payload, {"segments": (whole,)}, {"segments": ()})
                )
        return tuple(found.values())

    @cached_property
    def offset_reads(self) -> tuple[Read, ...]:
        """Candidate offsets: for `with_offsets`. Empty once they are given. Raises ValueError before `with_segments`."""
        return offset_reads(self.rows, self.parts, self.stage) if self.offsets is None else ()

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """All other reads. Raises ValueError before `with_segments` or `with_offsets`, where there is something for them."""
        if self.offset_reads:
            raise ValueError(
                f"window of step {self.step} micro-batch {self.microbatch}: give its candidate offsets first (with_offsets)"
            )
        return tuple(jobs(self.rows, self.parts, self.stage, self.offsets or {}))

    @property
    def reads(self) -> tuple[Read, ...]:
        return tuple(read for job in self.jobs for read in job.reads)

    @cached_property
    def bases(self) -> dict[int, int]:
        """Where the candidate ids of each part begin in `candidates.ids`."""
        offsets = self.offsets or {}
        ends = accumulate((int(offsets[i][-1] - offsets[i][0]) for i in sorted(offsets)), initial=0)
        return dict(zip(sorted(offsets), ends, strict=False))

    @cached_property
    def has_candidates(self) -> bool:
        return any(self.stage.has_candidates(row.payload) for row in self.rows)

    @property
    def sized(self) -> bool:
        """Whether `shapes` knows all."""
        if not self.has_candidates or self.offsets is not None:
            return True
        return not self.segment_reads and not self.offset_reads


def plan_window(
    plan: Plan,
    dp: int,
    microbatch: int,
    cp: int = 0,
    pp: int = 0,
    *,
    stages: int = 1,
    pp_layers: Sequence[int] = (),
    columns: Sequence[str] = (),
    without: frozenset[str] = frozenset(),
    revision: int = 0,
) -> Window:
    """The window of a packer's coordinate. `stages`: pipeline stages that there are; `pp_layers`: as in the configuration;
    `columns`: optional ones that are wanted (routed_experts, candidates); `without`: sequences whose rows are blank, as the
    batch's `revision` says. Raises ValueError on coordinates outside the plan, and on what its payloads contradict."""
    if not (0 <= dp < plan.dp and 0 <= microbatch < plan.microbatches):
        raise ValueError(
            f"plan {plan.run}/{plan.step} has {plan.dp} data-parallel ranks of {plan.microbatches} micro-batches; "
            f"there is no micro-batch {microbatch} of rank {dp}"
        )
    if not (0 <= cp < plan.cp and 0 <= pp < stages):
        raise ValueError(
            f"plan {plan.run}/{plan.step} has cp {plan.cp}, and there are {stages} pipeline stages; there is no rank {cp} of stage {pp}"
        )
    size = plan.cp_sizes[microbatch] if plan.cp_sizes else plan.cp
    if plan.cp % size:
        raise ValueError(
            f"plan {plan.run}/{plan.step}: micro-batch {microbatch} has context-parallel size {size}, no divisor of {plan.cp}"
        )
    group, rank = divmod(cp, size)
    rows = tuple(rows_of(plan, dp, microbatch, group, without))
    bounds = pack_bounds(plan.layout, [row.length for row in rows], size, plan.tp, plan.fp8)
    mine = tuple(segments(plan.layout, bounds, size, rank))
    last = pp == stages - 1
    wanted = "routed_experts" in columns
    routing, routed = (
        routing_of((row.payload for row in rows), pp, stages, pp_layers) if wanted else (None, {})
    )
    stage = Stage(pp == 0, last, routing, last and "candidates" in columns, routed)
    for row in rows:
        _check_candidates(plan, row, stage)
    parts = (
        part
        for segment in mine
        if segment.row < len(rows)
        for part in parts_of(
            rows[segment.row], segment, PART_BYTES // max(1, stage.row_bytes(rows[segment.row].payload))
        )
    )
    return Window(
        run=plan.run,
        step=plan.step,
        microbatch=microbatch,
        dp=dp,
        cp=cp,
        pp=pp,
        layout=plan.layout,
        tp=plan.tp,
        cp_size=size,
        cp_rank=rank,
        group=group,
        revision=revision,
        rows=rows,
        bounds=bounds,
        segments=mine,
        parts=tuple(parts),
        stage=stage,
    )


def with_spans(window: Window, spans: Mapping[int, Sequence[Span]]) -> Window:
    """The window with the loss spans of rows whose plan left them to the payload. Raises ValueError where they are not as many
    as the plan counted."""
    rows = list(window.rows)
    for i, given in spans.items():
        rows[i] = replace(rows[i], spans=Spans.of(given))
        check_spans(rows[i])
        if not given:
            raise ValueError(
                f"{rows[i].name()}: it has no loss span, the plan says {rows[i].context.spilled} loss tokens"
            )
    return replace(window, rows=tuple(rows))


def with_segments(window: Window, columns: Sequence[Mapping[str, Array]]) -> Window:
    """`with_spans` from what `window.segment_reads` gave."""
    given = {read.sequence: got["segments"] for read, got in zip(window.segment_reads, columns, strict=True)}
    return with_spans(
        window,
        {
            i: spans_of_segments(given[row.sequence], row.number)
            for i, row in enumerate(window.rows)
            if row.spans is None and row.sequence in given
        },
    )


def with_offsets(window: Window, columns: Sequence[Mapping[str, Array]]) -> Window:
    """The window with what `window.offset_reads` gave: its shapes are exact then. Raises ValueError on offsets that do not ascend
    within their payload's ids."""
    found: dict[int, Array] = {}
    for part, got in split(window.offset_reads, columns).items():
        row, offsets = window.rows[window.parts[part].row], got[OFFSETS][1]
        total = row.payload.column(IDS).shape[0]
        if offsets[0] < 0 or offsets[-1] > total or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"{row.name()}: its candidate offsets do not ascend within the {total} ids of {row.payload.key}"
            )
        found[part] = offsets
    return replace(window, offsets=found)


def row_arrays(first: bool, last: bool) -> dict[str, str]:
    """Arrays of one value a row, and their dtypes, of the first pipeline stage, the last, both, or neither."""
    return {**(INPUT if first else {}), "position_ids": PACKED["position_ids"], **(LABEL if last else {})}


def shapes(window: Window) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array of the window: what the shared copy's size is planned from. Exact, but `candidates.ids` is
    left out until its size is known (`with_segments`, `with_offsets`)."""
    stage, length = window.stage, window.tokens
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        name: (dtype, (length,)) for name, dtype in row_arrays(stage.first, stage.last).items()
    }
    bounds = (len(window.bounds.padded) + 1,)
    found |= {
        "cu_seqlens": ("int32", bounds),
        "cu_seqlens_padded": ("int32", bounds),
        "max_seqlen": ("int32", ()),
    }
    if (routing := stage.routing) is not None:
        found["routed_experts"] = (routing.dtype, (length, routing.end - routing.first, routing.k))
    if window.has_candidates:
        found[OFFSETS] = ("int64", (length + 1,))
        if window.sized:
            found[IDS] = (
                "int32",
                (sum(int(each[-1] - each[0]) for each in (window.offsets or {}).values()),),
            )
    return found


def estimate(window: Window) -> int:
    """Bytes of the window's arrays, with `unknown_bytes`."""
    found = sum(np.dtype(dtype).itemsize * prod(shape) for dtype, shape in shapes(window).values())
    return found + unknown_bytes(window)


def unknown_bytes(window: Window) -> int:
    """Bytes of what `shapes` leaves out: candidate sets whose size is not known are taken to be as large as those of their payloads
    are in the mean."""
    return 0 if window.sized else 4 * ceil(sum(_guess(window, part) for part in window.parts))


def _guess(window: Window, part: Part) -> float:
    row = window.rows[part.row]
    if not window.stage.has_candidates(row.payload):
        return 0.0
    first, end = part.labels(row)
    lost = (
        row.context.spilled * (end - first) / row.length
        if row.spans is None
        else row.spans.count(end) - row.spans.count(first)
    )
    return lost * row.payload.column(IDS).shape[0] / max(1, row.payload.column(OFFSETS).shape[0] - 1)


def meta(window: Window) -> dict[str, Any]:
    """What a rank is told of its window beside the arrays, as JSON. `sequences`: the id of each row of the pack."""
    names = (
        "run",
        "step",
        "microbatch",
        "dp",
        "cp",
        "pp",
        "layout",
        "tp",
        "cp_size",
        "cp_rank",
        "group",
        "revision",
    )
    return {
        **{name: getattr(window, name) for name in names},
        "sequences": [row.sequence for row in window.rows],
    }


def _check_candidates(plan: Plan, row: Row, stage: Stage) -> None:
    if not stage.has_candidates(row.payload):
        return
    sequence = plan.sequences[plan.rows.sequence[row.index]]
    tokens = sum(context.loss_tokens() for context in sequence.contexts)
    if not row.payload.has(OFFSETS, "int64", (tokens + 1,)) or row.payload.column(IDS).dtype != "int32":
        found = {c.name: (c.dtype, c.shape) for c in row.payload.columns}
        raise ValueError(
            f"payload {row.payload.key} of sequence {row.sequence}, which has {tokens} loss tokens, must have the columns {OFFSETS}, "
            f"int64 ({tokens + 1},), and {IDS}, int32; it has {found}"
        )
