"""Sections of a configuration: the sources of a batch, how their agents behave, what their tasks are, which groups are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from schemas.names import Name
from schemas.section import Section
from schemas.signal import MAX_PENALTIES, Grader, Hook, Penalty

SourceName = Annotated[Name, Field(max_length=64)]
"""Shorter than other names: sample, sequence and attempt ids are made from it."""


class Behaviour(Section):
    """How the agent of a source behaves; one per sample."""

    system: str = Field(default="", max_length=16_384, description="system prompt; empty: none")
    temperature: float = Field(default=1.0, gt=0, le=10, description="sampling temperature")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling")
    max_tokens: int = Field(default=64, ge=1, description="sampled tokens in one turn")
    max_turns: int = Field(default=4, ge=1, le=10_000, description="model calls in one sequence")
    max_session_tokens: int = Field(
        default=0, ge=0, description="sampled tokens in one sequence, all its turns and contexts; 0: no limit"
    )
    exclude: tuple[Name, ...] = Field(
        default=("title", "probe", "auxiliary"),
        description="labels of requests that are answered and not kept for training (see `docs/capture.md`)",
    )

    @field_validator("exclude")
    @classmethod
    def _by_request(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for label in value:
            if label in ("main", "fork", "compacted", "other"):
                raise ValueError(
                    f"{label!r} cannot be left out: it is a place in the tree; what can be is a kind of request, such as title or compaction, and subagent"
                )
        return value


class Environment(Section):
    """What the tasks of a source are and how they are verified."""

    kind: str = Field(description="arithmetic, calculator, harbor, or module:Class of an environment")
    seed: int = Field(
        default=0, ge=0, description="seed of the task distribution; a held-out set is another seed"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="the environment's own options, validated by it"
    )


class Timeouts(Section):
    """Limits of one trial of a source, in seconds; 0: the task's own, else what the trial's budget leaves."""

    trial_s: float = Field(
        default=0.0, ge=0, description="all phases of one attempt; 0: agent_loop.trial_budget_s"
    )
    start_s: float = Field(default=0.0, ge=0, description="start of the sandbox; 0: the task's own, or 60")
    agent_s: float = Field(default=0.0, ge=0, description="the agent")
    verify_s: float = Field(default=0.0, ge=0, description="one run of the verifier")


Effect = Literal["train", "mask", "retry"]


class Accept(Section):
    """Which groups are trained. A group passes when `min < pass rate < max`, or `<=` where they are inclusive."""

    min: float = Field(
        default=0.0, ge=-1, le=1, description="pass rate at or under which a group is rejected; -1: never"
    )
    max: float = Field(
        default=1.0, ge=0, le=2, description="pass rate at or over which a group is rejected; 2: never"
    )
    inclusive: bool = Field(
        default=False, description="whether pass rates of exactly min and max are accepted"
    )
    min_members: int = Field(
        default=0,
        ge=0,
        le=512,
        description="finished sequences that a group needs, the others having failed; 0: two, or one of a group of one",
    )
    duplicates: Literal["keep", "reject"] = Field(
        default="keep",
        description="reject: a group whose task another accepted group has that is in no batch yet",
    )
    drop_all_zero: bool = Field(default=True, description="reject a group whose advantages are all zero")
    pass_reward: float = Field(default=1.0, description="a sequence passes when its reward is at least this")

    def takes(self, rate: float) -> bool:
        """Whether a group of that pass rate is trained."""
        if self.inclusive:
            return self.min <= rate <= self.max
        return self.min < rate < self.max


class Source(Section):
    """A named task distribution with a share of every batch."""

    name: SourceName = Field(description="source id, in subjects, object keys and sample ids")
    pool: Name = Field(description="the pool whose harness runs it")
    groups: int = Field(
        ge=0, le=100_000, description="groups that it gives to every batch; 0 for an evaluation source"
    )
    group_size: int = Field(default=8, ge=1, le=512, description="sequences of one sample")
    oversample: float = Field(
        default=1.5,
        ge=1,
        le=100,
        description="groups in flight or waiting / groups per batch, at most; not with mixer.dispatch = 'demand'",
    )
    staleness: int = Field(
        default=4, ge=0, description="policy versions that a token may be behind the policy it updates"
    )
    tasks: int = Field(
        default=0,
        ge=0,
        description="different tasks of the environment, which come round again after that; 0: each group has a new one",
    )
    estimator: Literal["grpo", "rloo", "dr_grpo"] = Field(
        default="grpo", description="advantage estimator, where there are no hooks"
    )
    hooks: tuple[Hook, ...] = Field(
        default=(),
        max_length=32,
        description="from rewards to advantages, in this order; empty: the estimator alone",
    )
    penalties: tuple[Penalty, ...] = Field(
        default=(),
        max_length=MAX_PENALTIES,
        description="rules on what agents do, and what becomes of flagged tokens",
    )
    grader: Grader = Field(
        default=Grader(), description="who judges its groups; a text is the kind of one with no options"
    )
    teachers: tuple[Name, ...] = Field(
        default=(), max_length=8, description="teachers that score its sequences"
    )
    concurrency: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="sequences of it that run at once; 0: no limit. Changed while it runs by `packtrain limit`",
    )
    timeouts: Timeouts = Timeouts()
    effects: dict[Name, Effect] = Field(
        default_factory=dict,
        description="termination to what it does: train (the default), mask (its reward counts in the group, its tokens are not trained), retry (as if the world had failed)",
    )
    evaluate: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="> 0: an evaluation source; so many tasks, before the first and after the last step",
    )
    behaviour: Behaviour = Behaviour()
    environment: Environment
    accept: Accept = Accept()

    @field_validator("grader", mode="before")
    @classmethod
    def _by_kind(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _role(self) -> Source:
        if (self.groups == 0) == (self.evaluate == 0):
            raise ValueError(
                f"source {self.name!r}: give groups > 0 (training) or evaluate > 0 (evaluation), not both or neither"
            )
        if self.groups and (self.behaviour.temperature != 1.0 or self.behaviour.top_p != 1.0):
            raise ValueError(
                f"source {self.name!r}: temperature {self.behaviour.temperature} and top_p {self.behaviour.top_p} would be trained against "
                "log-probabilities at 1.0 and 1.0; sample training sources at 1.0"
            )
        if self.groups and self.estimator == "rloo" and self.group_size == 1:
            raise ValueError(
                f"source {self.name!r}: estimator rloo compares a sequence with the others of its group, and group_size is 1; "
                "raise group_size"
            )
        if 0 < self.concurrency < self.group_size:
            raise ValueError(
                f"source {self.name!r}: concurrency {self.concurrency} is below group_size {self.group_size}, and a group is "
                "dispatched as a whole; raise concurrency, or leave it 0 for no limit"
            )
        if self.accept.min_members > self.group_size:
            raise ValueError(
                f"source {self.name!r}: accept.min_members {self.accept.min_members} is above group_size {self.group_size}"
            )
        if self.accept.duplicates == "reject" and 0 < self.tasks < self.groups:
            raise ValueError(
                f"source {self.name!r}: a batch of {self.groups} groups without duplicates needs as many tasks, and it has {self.tasks}; "
                "lower groups, or keep duplicates"
            )
        if self.groups and not self._acceptable():
            raise ValueError(
                f"source {self.name!r}: no pass rate of {self.group_size} sequences is between accept.min {self.accept.min} and "
                f"accept.max {self.accept.max}, so that no group would ever be trained; widen them or raise group_size"
            )
        return self

    def _acceptable(self) -> bool:
        rates = (passed / self.group_size for passed in range(self.group_size + 1))
        return any(self.accept.takes(rate) for rate in rates)
