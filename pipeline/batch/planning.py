"""The plan of a batch, as the bytes that are stored. Pure.

Promises:
- the plan holds every context with a loss token that no penalty masks exactly once, but none of a masked sequence, and equal
  micro-batch counts on all ranks: where there are too few contexts for that, some micro-batches are empty;
- prompt-mean weights: every group weighs the same, every loss token of a group that is trained weighs the same, and they sum to
  1; what is left of a truncated context counts, and nothing else of it;
- what penalties do to advantages rides in the plan, token span by token span; without any the plan says nothing of them;
- who encodes an image is planned for each micro-batch number that shows it;
- the bytes are `orjson.dumps(plan.model_dump(mode="json"))` of the plan that they are. They are put together from the JSON that
  groups keep, so that it takes a second, not five, for 25,000 contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from pipeline.batch.arranging import Arrangement, arrange
from pipeline.signal.groups import Group
from pipeline.signal.penalties import NO_FACTORS, Change, changes, factors_of, weighing
from pipeline.vision.encoder_plan import encoder_plan
from pipeline.vision.items import shown
from schemas.config import Decisions
from schemas.facts import PenaltyFactors
from schemas.payload import ContextMeta, ImageItem
from schemas.plan import PLAN_VERSION, Plan, PlanRows


class Planned(NamedTuple):
    """A plan as JSON, and its micro-batches per rank."""

    body: bytes
    microbatches: int


class _Contexts:
    """The contexts that are trained, as columns of one length. changes, images: of those contexts that have any."""

    def __init__(self) -> None:
        self.sequence: list[int] = []
        self.context: list[int] = []
        self.tokens: list[int] = []
        self.skip: list[int] = []
        self.advantage: list[float] = []
        self.weight: list[float] = []
        self.scale: list[float] = []
        self.changes: dict[int, list[Change]] = {}
        self.images: dict[int, tuple[ImageItem, ...]] = {}


def plan_body(
    groups: Sequence[Group], decisions: Decisions, run: str, step: int, whole: PenaltyFactors | None
) -> Planned:
    """The plan of a batch of these groups, each of which has a loss token; `whole`: its penalty factors."""
    batch = decisions.batch
    sequences, contexts = _columns(groups, decisions, whole)
    placed = arrange(contexts.tokens, batch)
    order = sorted(
        range(len(contexts.tokens)),
        key=lambda i: (placed.dp[i], placed.microbatch[i], placed.group[i], i),
    )
    images = _images(contexts.images, placed, decisions)
    plan: dict[str, Any] = {
        "version": PLAN_VERSION,
        "run": run,
        "step": step,
        "policy_version": step - 1,
        "dp": batch.dp,
        "cp": batch.cp,
        "tp": batch.tp,
        "layout": batch.layout,
        "fp8": batch.fp8,
        "cp_sizes": placed.sizes if set(placed.sizes) != {batch.cp} else (),
        "microbatches": len(placed.sizes),
        "token_budget": batch.token_budget,
        "loss_tokens": sum(group.loss_tokens() for group in groups),
        "sequences": sequences,
        "rows": _rows(contexts, placed, order),
        "changes": _changes(contexts.changes, order),
        "images": images.model_dump(mode="json") if images is not None else None,
    }
    return Planned(orjson.dumps(_without_defaults(plan, Plan)), len(placed.sizes))


def _columns(
    groups: Sequence[Group], decisions: Decisions, whole: PenaltyFactors | None
) -> tuple[list[dict[str, Any]], _Contexts]:
    sequences: list[dict[str, Any]] = []
    found = _Contexts()
    for group in groups:
        source = decisions.source(group.source)
        hook = weighing(source)
        weight = 1.0 / (len(groups) * group.loss_tokens())
        sidecars = group.sidecars or [None] * len(group.advantages)
        for finished, advantage, sidecar in zip(group.ordered(), group.advantages, sidecars, strict=True):
            factors = factors_of(hook, advantage, whole) if hook and whole else NO_FACTORS
            kept = finished.kept()
            metas: Sequence[ContextMeta] = ()
            if any(each.changed or each.shows for each in kept):
                metas = finished.contexts()
            for each in kept:
                i = len(found.tokens)
                if each.changed:
                    found.changes[i] = changes(metas[each.context], source.penalties, factors, each.skip)
                if each.shows:
                    found.images[i] = shown(metas[each.context], each.skip)
                found.sequence.append(len(sequences))
                found.context.append(each.context)
                found.tokens.append(each.tokens)
                found.skip.append(each.skip)
                found.advantage.append(advantage)
                found.weight.append(weight)
                found.scale.append(factors.others)
            sequence: dict[str, Any] = {
                "source": group.source,
                "sample": group.sample,
                "sequence": finished.sequence,
                "payload": orjson.Fragment(finished.payload_json),
                "contexts": orjson.Fragment(finished.contexts_json),
            }
            if sidecar is not None:
                sequence["advantages"] = orjson.Fragment(sidecar)
            sequences.append(sequence)
    return sequences, found


def _rows(contexts: _Contexts, placed: Arrangement, order: Sequence[int]) -> dict[str, Any]:
    def column(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in order]

    scaled, grouped, cut = set(contexts.scale) - {1.0}, any(placed.group), any(contexts.skip)
    rows: dict[str, Any] = {
        "sequence": column(contexts.sequence),
        "context": column(contexts.context),
        "dp": column(placed.dp),
        "microbatch": column(placed.microbatch),
        "advantage": column(contexts.advantage),
        "loss_weight": column(contexts.weight),
        "scale": column(contexts.scale) if scaled else (),
        "group": column(placed.group) if grouped else (),
        "skip": column(contexts.skip) if cut else (),
    }
    return _without_defaults(rows, PlanRows)


def _changes(found: Mapping[int, list[Change]], order: Sequence[int]) -> dict[str, Any] | None:
    if not found:
        return None
    rows = [(row, change) for row, i in enumerate(order) for change in found.get(i, ())]
    return {
        "row": [row for row, _ in rows],
        **{name: [getattr(change, name) for _, change in rows] for name in Change._fields[:-1]},
    }


def _images(found: Mapping[int, tuple[ImageItem, ...]], placed: Arrangement, decisions: Decisions):
    if not found:
        return None
    rounds: list[list[ImageItem]] = [[] for _ in placed.sizes]
    for i, images in found.items():
        rounds[placed.microbatch[i]] += images
    batch, vision = decisions.batch, decisions.vision
    return encoder_plan(rounds, batch.dp * batch.cp, vision.linear_cost, vision.quadratic_cost)


def _without_defaults(values: dict[str, Any], model: type[Plan] | type[PlanRows]) -> dict[str, Any]:
    """The values but those that the model's dump leaves out."""
    rules = {name: field.exclude_if for name, field in model.model_fields.items()}
    return {name: value for name, value in values.items() if (rule := rules[name]) is None or not rule(value)}
