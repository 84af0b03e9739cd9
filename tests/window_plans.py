"""Random plans with all that a plan may have, and the pack of each micro-batch made in one piece, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeline.batch.layouts import LAYOUTS
from schemas.parallel import LayoutName
from schemas.payload import ContextMeta
from schemas.plan import Plan, PlanRows, PlanSequence
from tests.window_parts import Columns, changes_of, context, key_of, sequence, sidecar_of

_OPS = [(1.0, 0.0, True), (0.5, 0.0, True), (0.0, -3.0, True), (1.0, -2.0, True), (1.0, 0.0, False)]
"""What tokens are changed by: (multiply, add, keep)."""
LABELS = ("labels", "loss_mask", "logprobs", "advantages", "loss_weights", "policy_version")


@dataclass
class Made:
    """A plan with what it stands for: of every row the whole context, made in one piece, token by token."""

    plan: Plan
    objects: dict[str, Columns] = field(default_factory=dict[str, Columns])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    layers: int = 0
    k: int = 1
    without: frozenset[str] = frozenset()


@st.composite
def plans(draw: st.DrawFn, longest: int = 40) -> Made:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cp, tp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    layout: LayoutName = draw(st.sampled_from(sorted(LAYOUTS)))
    sizes = (
        tuple(draw(st.sampled_from([s for s in (1, 2, 4, 8) if s <= cp])) for _ in range(2))
        if draw(st.booleans())
        else ()
    )
    layers, k = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    options = {
        name: draw(st.booleans()) for name in ("scale", "changes", "skip", "spill", "candidates", "wide")
    }
    sequences: list[PlanSequence] = []
    made = Made(plan=None, layers=layers, k=k)  # pyright: ignore[reportArgumentType]  # it is set below
    columns: dict[str, list[Any]] = {name: [] for name in (*PlanRows.model_fields,)}
    changes: list[tuple[int, int, int, float, float, bool]] = []
    for s in range(draw(st.integers(1, 4))):
        name = f"s-{s}"
        masks = [
            [0, *(rng.random(n - 1) < 0.5)] if rng.random() < 0.7 else [0] * n
            for n in rng.integers(1, longest, draw(st.integers(1, 3)))
        ]
        masks = [[int(bit) for bit in mask] for mask in masks]
        # Contexts are listed in another order than they lie in.
        order = rng.permutation(len(masks))
        offsets = np.zeros(len(masks), np.int64)
        offsets[order] = np.cumsum([0, *(len(masks[c]) for c in order[:-1])])
        flat = np.concatenate([masks[c] for c in order]).astype(np.uint8)
        total, lost = len(flat), int(flat.sum())
        payload: Columns = {
            "tokens": rng.integers(1, 1000, total, np.int32),
            "loss_mask": flat,
            # Of tokens that carry no loss as well: sampled, but trained elsewhere.
            "logprobs": rng.random(total, np.float32),
            "policy_version": rng.integers(0, 5, total, np.int32),
        }
        routing = None
        if layers and rng.random() < 0.8:
            wide = options["wide"] and rng.random() < 0.5
            routing = rng.integers(0, 999 if wide else 250, (total, layers, k)).astype(
                np.uint16 if wide else np.uint8
            )
            cuts = [0, *sorted(set(rng.integers(1, layers, 2).tolist())), layers] if layers > 1 else [0, 1]
            for a, b in pairwise(cuts):
                payload[f"routed_experts.L{a}-{b - 1}"] = routing[:, a:b]
        sets: list[list[int]] | None = None
        if options["candidates"] and rng.random() < 0.8:
            sets = [rng.integers(0, 99, rng.integers(0, 4)).tolist() for _ in range(lost)]
            payload["candidates.offsets"] = np.cumsum([0, *map(len, sets)], dtype=np.int64)
            payload["candidates.ids"] = np.array([i for each in sets for i in each], np.int32)
        sidecar = rng.integers(-9, 9, lost).astype(np.float32) if rng.random() < 0.5 else None
        metas: list[ContextMeta] = []
        segments: list[tuple[int, int, int, int, int]] = []
        for c, mask in enumerate(masks):
            meta = context(int(offsets[c]), mask)
            at = 0
            for span in meta.loss_spans:
                a, b = int(offsets[c]) + span.start, int(offsets[c]) + span.end
                segments += [(int(offsets[c]) + at, a, 0, 1, c), (a, b, 2, 3, c)]
                at = span.end
            segments.append((int(offsets[c]) + at, int(offsets[c]) + len(mask), 0, 0, c))
            if options["spill"] and meta.loss_spans and rng.random() < 0.5:
                meta = meta.model_copy(update={"loss_spans": (), "spilled": sum(mask)})
            metas.append(meta)
        payload["segments"] = np.array(segments, np.int32)
        made.objects[key_of(name)] = payload
        if sidecar is not None:
            made.objects[sidecar_of(name)] = {"advantages": sidecar}
        sequences.append(sequence(name, metas, sidecar is not None, payload))
        where = np.cumsum([0, *flat])[:-1]
        for c in rng.permutation(len(masks)):
            mb = int(rng.integers(2))
            row = len(columns["sequence"])
            skip = int(rng.integers(len(masks[c]))) if options["skip"] else 0
            advantage, weight = float(rng.integers(-4, 5)), float(rng.integers(1, 3))
            scale = float(rng.integers(-2, 3)) if options["scale"] else 1.0
            group = int(rng.integers(cp // sizes[mb])) if sizes else 0
            place = {
                "sequence": s, "context": int(c), "dp": 0, "microbatch": mb, "advantage": advantage, "loss_weight": weight,
                "scale": scale, "group": group, "skip": skip,
            }  # fmt: skip
            for each, value in place.items():
                columns[each].append(value)
            tokens: list[dict[str, Any]] = []
            for t, bit in enumerate(masks[c]):
                at = int(offsets[c]) + t
                plain = float(sidecar[where[at]]) if bit and sidecar is not None else advantage
                op = (
                    _OPS[rng.integers(len(_OPS))]
                    if bit and options["changes"] and rng.random() < 0.6
                    else None
                )
                if metas[c].spilled:
                    op = None
                if op is not None:
                    changes.append((row, t, t + 1, *op))
                value = plain * scale if op is None else op[0] * plain + op[1]
                trained = bool(bit) and (op is None or op[2])
                tokens.append(
                    {
                        "labels": int(payload["tokens"][at]),
                        "loss_mask": float(trained),
                        "logprobs": payload["logprobs"][at] if bit else 0,
                        "policy_version": payload["policy_version"][at] if bit else 0,
                        "advantages": value if trained else 0,
                        "loss_weights": weight if trained else 0,
                        "candidates": sets[where[at]] if bit and sets is not None else [],
                        "routing": routing[at] if routing is not None else None,
                    }
                )
            made.rows.append({**place, "name": name, "tokens": tokens[skip:], "offset": int(offsets[c])})
    optional = {"scale": options["scale"], "group": bool(sizes), "skip": options["skip"]}
    made.plan = Plan(
        run="r",
        step=3,
        policy_version=2,
        dp=1,
        cp=cp,
        tp=tp,
        layout=layout,
        fp8=LAYOUTS[layout].fp8 and draw(st.booleans()),
        cp_sizes=sizes,
        microbatches=2,
        token_budget=10**6,
        loss_tokens=1,
        sequences=tuple(sequences),
        rows=PlanRows.model_validate(
            {n: tuple(v) if optional.get(n, True) else () for n, v in columns.items()}
        ),
        changes=changes_of(changes) if changes else None,
    )
    if draw(st.booleans()):
        made.without = frozenset({f"s-{draw(st.integers(0, 3))}"})
    return made


def _up(number: int, multiple: int) -> int:
    return number + -number % multiple


def _lengths(plan: Plan, lengths: list[int], cp: int) -> list[int]:
    """Padded lengths, and the dummy's where there is one."""
    tp, name = plan.tp, plan.layout
    zigzag = 2 * cp * tp if cp > 1 else tp
    each = {"contiguous": cp * tp, "megatron": zigzag, "verl": zigzag, "slime": 2 * cp if cp > 1 else 1}.get(
        name, 1
    )
    whole = {
        "slime": 128 * cp * tp,
        "slime_allgather": 128 * cp * tp,
        "ulysses": cp,
        "zigzag_pack": zigzag,
    }.get(name, 1)
    padded = [_up(n, lcm(16, each) if plan.fp8 else each) for n in lengths]
    tail = -sum(padded) % (128 * each if plan.fp8 else whole)
    if plan.fp8 and padded:
        padded[-1] += tail
    elif tail and not plan.fp8:
        padded.append(tail)
    return padded


