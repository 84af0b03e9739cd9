"""When a batch yields, who is in it, and its plan. Pure: no tensor, no object is touched.

Promises:
- a batch yields when every training source has its share of fresh groups waiting, never more than `ahead` batches
  before the step under way;
- its members are, of each source, the oldest `groups` shaped up to the event decided on that are fresh for the step:
  `members` recomputes them from the log alone;
- the plan holds every context with a loss token that no penalty masks exactly once, but none of a masked sequence, and equal
  micro-batch counts on all ranks: where there are too few contexts for that, some micro-batches are empty;
- prompt-mean weights: every group weighs the same, every loss token of a group that no penalty masks weighs the same, and
  they sum to 1;
- what penalties do to advantages rides in the plan, token span by token span; without any the plan says nothing of them.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

from pipeline.batch.balance import cost, fill_to_multiple, pack, spread
from pipeline.checksum import crc32c
from pipeline.decision import Decision
from pipeline.signal.groups import Group, Groups
from pipeline.signal.penalties import (
    NO_FACTORS,
    Change,
    Part,
    batch_factors,
    changes,
    counts,
    factors_of,
    weighing,
)
from pipeline.signal.sampling import staleness
from schemas.config import Decisions, Source
from schemas.facts import BatchYielded, PenaltyFactors, SourceShare
from schemas.keys import plan_key
from schemas.payload import PayloadHeader, Ref
from schemas.plan import Plan, PlanChanges, PlanRows, PlanSequence


@dataclass(frozen=True, slots=True)
class _Row:
    sequence: int
    context: int
    tokens: int
    advantage: float
    weight: float
    scale: float
    changes: list[Change]


def members(groups: Groups, source: Source, step: int, through: int, count: int) -> list[Group]:
    """The oldest `count` groups of a source, shaped up to stream sequence `through` and fresh for `step`; maybe fewer."""
    fresh = (
        g
        for g in groups.waiting(source.name)
        if g.shaped_seq <= through and staleness(g, step) <= source.staleness
    )
    return [group for group, _ in zip(fresh, range(count), strict=False)]


def batch(
    groups: Groups, decisions: Decisions, run: str, yielded: int, trained: int, through: int
) -> Decision | None:
    """The next batch with its plan, or None while it has to wait."""
    step = yielded + 1
    if step > decisions.steps or yielded - trained > decisions.batch.ahead:
        return None
    if any(groups.shaped_of(s.name) < s.groups for s in decisions.training()):
        # As nearly always: nothing is looked at for it.
        return None
    chosen = {s.name: members(groups, s, step, through, s.groups) for s in decisions.training()}
    if any(len(chosen[s.name]) < s.groups for s in decisions.training()):
        return None
    taken = [group for each in chosen.values() for group in each]
    factors = penalty_factors(taken, decisions)
    with _uncollected():
        plan = make_plan(taken, decisions, run, step, factors)
        body = orjson.dumps(plan.model_dump(mode="json"))
    checksum = crc32c(body)
    key = plan_key(run, step, checksum)
    fact = BatchYielded(
        step=step,
        through=through,
        policy_version=step - 1,
        sources={name: _share(each, step) for name, each in chosen.items()},
        microbatches=plan.microbatches,
        plan=Ref(key=key, bytes=len(body), crc32c=checksum),
        factors=factors,
    )
    return Decision(fact, {key: body})


@contextmanager
def _uncollected() -> Generator[None]:
    """Without the collection of cycles: a plan is of a million objects that are in none, and all live until it is done. To go
    over them again and again would take two thirds of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _share(groups: list[Group], step: int) -> SourceShare:
    rewards = [reward for group in groups for reward in group.rewards]
    return SourceShare(
        groups=len(groups),
        sequences=sum(len(group.finished) for group in groups),
        tokens=sum(group.tokens() for group in groups),
        loss_tokens=sum(group.loss_tokens() for group in groups),
        mean_reward=sum(rewards) / len(rewards),
        max_staleness=max(0, *(staleness(group, step) for group in groups)),
    )


