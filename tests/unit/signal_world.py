"""A world with graders that answer late, teachers that fail, rules that flag, and a hook service, in one thread."""

from __future__ import annotations

from typing import Any

from pipeline.batch.sampler import SamplerCore
from schemas.config import RunConfig, Source
from schemas.envelope import Event
from schemas.facts import (
    Fact,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceFinished,
    SequenceScored,
)
from schemas.payload import ColumnHeader, Flag, PayloadHeader
from tests.unit.factories import config
from tests.unit.test_cores import World

RULES = [
    {"rule": "malformed_call", "strategy": "mask"},
    {"rule": "repetition", "strategy": "weigh"},
    {"rule": "garbled", "strategy": "subtract", "value": 0.5},
]
PURE = {
    "name": "math",
    "pool": "p",
    "groups": 2,
    "group_size": 3,
    "tasks": 2,
    "environment": {"kind": "arithmetic"},
    "hooks": [{"kind": "length_penalty"}, {"kind": "grpo"}, {"kind": "segment_penalty"}],
    "penalties": RULES,
    "accept": {"duplicates": "reject", "min_members": 2},
}
BY_HOOK = {
    "name": "code",
    "pool": "p",
    "groups": 1,
    "group_size": 3,
    "tasks": 2,
    "environment": {"kind": "arithmetic"},
    "hooks": [{"kind": "nobody.imports:This"}],
    "accept": {"duplicates": "reject"},
    "teachers": ["large", "small"],
}


def signal_config(**changes: Any) -> RunConfig:
    """One source that the sampler shapes, and one that the hook service does."""
    whole = {"teachers": [{"name": "large"}, {"name": "small"}], "sources": [PURE, BY_HOOK], **changes}
    return config(**whole)


def scored(fact: SequenceFinished, teacher: str, failure: str | None = None) -> SequenceScored:
    key = f"{fact.payload.key}.teacher.{teacher}"
    return SequenceScored(
        source=fact.source,
        sample=fact.sample,
        sequence=fact.sequence,
        teacher=teacher,
        tokens=0,
        scores=PayloadHeader(key=key, bytes=1, columns=()) if failure is None else None,
        failure=failure,
    )


def graded(
    completed: SampleCompleted, revision: int, rewards: tuple[float, ...] | None = None
) -> SampleGraded:
    return SampleGraded(
        source=completed.source,
        sample=completed.sample,
        revision=revision,
        grader="judge",
        rewards=completed.rewards if rewards is None else rewards,
        quality=(0.5,) * len(completed.rewards),
        hacks=(False,) * len(completed.rewards),
    )


def sidecar(fact: SequenceFinished, revision: int) -> PayloadHeader:
    """Of a sequence of one context."""
    tokens = sum(context.loss_tokens() for context in fact.contexts)
    column = ColumnHeader(
        name="advantages", dtype="float32", shape=(tokens,), offset=64, bytes=4 * tokens, crc32c=(0,)
    )
    key = f"{fact.payload.key}.advantages.{revision}"
    return PayloadHeader(key=key, bytes=64 + 4 * tokens, columns=(column,))


class SignalWorld(World):
    """Late answers come at any time: before a group is decided, after, and when its batch is long trained."""

    def __init__(self, run_config: RunConfig, seed: int, failures: float = 0.1, rejects: float = 0.1) -> None:
        self.rejects = rejects
        super().__init__(run_config, seed, failures)

    def source(self, fact: Any) -> Source:
        return next(source for source in self.config.sources if source.name == fact.source)

    def by_hook(self, fact: Any) -> bool:
        return fact.source == BY_HOOK["name"]

    def publish(self, fact: Fact, cause: Event | None = None) -> None:
        if isinstance(fact, SequenceFinished):
            fact = self._flagged(fact)
        before = len(self.log)
        super().publish(fact, cause)
        if len(self.log) == before:
            return
        if isinstance(fact, SequenceFinished):
            self.work += [scored(fact, teacher) for teacher in self.source(fact).teachers]
        elif isinstance(fact, SampleGraded):
            # A job more each: a late answer, and what the hook service makes of one.
            self.work.append(fact)
        elif isinstance(fact, SampleAccepted) and self.by_hook(fact):
            self.work.append(fact)

    def do(self, fact: Fact) -> None:
        match fact:
            case SequenceScored():
                failed = self.random.random() < 0.2
                self.publish(
                    fact.model_copy(update={"scores": None, "failure": "too long"}) if failed else fact
                )
            case SampleCompleted():
                self.publish(graded(fact, 0))
            case SampleGraded(revision=0) if self.random.random() < 0.97:
                # Late: the cores go on meanwhile.
                self.work.append(fact)
            case SampleGraded(revision=0):
                if self.random.random() < 0.7:
                    completed = self.last(SampleCompleted, fact.sample)
                    rewards = tuple(float(self.random.random() < 0.5) for _ in fact.rewards)
                    if self.random.random() < 0.1:
                        rewards += (1.0,)
                    late = graded(completed, 1).model_dump() | {
                        "rewards": rewards,
                        "quality": (),
                        "hacks": (),
                    }
                    self.publish(SampleGraded.model_validate(late))
            case SampleGraded():
                accepted = self.place(SampleAccepted, fact.sample)
                if self.by_hook(fact) and accepted is not None and accepted < self.seq(fact):
                    self.hook(fact.source, fact.sample, 0)
                    self.hook(fact.source, fact.sample, 1)
            case SampleAccepted():
                self.hook(fact.source, fact.sample, 0)
            case _:
                super().do(fact)

    def hook(self, source: str, sample: str, revision: int) -> None:
        ended = self.place(SampleRejected, sample)
        if ended is not None or (self.random.random() < self.rejects and revision == 0):
            if ended is None and self.place(SampleShaped, sample) is None:
                self.publish(SampleRejected(source=source, sample=sample, reason="failed", by="hook"))
            return
        finished = [self.last(SequenceFinished, s) for s in self.last(SampleCompleted, sample).sequences]
        self.publish(
            SampleShaped(
                source=source,
                sample=sample,
                revision=revision,
                estimator="own",
                advantages=tuple(float(i + revision) for i in range(len(finished))),
                sidecars=tuple(sidecar(f, revision) if i else None for i, f in enumerate(finished)),
                by="hook",
            )
        )

    def seq(self, fact: Fact) -> int:
        return next(event.seq for event in self.log if event.fact == fact)

    def place(self, kind: type[Fact], id_: str) -> int | None:
        return next((e.seq for e in self.log if type(e.fact) is kind and e.fact.id() == id_), None)

    def last(self, kind: type[Any], id_: str) -> Any:
        return next(e.fact for e in self.log if type(e.fact) is kind and e.fact.id() == id_)

    def _flagged(self, fact: SequenceFinished) -> SequenceFinished:
        """Some of the sampled rows of each context, by any of the rules."""
        contexts = [
            context.model_copy(
                update={
                    "flags": tuple(
                        Flag(start=row, end=row + 1, rules=self.random.randint(1, 7))
                        for span in context.loss_spans
                        for row in range(span.start, span.end)
                        if self.random.random() < 0.4
                    )
                }
            )
            for context in fact.contexts
        ]
        return fact.model_copy(update={"contexts": tuple(contexts)})


def two_samplers(world: SignalWorld) -> SignalWorld:
    world.cores.append((SamplerCore("r"), 0))
    return world
