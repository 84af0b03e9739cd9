"""The groups of a run that are undecided, or accepted and in no batch yet: a fold over the log.

Promises:
- a masked sequence counts in its group with its reward, and with nothing else: not its tokens, their age or their length; so
  does one of which penalties, or what becomes of overlong contexts, leave no token, and a context of which they leave none
  counts for nothing;
- a late grading that is not about the group, and advantages of a lower revision than those that are there, change nothing;
- a group has its place among those that wait for a batch from its advantages of revision 0 on, whatever comes after;
- a group that is decided against, or yielded, leaves no state behind;
- a finished sequence takes what its contexts, payload header and sidecar take as JSON (1.5 KiB for one context) and a few
  hundred bytes, in memory and in a dump.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from pipeline.signal.overlong import ANY, Fit
from pipeline.signal.penalties import Counts, changes, counts
from schemas.facts import (
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceScored,
)
from schemas.payload import ContextMeta, PayloadHeader
from schemas.signal import Penalty

_CONTEXTS = TypeAdapter(tuple[ContextMeta, ...])


class Kept(NamedTuple):
    """A context that is trained, as far as planning looks at it: `tokens` after the first `skip`, of which `surviving` are
    trained, and whether rules changed some, and it shows images."""

    context: int
    tokens: int
    skip: int
    surviving: int
    changed: bool
    shows: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """What judging and planning need of a finished sequence, and the JSON of what its plan will hold: as models, those would
    take ten times the memory until then."""

    sequence: str
    reward: float
    termination: str
    tokens: int
    longest: int
    """Tokens of its largest context that is trained, or of what is left of that."""
    generated: int
    rows: int
    """Loss tokens of its payload, trained or not: the rows of its sidecars."""
    loss_tokens: int
    """Those that are trained."""
    flagged: int
    """Those that the strategy `weigh` has flagged."""
    min_version: int | None
    """The oldest policy version among its sampled tokens that are trained; None when there are none."""
    contexts_json: str
    payload_json: str
    masked: bool
    """None of its tokens is trained: its termination's effect, by configuration, or all that penalties left, and what becomes
    of overlong contexts."""
    plain: tuple[int, ...]
    """The fields of `kept`, one after the other."""

    @classmethod
    def of(
        cls,
        fact: SequenceFinished,
        masked: bool = False,
        penalties: Sequence[Penalty] = (),
        fit: Fit = ANY,
    ) -> Finished:
        skips = [fit.skip(context) for context in fact.contexts]
        left = [
            (context, counts(context, penalties, skip))
            for context, skip in zip(fact.contexts, skips, strict=True)
        ]
        rows = sum(context.loss_tokens() for context in fact.contexts)
        masked = masked or (rows > 0 and not any(n.surviving for _, n in left))
        trained: list[tuple[ContextMeta, Counts]] = []
        longest, plain = 0, list[int]()
        for index, ((context, n), skip) in enumerate(zip(left, skips, strict=True)):
            if masked or skip is None or not (n.surviving or (not context.flags and not skip)):
                continue
            trained.append((context, n))
            longest = max(longest, context.tokens - skip)
            if n.surviving:
                changed = bool(context.flags and changes(context, penalties, skip=skip))
                shows = any(image.end > skip for image in context.images)
                plain += (index, context.tokens - skip, skip, n.surviving, int(changed), int(shows))
        return cls(
            sequence=fact.sequence,
            reward=fact.reward,
            termination=fact.termination,
            tokens=sum(c.tokens for c in fact.contexts),
            longest=longest,
            generated=sum(c.generated for c in fact.contexts),
            rows=rows,
            loss_tokens=sum(n.surviving for _, n in trained),
            flagged=sum(n.flagged for _, n in trained),
            min_version=min((c.min_version for c, _ in trained if c.generated), default=None),
            contexts_json=_CONTEXTS.dump_json(fact.contexts).decode(),
            payload_json=fact.payload.model_dump_json(),
            masked=masked,
            plain=tuple(plain),
        )

    def kept(self) -> list[Kept]:
        """The contexts that are rows of its plan."""
        fields = iter(self.plain)
        return [
            Kept(context, tokens, skip, surviving, bool(changed), bool(shows))
            for context, tokens, skip, surviving, changed, shows in zip(*[fields] * 6, strict=True)
        ]

    def contexts(self) -> tuple[ContextMeta, ...]:
        return _CONTEXTS.validate_json(self.contexts_json)

    def payload(self) -> PayloadHeader:
        return PayloadHeader.model_validate_json(self.payload_json)

    def dump(self) -> list[Any]:
        """Its fields in order, as JSON values."""
        values: list[Any] = [getattr(self, name) for name in self.__slots__]
        return [*values[:-1], list(self.plain)]

    @classmethod
    def restored(cls, fields: Sequence[Any]) -> Finished:
        """Inverse of `dump`."""
        return cls(*fields[:-1], plain=tuple(fields[-1]))


@dataclass(slots=True)
class Group:
    """A sample's group while it is undecided, or accepted and not yet in a batch."""

    source: str
    sample: str
    size: int
    task_index: int = 0
    finished: dict[str, Finished] = field(default_factory=dict[str, Finished])
    members: dict[str, int] = field(default_factory=dict[str, int])
    failed: dict[str, None] = field(default_factory=dict[str, None])
    """An ordered set: a dump of it is the same in every process."""
    scored: dict[str, None] = field(default_factory=dict[str, None])
    """Ids of the teachers' answers, while it is undecided."""
    graded: int = -1
    """Newest revision of its grading; -1: none."""
    rewards: tuple[float, ...] = ()
    quality: tuple[float, ...] = ()
    hacks: tuple[bool, ...] = ()
    accepted: bool = False
    oldest: int = 0
    """`min_version` of an accepted group, which is asked for again with every group that is shaped."""
    twin: bool = False
    """Another group with its task was accepted before it, and was in no batch then."""
    revision: int = -1
    """Of its advantages; -1: none."""
    advantages: tuple[float, ...] = ()
    sidecars: tuple[str | None, ...] = ()
    """Headers as JSON, as in `sample.shaped`."""
    shaped_seq: int = 0
    """Message of its revision 0: its place among the others; 0: not shaped."""

    def settled(self) -> bool:
        return len(self.finished) + len(self.failed) == self.size

    def ordered(self) -> list[Finished]:
        """The finished sequences in member order."""
        return [self.finished[s] for s in sorted(self.finished, key=lambda s: self.members[s])]

    def min_version(self) -> int:
        """The oldest policy version among the sampled tokens of the group."""
        if self.accepted:
            return self.oldest
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
        state: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return state | {
            "finished": [finished.dump() for finished in self.finished.values()],
            "members": dict(self.members),
            **{name: list(state[name]) for name in (*_SETS, *_TUPLES)},
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Group:
        """Inverse of `dump`."""
        finished = [Finished.restored(each) for each in state["finished"]]
        fields: dict[str, Any] = {
            **state,
            "finished": {f.sequence: f for f in finished},
            "members": dict(state["members"]),
            **{name: dict.fromkeys(state[name]) for name in _SETS},
            **{name: tuple(state[name]) for name in _TUPLES},
        }
        return cls(**fields)


_SETS = ("failed", "scored")
_TUPLES = ("rewards", "quality", "hacks", "advantages", "sidecars")


class Groups:
    """Every group that is undecided or waits for a batch. `waiting[source]` keeps the order in which they were shaped."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._waiting: dict[str, dict[str, Group]] = {}
        self._tasks: dict[tuple[str, int], str] = {}
        """By source and task the accepted group that has it."""

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, sample: str) -> Group:
        return self._groups[sample]

    def get(self, sample: str) -> Group | None:
        return self._groups.get(sample)

    def waiting(self, source: str) -> Iterator[Group]:
        """The shaped groups of a source, oldest first."""
        return iter(list(self._waiting.get(source, {}).values()))

    def shaped_of(self, source: str) -> int:
        """How many shaped groups of a source wait."""
        return len(self._waiting.get(source, ()))

    def dispatched(self, fact: SequenceDispatched) -> None:
        fresh = Group(fact.source, fact.sample, fact.group_size, fact.task_index)
        group = self._groups.setdefault(fact.sample, fresh)
        group.members[fact.sequence] = fact.member

    def finished(
        self,
        fact: SequenceFinished,
        masked: bool = False,
        penalties: Sequence[Penalty] = (),
        fit: Fit = ANY,
    ) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.members and fact.sequence not in group.failed:
            group.finished[fact.sequence] = Finished.of(fact, masked, penalties, fit)

    def failed(self, fact: SequenceFailed) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.members and fact.sequence not in group.finished:
            group.failed[fact.sequence] = None

    def scored(self, fact: SequenceScored) -> None:
        group = self._groups.get(fact.sample)
        if group is not None and fact.sequence in group.finished and not group.accepted:
            group.scored[fact.id()] = None

    def graded(self, fact: SampleGraded) -> None:
        group = self._groups.get(fact.sample)
        if group is None or fact.revision < group.graded:
            return
        if fact.revision == 0 or len(fact.rewards) == len(group.finished):
            group.graded = fact.revision
            group.rewards, group.quality, group.hacks = fact.rewards, fact.quality, fact.hacks

    def accepted(self, sample: str) -> None:
        group = self._groups.get(sample)
        if group is not None:
            group.oldest = group.min_version()
            group.accepted, group.scored = True, {}
            group.twin = self._tasks.setdefault((group.source, group.task_index), sample) != sample

    def has_twin(self, group: Group) -> bool:
        """Whether another accepted group of the source, in no batch yet, has the task of this one."""
        return self._tasks.get((group.source, group.task_index), group.sample) != group.sample

    def shaped(self, fact: SampleShaped, seq: int) -> None:
        """Advantages of a higher revision stand, whichever comes first. The group waits from its revision 0 on: only that,
        or a rejection, says whether it can be shaped. What is not about the group changes nothing."""
        group = self._groups.get(fact.sample)
        if group is None or not group.accepted or not _fits(fact, group):
            return
        if fact.revision >= group.revision:
            group.revision, group.advantages = fact.revision, fact.advantages
            group.sidecars = tuple(h.model_dump_json() if h is not None else None for h in fact.sidecars)
        if fact.revision == 0:
            group.shaped_seq = seq
            self._waiting.setdefault(group.source, {})[group.sample] = group

    def rejected(self, fact: SampleRejected) -> None:
        """Forgets the group; but of those that wait for a batch only one that is too old for it, since a batch that holds
        any other may be on its way."""
        group = self._groups.get(fact.sample)
        if group is not None and (not group.shaped_seq or fact.reason == "stale"):
            self.forget(fact.sample)

    def forget(self, sample: str) -> None:
        """The group is rejected or yielded."""
        group = self._groups.pop(sample, None)
        if group is None:
            return
        self._waiting.get(group.source, {}).pop(sample, None)
        if group.accepted and not group.twin:
            self._tasks.pop((group.source, group.task_index), None)

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
        self._tasks = {
            (group.source, group.task_index): group.sample
            for group in self._groups.values()
            if group.accepted and not group.twin
        }


def _fits(fact: SampleShaped, group: Group) -> bool:
    """Whether the advantages are the group's: one for each finished sequence, and in a sidecar one for each of its loss tokens."""
    return len(fact.advantages) == len(group.finished) and all(
        header is None or header.has("advantages", "float32", (finished.rows,))
        for finished, header in zip(group.ordered(), fact.sidecars, strict=False)
    )