def penalty_factors(groups: list[Group], decisions: Decisions) -> PenaltyFactors | None:
    """Those of the hook `segment_penalty` for a batch of these groups; None where no source has it."""
    hooks = {s.name: hook for s in decisions.training() if (hook := weighing(s)) is not None}
    if not hooks:
        return None
    return batch_factors(
        Part(hooks[group.source], advantage, finished.flagged, finished.loss_tokens - finished.flagged)
        for group in groups
        if group.source in hooks
        for finished, advantage in zip(group.ordered(), group.advantages, strict=True)
    )


def make_plan(
    groups: list[Group], decisions: Decisions, run: str, step: int, whole: PenaltyFactors | None
) -> Plan:
    """The plan of a batch of these groups, each of which has a loss token; `whole`: its `penalty_factors`."""
    sequences: list[PlanSequence] = []
    rows: list[_Row] = []
    for group in groups:
        source = decisions.source(group.source)
        hook = weighing(source)
        weight = 1.0 / (len(groups) * group.loss_tokens())
        sidecars = group.sidecars or [None] * len(group.advantages)
        for finished, advantage, sidecar in zip(group.ordered(), group.advantages, sidecars, strict=True):
            contexts = finished.contexts()
            factors = factors_of(hook, advantage, whole) if hook and whole else NO_FACTORS
            for index, context in enumerate(contexts):
                if finished.masked or not counts(context, source.penalties).surviving:
                    continue
                found = changes(context, source.penalties, factors)
                rows.append(
                    _Row(len(sequences), index, context.tokens, advantage, weight, factors.others, found)
                )
            sequences.append(
                PlanSequence(
                    source=group.source,
                    sample=group.sample,
                    sequence=finished.sequence,
                    payload=finished.payload(),
                    contexts=contexts,
                    advantages=PayloadHeader.model_validate_json(sidecar) if sidecar is not None else None,
                )
            )
    dp, budget = decisions.batch.dp, decisions.batch.token_budget
    lengths = [row.tokens for row in rows]
    bins = fill_to_multiple(pack(lengths, budget), lengths, dp)
    placed = spread([sum(cost(lengths[i]) for i in b) for b in bins], dp)
    order = [
        (rank, microbatch, i)
        for rank, mine in enumerate(placed)
        for microbatch, b in enumerate(mine)
        for i in sorted(bins[b])
    ]
    plan = Plan(
        run=run,
        step=step,
        policy_version=step - 1,
        dp=dp,
        microbatches=len(bins) // dp,
        token_budget=budget,
        loss_tokens=sum(group.loss_tokens() for group in groups),
        sequences=tuple(sequences),
        rows=PlanRows(
            sequence=tuple(rows[i].sequence for _, _, i in order),
            context=tuple(rows[i].context for _, _, i in order),
            dp=tuple(rank for rank, _, _ in order),
            microbatch=tuple(microbatch for _, microbatch, _ in order),
            advantage=tuple(rows[i].advantage for _, _, i in order),
            loss_weight=tuple(rows[i].weight for _, _, i in order),
            scale=tuple(rows[i].scale for _, _, i in order) if any(row.scale != 1 for row in rows) else (),
        ),
        changes=_changes([rows[i] for _, _, i in order]),
    )
    plan.check()
    return plan


def _changes(rows: list[_Row]) -> PlanChanges | None:
    found = [(at, change) for at, row in enumerate(rows) for change in row.changes]
    if not found:
        return None
    return PlanChanges(
        row=tuple(at for at, _ in found),
        start=tuple(change.start for _, change in found),
        end=tuple(change.end for _, change in found),
        multiply=tuple(change.multiply for _, change in found),
        add=tuple(change.add for _, change in found),
        keep=tuple(change.keep for _, change in found),
    )
