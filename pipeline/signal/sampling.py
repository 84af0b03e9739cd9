"""The life of a group, from its first dispatch to its advantages: a pure fold over the log, and its decisions.

Promises:
- `sample.completed` is decided once every member has finished or failed, `sample.accepted` or `sample.rejected` on
  the grader's rewards, `sample.shaped` on acceptance: each from the folded state and one event alone;
- a group is accepted only if a plan can hold it (it has loss tokens, and no context over the token budget), its pass
  rate is strictly between the source's limits, its advantages are not all zero (unless kept by configuration) and it is
  fresh enough for the next batch;
- evaluation groups are never trained: they are rejected as such, with their rewards;
- a masked sequence counts in its group with its reward, and with nothing else: not its tokens, their age or their length;
- a group that is decided against, or yielded, leaves no state behind;
- a finished sequence takes what its contexts and payload header take as JSON (1 KiB for one context) and a few hundred
  bytes, in memory and in a dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

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
from schemas.payload import ContextMeta, PayloadHeader

_CONTEXTS = TypeAdapter(tuple[ContextMeta, ...])
_SMALLEST_GROUP = 2
"""Group-relative estimators compare: a group with fewer finished members is rejected as failed."""
_ZERO = 1e-12


@dataclass(frozen=True, slots=True)
class Finished:
    """What judging needs of a finished sequence, and the JSON of what its plan will hold: as models, those would take ten
    times the memory until then."""

    sequence: str
    reward: float
    tokens: int
    longest: int
    """Tokens of its largest context that is trained."""
    loss_tokens: int
    min_version: int | None
    """The oldest policy version among its sampled tokens that are trained; None when there are none."""
    contexts_json: str
    payload_json: str
    masked: bool = False
    """None of its tokens is trained: its termination's effect, by configuration."""

    @classmethod
    def of(cls, fact: SequenceFinished, masked: bool = False) -> Finished:
        trained = () if masked else fact.contexts
        return cls(
            sequence=fact.sequence,
            reward=fact.reward,
            tokens=sum(c.tokens for c in fact.contexts),
            longest=max((c.tokens for c in trained), default=0),
            loss_tokens=sum(c.loss_tokens() for c in trained),
            min_version=min((c.min_version for c in trained if c.generated), default=None),
            contexts_json=_CONTEXTS.dump_json(fact.contexts).decode(),
            payload_json=fact.payload.model_dump_json(),
            masked=masked,
        )

    def contexts(self) -> tuple[ContextMeta, ...]:
        return _CONTEXTS.validate_json(self.contexts_json)

    def payload(self) -> PayloadHeader:
        return PayloadHeader.model_validate_json(self.payload_json)

    def dump(self) -> list[Any]:
        """Its fields in order, as JSON values."""
        return [getattr(self, name) for name in self.__slots__]


@dataclass(slots=True)
class Group:
    """A sample's group while it is undecided, or accepted and not yet in a batch."""

    source: str
    sample: str
    size: int
    finished: dict[str, Finished] = field(default_factory=dict[str, Finished])
    members: dict[str, int] = field(default_factory=dict[str, int])
    failed: dict[str, None] = field(default_factory=dict[str, None])
    """An ordered set: a dump of it is the same in every process."""
    rewards: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    shaped_seq: int = 0

    def settled(self) -> bool:
        return len(self.finished) + len(self.failed) == self.size

    def ordered(self) -> list[Finished]:
        """The finished sequences in member order."""
        return [self.finished[s] for s in sorted(self.finished, key=lambda s: self.members[s])]

    def min_version(self) -> int:
        """The oldest policy version among the sampled tokens of the group."""
        return min((f.min_version for f in self.finished.values() if f.min_version is not None), default=0)

    def tokens(self) -> int:
        return sum(f.tokens for f in self.finished.values())

    def longest(self) -> int:
        """Tokens of its largest context."""
        return max((f.longest for f in self.finished.values()), default=0)

    def loss_tokens(self) -> int:
        return sum(f.loss_tokens for f in self.finished.values())

    def dump(self) -> dict[str, Any]:
        """The group as JSON values."""
        return {
            "source": self.source,
            "sample": self.sample,
            "size": self.size,
            "finished": [finished.dump() for finished in self.finished.values()],
            "members": dict(self.members),
            "failed": list(self.failed),
            "rewards": list(self.rewards),
            "advantages": list(self.advantages),
            "shaped_seq": self.shaped_seq,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Group:
        """Inverse of `dump`."""
        finished = [Finished(*each) for each in state["finished"]]
        return cls(
            source=state["source"],
            sample=state["sample"],
            size=state["size"],
            finished={f.sequence: f for f in finished},
            members=dict(state["members"]),
            failed=dict.fromkeys(state["failed"]),
            rewards=tuple(state["rewards"]),
            advantages=tuple(state["advantages"]),
            shaped_seq=state["shaped_seq"],
        )


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

    def finished(self, fact: SequenceFinished, masked: bool = False) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.members and fact.sequence not in group.failed:
            group.finished[fact.sequence] = Finished.of(fact, masked)

    def failed(self, fact: SequenceFailed) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.members and fact.sequence not in group.finished:
            group.failed[fact.sequence] = None

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

    def dump(self) -> dict[str, Any]:
        """Every group, oldest dispatch first, and the shaped ones of each source, oldest first, as JSON values."""
        return {
            "groups": [group.dump() for group in self._groups.values()],
            "waiting": {source: list(samples) for source, samples in self._waiting.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `dump`."""
        self._groups = {each["sample"]: Group.restored(each) for each in state["groups"]}
        self._waiting = {
            source: {sample: self._groups[sample] for sample in samples}
            for source, samples in state["waiting"].items()
        }


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
    if group.longest() > token_budget:
        return rejected("overlong")
    if not source.accept.min < rate < source.accept.max:
        return rejected("pass_rate")
    if source.accept.drop_all_zero:
        advantages = ESTIMATORS[source.estimator](rewards)
        if all(f.masked or abs(a) < _ZERO for f, a in zip(group.ordered(), advantages, strict=True)):
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
