"""Plans with images, and what their windows show by a computation of its own: from whole packs, cut by the layouts' rows."""

from __future__ import annotations

import random

import numpy as np

from pipeline.batch.layouts import local_rows, pack_bounds
from pipeline.vision.encoder_plan import encoder_plan
from pipeline.vision.items import shown
from schemas.parallel import LayoutName
from schemas.payload import ContextMeta, ImageItem, PayloadHeader, Span
from schemas.plan import Plan, PlanRows, PlanSequence


def an_image(digest: int, rows: int = 4, start: int = 0, frames: int = 1, side: int = 2) -> ImageItem:
    return ImageItem(
        digest=f"{digest:064x}", bytes=100, height=side, width=side + 1, patches=4 * rows, frames=frames, start=start, end=start + rows,
    )  # fmt: skip


def a_context(rng: random.Random, tokens: int, images: int) -> ContextMeta:
    """Images at random places, some of them next to each other."""
    placed: list[ImageItem] = []
    at = rng.randrange(3)
    while at < tokens:
        digest = rng.randrange(images)
        rows = 1 + digest * 7 % 11
        if at + rows > tokens:
            break
        placed.append(an_image(digest, rows, at, side=1 + digest))
        at += rows + rng.choice((0, 1, 2, 9))
    return ContextMeta(
        offset=0, tokens=tokens, generated=1, loss_spans=(Span(start=tokens - 1, end=tokens),), min_version=0, max_version=0,
        images=tuple(placed),
    )  # fmt: skip


def a_plan(rng: random.Random, layout: LayoutName, dp: int = 0, cp: int = 0) -> Plan:
    """Valid in what concerns images: rows at random places, some contexts truncated, some micro-batches of small cp sizes."""
    dp, cp = dp or rng.randint(1, 3), cp or rng.choice((1, 2, 4))
    tp, microbatches = rng.randint(1, 2), rng.randint(1, 3)
    sizes = [rng.choice([s for s in (1, 2, 4) if s <= cp]) for _ in range(microbatches)]
    sequences: list[PlanSequence] = []
    columns: dict[str, list[int]] = {
        n: [] for n in ("sequence", "context", "dp", "microbatch", "group", "skip")
    }
    rounds: list[list[ImageItem]] = [[] for _ in range(microbatches)]
    for s in range(rng.randint(1, 8)):
        contexts = tuple(a_context(rng, rng.randint(1, 60), 6) for _ in range(rng.randint(1, 3)))
        header = PayloadHeader(key=f"runs/r/payloads/s/p{s}.safetensors", bytes=0, columns=())
        sequences.append(
            PlanSequence(source="s", sample="m", sequence=f"q{s}", payload=header, contexts=contexts)
        )
        for c, context in enumerate(contexts):
            home = rng.randrange(microbatches)
            skip = rng.choice((0, 0, rng.randrange(context.tokens)))
            row = (s, c, rng.randrange(dp), home, rng.randrange(cp // sizes[home]), skip)
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
            rounds[home] += shown(context, skip)
    rows = PlanRows(
        **{name: tuple(values) for name, values in columns.items()},
        advantage=(0.0,) * len(columns["dp"]),
        loss_weight=(0.0,) * len(columns["dp"]),
    )
    return Plan(
        run="r", step=1, policy_version=0, dp=dp, cp=cp, tp=tp, layout=layout, cp_sizes=tuple(sizes), microbatches=microbatches,
        token_budget=10**6, loss_tokens=0, sequences=tuple(sequences), rows=rows,
        images=encoder_plan(rounds, dp * cp, 1.0, 0.01),
    )  # fmt: skip


def code(digest: str, row: int) -> int:
    """Of a row of the encoder's output."""
    return (int(digest, 16) + 1) * 1000 + row


def dense(plan: Plan, dp: int, microbatch: int, cp: int, without: frozenset[str]) -> np.ndarray:
    """What each local row of a window shows, 0 nothing: from the whole pack, cut by the layout's own rows."""
    size = plan.cp_sizes[microbatch]
    rows = plan.rows
    mine = [
        i
        for i in range(len(rows.dp))
        if (rows.dp[i], rows.microbatch[i], rows.group[i]) == (dp, microbatch, cp // size)
    ]
    contexts = [plan.sequences[rows.sequence[i]].contexts[rows.context[i]] for i in mine]
    lengths = [c.tokens - rows.skip[i] for c, i in zip(contexts, mine, strict=True)]
    bounds = pack_bounds(plan.layout, lengths, size, plan.tp)
    pack = np.zeros(bounds.total, np.int64)
    for place, (i, context) in enumerate(zip(mine, contexts, strict=True)):
        if plan.sequences[rows.sequence[i]].sequence in without:
            continue
        own = np.zeros(context.tokens, np.int64)
        for image in context.images:
            own[image.start : image.end] = [code(image.digest, row) for row in range(image.end - image.start)]
        kept = own[rows.skip[i] :]
        pack[bounds.ends[place] : bounds.ends[place] + len(kept)] = kept
    return pack[local_rows(plan.layout, bounds, size, cp % size)]
