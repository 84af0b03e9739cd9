"""When a batch yields, who is in it, and its plan. Pure: no tensor, no object is touched.

Promises:
- a batch yields when every training source has its share of fresh groups waiting, never more than `ahead` batches
  before the step under way;
- its members are, of each source, the oldest `groups` shaped up to the event decided on that are fresh for the step:
  `members` recomputes them from the log alone.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

from pipeline.batch.planning import plan_body
from pipeline.checksum import crc32c
from pipeline.decision import Decision
from pipeline.signal.groups import Group, Groups
from pipeline.signal.penalties import Part, batch_factors, weighing
from pipeline.signal.sampling import staleness
from schemas.config import Decisions, Source
from schemas.facts import BatchYielded, PenaltyFactors, SourceShare
from schemas.keys import plan_key
from schemas.payload import Ref


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
        plan = plan_body(taken, decisions, run, step, factors)
    checksum = crc32c(plan.body)
    key = plan_key(run, step, checksum)
    fact = BatchYielded(
        step=step,
        through=through,
        policy_version=step - 1,
        sources={name: _share(each, step) for name, each in chosen.items()},
        microbatches=plan.microbatches,
        plan=Ref(key=key, bytes=len(plan.body), crc32c=checksum),
        factors=factors,
    )
    return Decision(fact, {key: plan.body})


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
