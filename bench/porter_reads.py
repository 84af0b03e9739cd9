"""Bytes that context-parallel ranks read of their windows' payloads, against whole rows."""

from __future__ import annotations

from collections.abc import Sequence

from log_server import say
from porter_world import NARROW, ROUTED, figure, plan_of, written
from report import Figure

from pipeline.batch.windows import plan_window
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.payload import PayloadHeader

CPS = (1, 2, 4, 8, 16)
GOAL = 1.05


async def reads(store: ObjectStore, name: str, lengths: Sequence[int], routing: bool) -> list[Figure]:
    """Of rows of these lengths, a micro-batch each, in the layout of Megatron: by cp, what all ranks read over the bytes that their
    rows have in the payload; and `worst`, the rank and row for which that is most."""
    kind = "routing" if routing else "narrow"
    headers = await written(store, f"reads-{kind}", lengths, routing)
    row = NARROW + (ROUTED if routing else 0)
    whole = 0
    for header in headers:
        scope = store.scope()
        await scope.get_ranges(header.key, [(0, header.bytes)])
        whole += scope.counters.bytes_read
    figures: list[Figure] = []
    for cp in CPS:
        worst, total = 0.0, 0
        for header in headers:
            for rank in range(cp):
                fetched, tokens = await _fetched(store, header, cp, rank)
                worst, total = max(worst, fetched / (tokens * row)), total + fetched
        windows = sum(lengths) * row
        # Every rank fetches every row.
        figures.append(
            figure(f"reads.{kind}.cp{cp}.{name}", total / windows, "x", GOAL, cp * whole / windows, "lower")
        )
        if cp == CPS[-1]:
            figures.append(
                figure(f"reads.{kind}.cp{cp}.worst.{name}", worst, "x", GOAL, cp * whole / windows, "lower")
            )
            # One fetches every row, and sends each of the others a copy: from the store, and over the wire.
            leader = (whole + (cp - 1) * whole) / windows
            figures.append(
                figure(f"reads.{kind}.cp{cp}.leader.{name}", total / windows, "x", 0.0, leader, "lower")
            )
    found = ", ".join(f"cp {cp} {each['value']:.3f}" for cp, each in zip(CPS, figures, strict=False))
    say(f"reads {kind} {name}: {found}")
    return figures


async def _fetched(store: ObjectStore, header: PayloadHeader, cp: int, rank: int) -> tuple[int, int]:
    """Bytes that the rank's packer fetches of the row, counted where they arrive, and the rows of its window."""
    scope = store.scope()
    window = plan_window(plan_of([header], 1, cp), 0, 0, rank, columns=("routed_experts",))
    for job in window.jobs:
        for read in job.reads:
            await read_columns(scope, read.header, read.columns, read.spans)
    return scope.counters.bytes_read, window.tokens