def in_one_piece(made: Made, microbatch: int, group: int, cp: int) -> dict[str, Any]:
    """The pack: `candidates` as lists, `routing` of all layers; everything else as windows have it."""
    plan = made.plan
    rows = [r for r in made.rows if (r["microbatch"], r["group"]) == (microbatch, group)]
    padded = _lengths(plan, [len(row["tokens"]) for row in rows], cp)
    found: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "position_ids", *LABELS, "candidates", "routing")
    }
    blank = np.zeros((made.layers, made.k), np.uint16)
    for i, length in enumerate(padded):
        real = rows[i]["tokens"] if i < len(rows) and rows[i]["name"] not in made.without else []
        for t in range(length):
            here = real[t] if t < len(real) else None
            after = real[t + 1] if t + 1 < len(real) else None
            found["tokens"].append(here["labels"] if here else 0)
            found["position_ids"].append(t)
            for name in LABELS:
                found[name].append(after[name] if after else 0)
            found["candidates"].append(after["candidates"] if after else [])
            found["routing"].append(here["routing"] if here and here["routing"] is not None else blank)
    lengths = [len(row["tokens"]) for row in rows] + [0] * (len(padded) - len(rows))
    bounds = {
        "cu_seqlens": np.cumsum([0, *lengths]),
        "cu_seqlens_padded": np.cumsum([0, *padded]),
        "max_seqlen": max(padded, default=0),
    }
    return {**found, **bounds}
