"""Plans with made-up contexts, for windows and for what a plan promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.batch.windows import Read, Window, pack, with_offsets, with_segments
from schemas.payload import ColumnHeader, ContextMeta, PayloadHeader, Span
from schemas.plan import Plan, PlanChanges, PlanRows, PlanSequence

Change = tuple[int, int, int, float, float, bool]
"""Row, start, end, multiply, add, keep."""


def context(offset: int, mask: list[int], label: str = "main") -> ContextMeta:
    spans: list[Span] = []
    for t, bit in enumerate(mask):
        if bit and spans and spans[-1].end == t:
            spans[-1] = Span(start=spans[-1].start, end=t + 1)
        elif bit:
            spans.append(Span(start=t, end=t + 1))
    return ContextMeta(
        label=label,
        offset=offset,
        tokens=len(mask),
        generated=sum(mask),
        loss_spans=tuple(spans),
        min_version=0,
        max_version=9,
    )


Columns = dict[str, np.ndarray[Any, Any]]
Objects = Mapping[str, Mapping[str, np.ndarray[Any, Any]]]
"""Columns of payloads and sidecars by object key."""


def key_of(name: str) -> str:
    return f"runs/r/payloads/s/{name}-a1.safetensors"


def sidecar_of(name: str) -> str:
    return f"runs/r/payloads/s/{name}-a1.advantages.0.safetensors"


def header_of(key: str, columns: Mapping[str, np.ndarray[Any, Any]]) -> PayloadHeader:
    """As if the columns were an object, one after the other."""
    found: list[ColumnHeader] = []
    at = 8
    for name, column in columns.items():
        found.append(
            ColumnHeader.model_validate(
                {
                    "name": name,
                    "dtype": column.dtype.name,
                    "shape": column.shape,
                    "offset": at,
                    "bytes": column.nbytes,
                    "crc32c": (),
                }
            )
        )
        at += column.nbytes
    return PayloadHeader(key=key, bytes=at, columns=tuple(found))


def fetch(reads: Sequence[Read], objects: Objects) -> list[Columns]:
    """What the reads give: as the store would, a column's spans one after the other."""
    return [
        {
            name: np.concatenate([objects[read.header.key][name][s.start : s.end] for s in spans])
            for name, spans in read.spans.items()
        }
        for read in reads
    ]


def sized(window: Window, objects: Objects) -> Window:
    """The window with what must be read before its size is known."""
    window = with_segments(window, fetch(window.segment_reads, objects))
    return with_offsets(window, fetch(window.offset_reads, objects)) if window.offset_reads else window


def packed(window: Window, objects: Objects) -> Columns:
    window = sized(window, objects)
    return pack(window, fetch(window.reads, objects))


def sequence(
    name: str,
    contexts: list[ContextMeta],
    sidecar: bool = False,
    columns: Mapping[str, np.ndarray[Any, Any]] = {},
) -> PlanSequence:
    header = header_of(key_of(name), columns)
    tokens = sum(each.loss_tokens() for each in contexts)
    column = ColumnHeader(
        name="advantages", dtype="float32", shape=(tokens,), offset=8, bytes=4 * tokens, crc32c=(0,)
    )
    beside = PayloadHeader(key=sidecar_of(name), bytes=999, columns=(column,))
    return PlanSequence(
        source="s",
        sample="s-000000",
        sequence=name,
        payload=header,
        contexts=tuple(contexts),
        advantages=beside if sidecar else None,
    )


def plan_of(
    sequences: list[PlanSequence],
    rows: list[tuple[int, int, int, int, float, float]],
    changes: list[Change] = [],  # noqa: B006  # it is only read
    scale: tuple[float, ...] = (),
) -> Plan:
    """The plan, whose weights are the given ones over their sum on trained tokens."""
    columns = dict(
        zip(
            ("sequence", "context", "dp", "microbatch", "advantage", "loss_weight"),
            (tuple(row[i] for row in rows) for i in range(6)),
            strict=True,
        )
    )
    trained = [sequences[row[0]].contexts[row[1]].loss_tokens() for row in rows]
    for row, start, end, *_, keep in changes:
        trained[row] -= 0 if keep else end - start
    total = sum(row[5] * tokens for row, tokens in zip(rows, trained, strict=True)) or 1
    columns["loss_weight"] = tuple(row[5] / total for row in rows)
    plan = Plan(
        run="r",
        step=3,
        policy_version=2,
        dp=2,
        microbatches=2,
        token_budget=1000,
        loss_tokens=sum(trained),
        sequences=tuple(sequences),
        rows=PlanRows.model_validate({**columns, "scale": scale}),
        changes=changes_of(changes) if changes else None,
    )
    plan.check()
    return plan


def changes_of(changes: list[Change]) -> PlanChanges:
    names = ("row", "start", "end", "multiply", "add", "keep")
    return PlanChanges.model_validate(
        {name: tuple(change[i] for change in changes) for i, name in enumerate(names)}
    )
