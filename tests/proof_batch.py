"""One batch with everything that a window can hold, for the proof: as raw numbers, as payloads in a store, and as plans."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

from pipeline.batch.arranging import arrange
from pipeline.batch.segments import FLAG_LOSS, FLAG_SAMPLED
from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload, write_sidecar
from pipeline.vision.encoder_plan import encoder_plan
from pipeline.vision.items import patches, shown, tokens
from schemas.config import Batch, Vision
from schemas.keys import image_key, payload_key, sidecar_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ContextMeta, ImageItem, Span
from schemas.plan import Plan, PlanChanges, PlanRows, PlanSequence

Array = np.ndarray[Any, Any]

VOCABULARY, LAYERS, EXPERTS, CHOSEN = 64, 2, 4, 2
PLACEHOLDER = 63
VISION = Vision(patch=4, merge=2, min_pixels=64, max_pixels=1 << 20)
SIZES = ((16, 24), (32, 32), (8, 16), (40, 24), (24, 24))
"""Height and width of the batch's images."""
MEMBERS = 4
"""Sequences of a sample: 12 in all."""
SIDECARS = (1, 7)
SCALED = {6: 0.5}
CHANGED: dict[tuple[int, int], tuple[float, float, bool]] = {
    (0, 0): (0.25, -0.5, True),
    (1, 0): (1.5, 0.0, True),
    (3, 1): (0.0, 0.0, False),
    (8, 0): (-1.0, 0.125, True),
}
"""Of (sequence, context): multiply, add and keep of its first loss span's first half."""
SKIPPED = {(5, 0): 7}
SPILLED = {(2, 0)}
PLAIN = {4}
"""Sequences without candidate sets."""


@dataclass
class Context:
    """In token space. `candidates`: of every loss token, empty: none; `images`: number of the image and its first token."""

    tokens: Array
    mask: Array
    logprobs: Array
    routed: Array
    candidates: list[list[int]]
    spans: list[tuple[int, int]]
    images: list[tuple[int, int]]


@dataclass
class Sequence_:
    advantage: float
    contexts: list[Context]
    sidecar: Array | None = None


@dataclass
class Batch_:
    """The batch of a run as numbers; `planned`: its sequences once they are in a store, `pictures`: uint8 [height, width, 3]."""

    run: str
    pictures: list[Array]
    sequences: list[Sequence_]
    planned: list[PlanSequence] = field(default_factory=list[PlanSequence])


