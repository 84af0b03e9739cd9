"""The decisions of a group's life, from its completion to its advantages: pure functions of its state.

Promises:
- `sample.completed` is decided once every member has finished or failed, `sample.accepted` or `sample.rejected` once the
  group is graded and every finished member is scored by all of the source's teachers, `sample.shaped` on acceptance where
  the source's hooks need no more than events: each from the folded state and one event alone;
- a group is accepted only if a plan can hold it (it has loss tokens, and no context is too long for a micro-batch), its pass
  rate is between the source's limits, no other accepted group has its task (where duplicates are rejected), its advantages,
  before penalties, are not all zero (unless kept by configuration, or not known here) and it is fresh enough for the next
  batch;
- evaluation groups are never trained: they are rejected as such, with their rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pipeline.signal.groups import Group
from pipeline.signal.hooks import Member, Signal, built_in, chain
from schemas.config import Source
from schemas.facts import SampleAccepted, SampleCompleted, SampleRejected, SampleShaped

_SMALLEST_GROUP = 2
"""Group-relative estimators compare: a group with fewer finished members is rejected as failed, unless configured."""
ZERO = 1e-12
"""An advantage of less is none: what rounding leaves."""


def staleness(group: Group, step: int) -> int:
    """Policy versions between the policy that batch `step` updates (step - 1) and the group's oldest token."""
    return step - 1 - group.min_version()


def complete(group: Group) -> SampleCompleted | None:
    """The group's completion, once every member has finished or failed."""
    if not group.settled():
        return None
    ordered = group.ordered()
    return SampleCompleted(
        source=group.source,
        sample=group.sample,
        sequences=tuple(f.sequence for f in ordered),
        rewards=tuple(f.reward for f in ordered),
        failed=len(group.failed),
    )


def ready(group: Group, source: Source) -> bool:
    """Whether all is known that the group is decided on: its grading, and an answer of every teacher on every member."""
    return group.graded >= 0 and all(
        f"{sequence}-{teacher}" in group.scored for sequence in group.finished for teacher in source.teachers
    )


def signal(group: Group, source: Source) -> Signal:
    """What the group's hooks begin with, but for the columns that they name: members in member order."""
    ordered = group.ordered()
    members = tuple(
        Member(
            sequence=f.sequence,
            generated=f.generated,
            loss_tokens=f.rows,
            flagged=f.flagged,
            unflagged=f.loss_tokens - f.flagged,
            quality=quality,
            hack=hack,
            masked=f.masked,
            termination=f.termination,
        )
        for f, quality, hack in zip(
            ordered,
            group.quality or [1.0] * len(ordered),
            group.hacks or [False] * len(ordered),
            strict=True,
        )
    )
    return Signal(members, np.asarray(group.rewards, dtype=np.float64), source.accept.pass_reward)


def advantages(group: Group, source: Source) -> tuple[float, ...] | None:
    """The group's advantages in member order; None where events alone do not say: its hooks read columns, or are other
    people's. Raises ValueError for a group that its hooks refuse."""
    if not built_in(source) or not chain(source).pure:
        return None
    made = chain(source).run(signal(group, source)).made()
    return tuple(float(a) for a in made)


def judge(
    group: Group, source: Source, step: int, limit: int, twin: bool = False
) -> SampleAccepted | SampleRejected:
    """Whether the group, on its graded rewards, will be trained in batch `step` or later.

    `limit`: tokens of the longest context that a micro-batch holds. `twin`: another accepted group, in no batch yet, has its task.
    """
    accept, rewards = source.accept, group.rewards
    rate = sum(reward >= accept.pass_reward for reward in rewards) / len(rewards) if rewards else None
    mean = sum(rewards) / len(rewards) if rewards else None

    def rejected(reason: str) -> SampleRejected:
        return SampleRejected.model_validate(
            {
                "source": group.source,
                "sample": group.sample,
                "reason": reason,
                "pass_rate": rate,
                "mean_reward": mean,
                "tokens": group.tokens(),
            }
        )

    if source.evaluate:
        return rejected("evaluation")
    fewest = accept.min_members or min(_SMALLEST_GROUP, source.group_size)
    if rate is None or mean is None or len(rewards) < fewest:
        return rejected("failed")
    if not group.settled() or len(rewards) != len(group.finished):
        # A grader's answer that is not about this group: its rewards belong to nobody.
        return rejected("failed")
    if not group.loss_tokens():
        return rejected("no_loss")
    if group.longest() > limit:
        return rejected("overlong")
    if not accept.takes(rate):
        return rejected("pass_rate")
    try:
        made = advantages(group, source)
    except ValueError:
        # As a group of one that rloo refuses: it can never be shaped, and the others go on.
        return rejected("failed")
    if accept.drop_all_zero and made is not None and _all_zero(group, made):
        return rejected("all_zero")
    if twin and accept.duplicates == "reject":
        return rejected("duplicate")
    if staleness(group, step) > source.staleness:
        return rejected("stale")
    return SampleAccepted(
        source=group.source,
        sample=group.sample,
        pass_rate=rate,
        mean_reward=mean,
        tokens=group.tokens(),
        min_version=group.min_version(),
    )


def _all_zero(group: Group, made: Sequence[float]) -> bool:
    return all(f.masked or abs(a) < ZERO for f, a in zip(group.ordered(), made, strict=True))


def shape(group: Group, source: Source, revision: int) -> SampleShaped | SampleRejected | None:
    """The accepted group's advantages, in member order; None where another service shapes it, or where a late grading gave
    none: the earlier ones stand. Or that it is not trained after all: they fail, or are all zero."""
    try:
        made = advantages(group, source)
    except ValueError:
        return None if revision else withdrawn(group, "failed")
    if made is None:
        return None
    if not revision and source.accept.drop_all_zero and _all_zero(group, made):
        # A late grading came between its judgement and its acceptance.
        return withdrawn(group, "all_zero")
    return SampleShaped(
        source=group.source,
        sample=group.sample,
        revision=revision,
        estimator=chain(source).estimator,
        advantages=made,
    )


def withdrawn(group: Group, reason: Literal["failed", "stale", "duplicate", "all_zero"]) -> SampleRejected:
    """An accepted group that will not be trained after all."""
    return SampleRejected(source=group.source, sample=group.sample, reason=reason, tokens=group.tokens())
