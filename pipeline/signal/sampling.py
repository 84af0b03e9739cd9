"""The life of a group, from its first dispatch to its advantages: a pure fold over the log, and its decisions.

Promises:
- `sample.completed` is decided once every member has finished or failed, `sample.accepted` or `sample.rejected` on
  the grader's rewards, `sample.shaped` on acceptance: each from the folded state and one event alone;
- a group is accepted only if a plan can hold it (it has loss tokens, and no context over the token budget), its pass
  rate is strictly between the source's limits, its advantages are not all zero (unless kept by configuration) and it is
  fresh enough for the next batch;
- evaluation groups are never trained: they are rejected as such, with their rewards;
- a group that is decided against, or yielded, leaves no state behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.signal.advantages import ESTIMATORS
from schemas.config import Source
from schemas.facts import (
    SampleAccepted,
    SampleCompleted,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.payload import ContextMeta

_SMALLEST_GROUP = 2
"""Group-relative estimators compare: a group with fewer finished members is rejected as failed."""
_ZERO = 1e-12


@dataclass
class Group:
    """A sample's group while it is undecided, or accepted and not yet in a batch."""

    source: str
    sample: str
    size: int
    finished: dict[str, SequenceFinished] = field(default_factory=dict[str, SequenceFinished])
    members: dict[str, int] = field(default_factory=dict[str, int])
    failed: set[str] = field(default_factory=set[str])
    rewards: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    shaped_seq: int = 0

    def settled(self) -> bool:
        return len(self.finished) + len(self.failed) == self.size

    def ordered(self) -> list[SequenceFinished]:
        """The finished sequences in member order."""
        return [self.finished[s] for s in sorted(self.finished, key=lambda s: self.members[s])]

    def min_version(self) -> int:
        """The oldest policy version among the sampled tokens of the group."""
        return min((c.min_version for c in self.contexts() if c.generated), default=0)

    def tokens(self) -> int:
        return sum(c.tokens for c in self.contexts())

    def contexts(self) -> Iterator[ContextMeta]:
        return (c for f in self.finished.values() for c in f.contexts)

    def loss_tokens(self) -> int:
        return sum(c.loss_tokens() for c in self.contexts())


def staleness(group: Group, step: int) -> int:
    """Policy versions between the policy that batch `step` updates (step - 1) and the group's oldest token."""
    return step - 1 - group.min_version()


class Groups:
    """Every group that is undecided or waits for a batch. `waiting[source]` keeps the order in which they were shaped."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._waiting: dict[str, dict[str, Group]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, sample: str) -> Group:
        return self._groups[sample]

    def get(self, sample: str) -> Group | None:
        return self._groups.get(sample)

    def waiting(self, source: str) -> Iterator[Group]:
        """The shaped groups of a source, oldest first."""
        return iter(list(self._waiting.get(source, {}).values()))

    def dispatched(self, fact: SequenceDispatched) -> None:
        group = self._groups.setdefault(fact.sample, Group(fact.source, fact.sample, fact.group_size))
        group.members[fact.sequence] = fact.member

    def finished(self, fact: SequenceFinished) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.members and fact.sequence not in group.failed:
            group.finished[fact.sequence] = fact

    def failed(self, fact: SequenceFailed) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.members and fact.sequence not in group.finished:
            group.failed.add(fact.sequence)

    def shaped(self, fact: SampleShaped, seq: int) -> None:
        group = self._groups.get(fact.sample)
        if group is not None:
            group.advantages, group.shaped_seq = fact.advantages, seq
            self._waiting.setdefault(group.source, {})[group.sample] = group

    def forget(self, sample: str) -> None:
        """The group is rejected or yielded."""
        group = self._groups.pop(sample, None)
        if group is not None:
            self._waiting.get(group.source, {}).pop(sample, None)


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


def judge(
    group: Group, source: Source, rewards: tuple[float, ...], step: int, token_budget: int
) -> SampleAccepted | SampleRejected:
    """Whether the group will be trained in batch `step` or later; `rewards` are the grader's, in member order.

    `token_budget`: tokens of one micro-batch, at most.
    """
    passes = sum(reward >= source.accept.pass_reward for reward in rewards)
    rate = passes / len(rewards) if rewards else None
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
    if rate is None or mean is None or len(rewards) < min(_SMALLEST_GROUP, source.group_size):
        return rejected("failed")
    if not group.settled() or len(rewards) != len(group.finished):
        # A grader's answer that is not about this group: its rewards belong to nobody.
        return rejected("failed")
    if not group.loss_tokens():
        return rejected("no_loss")
    if any(context.tokens > token_budget for context in group.contexts()):
        return rejected("overlong")
    if not source.accept.min < rate < source.accept.max:
        return rejected("pass_rate")
    if source.accept.drop_all_zero and all(abs(a) < _ZERO for a in ESTIMATORS[source.estimator](rewards)):
        return rejected("all_zero")
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


def shape(group: Group, source: Source) -> SampleShaped:
    """The accepted group's advantages, in member order."""
    advantages = ESTIMATORS[source.estimator](group.rewards)
    return SampleShaped(
        source=group.source,
        sample=group.sample,
        estimator=source.estimator,
        advantages=tuple(float(a) for a in advantages),
    )