def made(run: str, seed: int = 5) -> Batch_:
    rng = np.random.default_rng(seed)
    pictures = [rng.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
    sequences: list[Sequence_] = []
    for number in range(3 * MEMBERS):
        # The first has every image, so that long ones straddle ranks; some are shown by several, one by nobody else.
        shows: dict[int, list[int]] = {0: [0, 1, 2, 3, 4], 3: [1], 6: [0, 0], 9: [3, 1]}
        contexts = [
            _context(rng, shows.get(number, []) if c == 0 else [], number not in PLAIN)
            for c in range(1 + number % 3)
        ]
        sequence = Sequence_(float(rng.normal()), contexts)
        if number in SIDECARS:
            sequence.sidecar = rng.normal(size=sum(int(c.mask.sum()) for c in contexts)).astype(np.float32)
        sequences.append(sequence)
    return Batch_(run, pictures, sequences)


def _context(rng: np.random.Generator, images: Sequence[int], with_candidates: bool) -> Context:
    length = int(rng.integers(9, 120))
    body = rng.integers(0, PLACEHOLDER, length, np.int32)
    parts, shown_at, at = [body[:3]], list[tuple[int, int]](), 3
    for image in images:
        rows = tokens(*SIZES[image], VISION)
        parts += [np.full(rows, PLACEHOLDER, np.int32), body[:1]]
        shown_at.append((image, at))
        at += rows + 1
    parts.append(body[3:])
    ids = np.concatenate(parts)
    mask = np.zeros(len(ids), np.uint8)
    # Two turns that are trained; the last token of all is.
    first = at + (len(ids) - at) // 4
    spans = [(first, first + (len(ids) - at) // 4 + 1), (len(ids) - (len(ids) - at) // 4 - 1, len(ids))]
    for a, b in spans:
        mask[a:b] = 1
    loss = np.flatnonzero(mask)
    candidates: list[list[int]] = []
    for t in loss:
        some = set(rng.integers(0, PLACEHOLDER, int(rng.integers(1, 6))).tolist()) | {int(ids[t])}
        candidates.append(sorted(some) if with_candidates and rng.random() < 0.7 else [])
    return Context(
        tokens=ids,
        mask=mask,
        logprobs=(-2 - 2 * rng.random(len(ids), np.float32)) * mask,
        routed=rng.integers(0, EXPERTS, (len(ids), LAYERS, CHOSEN)).astype(np.uint8),
        candidates=candidates,
        spans=spans,
        images=shown_at,
    )


def png(picture: Array) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


async def write(batch: Batch_, store: ObjectStore) -> None:
    """Puts the batch's images, payloads and sidecars into the store, and fills `batch.planned`."""
    items: list[dict[str, Any]] = []
    for picture in batch.pictures:
        data = png(picture)
        digest = hashlib.sha256(data).hexdigest()
        await store.create(image_key(batch.run, digest), data)
        high, wide = picture.shape[:2]
        items.append(
            {
                "digest": digest,
                "bytes": len(data),
                "height": high,
                "width": wide,
                "patches": patches(high, wide, VISION),
            }
        )
    for number, sequence in enumerate(batch.sequences):
        sample = sample_id("s", number // MEMBERS)
        name = sequence_id(sample, number % MEMBERS)
        key = payload_key(batch.run, "s", attempt_id(name, 1))
        header = await write_payload(store, key, _columns(sequence, number not in PLAIN))
        beside = None
        if sequence.sidecar is not None:
            beside = await write_sidecar(
                store, sidecar_key(key, "advantages.0"), {"advantages": sequence.sidecar}
            )
        metas: list[ContextMeta] = []
        offset = 0
        for c, context in enumerate(sequence.contexts):
            spilled = (number, c) in SPILLED
            images = tuple(
                ImageItem(**items[image], start=at, end=at + tokens(*SIZES[image], VISION))
                for image, at in context.images
            )
            metas.append(
                ContextMeta(
                    offset=offset,
                    tokens=len(context.tokens),
                    generated=int(context.mask.sum()),
                    loss_spans=() if spilled else tuple(Span(start=a, end=b) for a, b in context.spans),
                    spilled=int(context.mask.sum()) if spilled else 0,
                    min_version=0,
                    max_version=0,
                    images=images,
                )
            )
            offset += len(context.tokens)
        batch.planned.append(
            PlanSequence(
                source="s",
                sample=sample,
                sequence=name,
                payload=header,
                contexts=tuple(metas),
                advantages=beside,
            )
        )


def _columns(sequence: Sequence_, with_candidates: bool) -> dict[str, Array]:
    contexts = sequence.contexts
    segments: list[list[int]] = []
    offset = 0
    for c, context in enumerate(contexts):
        ends = [0, *(edge for span in context.spans for edge in span), len(context.tokens)]
        for i, (a, b) in enumerate(pairwise(ends)):
            if a < b:
                flags = FLAG_SAMPLED | FLAG_LOSS if i % 2 else 0
                segments.append([offset + a, offset + b, 2 if i % 2 else 1, flags, c])
        offset += len(context.tokens)
    sets = [ids for context in contexts for ids in context.candidates]
    found = {
        "tokens": np.concatenate([context.tokens for context in contexts]),
        "loss_mask": np.concatenate([context.mask for context in contexts]),
        "logprobs": np.concatenate([context.logprobs for context in contexts]),
        "policy_version": np.zeros(offset, np.int32),
        "segments": np.array(segments, np.int32),
        f"routed_experts.L0-{LAYERS - 1}": np.concatenate([context.routed for context in contexts]),
    }
    if with_candidates:
        found["candidates.offsets"] = np.cumsum([0, *map(len, sets)], dtype=np.int64)
        found["candidates.ids"] = np.array([one for ids in sets for one in ids], np.int32)
    return found


def places(batch: Batch_) -> list[tuple[int, int]]:
    """(sequence, context) of every row that is trained."""
    return [(s, c) for s, sequence in enumerate(batch.sequences) for c in range(len(sequence.contexts))]


def changed_span(batch: Batch_, place: tuple[int, int]) -> tuple[int, int]:
    a, b = batch.sequences[place[0]].contexts[place[1]].spans[0]
    return a, a + max(1, (b - a) // 2)


def trained(batch: Batch_, place: tuple[int, int]) -> int:
    """Tokens of a row that are trained."""
    context, skip = batch.sequences[place[0]].contexts[place[1]], SKIPPED.get(place, 0)
    kept = int(context.mask[skip + 1 if skip else 0 :].sum())
    if place in CHANGED and not CHANGED[place][2]:
        a, b = changed_span(batch, place)
        kept -= b - a
    return kept


def weight(batch: Batch_, sequence: int) -> float:
    """Prompt-mean: of every trained token of the sequence's group."""
    group = range(sequence // MEMBERS * MEMBERS, sequence // MEMBERS * MEMBERS + MEMBERS)
    mine = sum(trained(batch, place) for place in places(batch) if place[0] in group)
    return MEMBERS / (mine * len(batch.sequences))


def plan_of(batch: Batch_, settings: Batch) -> Plan:
    """The plan of the batch, which is in a store, for these sizes and this layout."""
    every = places(batch)
    lengths = [len(batch.sequences[s].contexts[c].tokens) - SKIPPED.get((s, c), 0) for s, c in every]
    placed = arrange(lengths, settings)
    rounds: list[list[ImageItem]] = [[] for _ in placed.sizes]
    for i, (s, c) in enumerate(every):
        rounds[placed.microbatch[i]] += shown(batch.planned[s].contexts[c], SKIPPED.get((s, c), 0))
    order = sorted(range(len(every)), key=lambda i: (placed.dp[i], placed.microbatch[i], placed.group[i], i))
    changes = [
        (row, *changed_span(batch, every[i]), *CHANGED[every[i]])
        for row, i in enumerate(order)
        if every[i] in CHANGED
    ]
    plan = Plan(
        run=batch.run,
        step=1,
        policy_version=0,
        dp=settings.dp,
        cp=settings.cp,
        tp=settings.tp,
        layout=settings.layout,
        cp_sizes=tuple(placed.sizes) if set(placed.sizes) != {settings.cp} else (),
        microbatches=len(placed.sizes),
        token_budget=settings.token_budget,
        loss_tokens=sum(trained(batch, place) for place in every),
        sequences=tuple(batch.planned),
        rows=PlanRows(
            sequence=tuple(every[i][0] for i in order),
            context=tuple(every[i][1] for i in order),
            dp=tuple(placed.dp[i] for i in order),
            microbatch=tuple(placed.microbatch[i] for i in order),
            group=tuple(placed.group[i] for i in order) if any(placed.group) else (),
            skip=tuple(SKIPPED.get(every[i], 0) for i in order),
            advantage=tuple(batch.sequences[every[i][0]].advantage for i in order),
            loss_weight=tuple(weight(batch, every[i][0]) for i in order),
            scale=tuple(SCALED.get(every[i][0], 1.0) for i in order),
        ),
        changes=PlanChanges.model_validate(
            {
                name: tuple(change[k] for change in changes)
                for k, name in enumerate(("row", "start", "end", "multiply", "add", "keep"))
            }
        ),
        images=encoder_plan(rounds, settings.dp * settings.cp, VISION.linear_cost, VISION.quadratic_cost),
    )
    plan.check()
    return plan
