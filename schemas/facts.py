"""Every fact of a run, as frozen, versioned models. The stream of these is the system of record.

Promises:
- `fact.subject(run)` is a pure function of the fact, so a fact that may exist once has exactly one subject;
- facts of an attempt (`sequence.opened`, `sequence.verified`) have the attempt in their id, facts of the
  sequence do not: whatever attempts ran, one finishes it;
- a body is at most `MAX_BODY` bytes; what grows with the batch is an object, and the fact carries its `Ref`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.names import Name, Subject, attempt_id, sample_index, sequence_id
from schemas.payload import ContextMeta, Frozen, Key, PayloadHeader, Ref

MAX_BODY = 64 * 1024
ALL = "all"
"""Scope of facts that belong to no single source, pool or host."""
RULES = 3
"""Version of the decision rules: raised when a core decides otherwise on the same events, so that a recorded run names
the rules that made it."""
MAX_LEFT_OUT = 480
"""Sequences that a batch may be planned without: as many names of full length as an event has room for."""
MAX_REWARD = 1e9
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
"""Bounded, so that no mean of a group's rewards overflows."""


class Fact(Frozen):
    """Base of all facts. `type` is `<entity>.<fact>`; `version` is raised when the body changes meaning."""

    type: ClassVar[str]
    version: ClassVar[int] = 1

    def scope(self) -> str:
        return ALL

    def id(self) -> str:
        raise NotImplementedError

    def correlation(self) -> str | None:
        """The sample (or batch) whose life this fact belongs to."""
        return None

    def subject(self, run: str) -> Subject:
        entity, _, fact = self.type.partition(".")
        return Subject(run, entity, fact, self.scope(), self.id())


class Inherited(Frozen):
    """Groups of another run with which a run begins: accepted there, and never put into a batch. They are the first groups of
    their sources, from number 0; the launcher publishes their facts."""

    run: Name = Field(description="the run that they are of")
    groups: dict[Name, Annotated[int, Field(ge=1)]] = Field(description="how many, by source id")
    facts: Ref = Field(description="their facts (JSON) in the object store, as they enter this run's log")


class RunStarted(Fact):
    """A run begins. Carries the configuration that decisions depend on, so that a refold needs nothing else."""

    type: ClassVar[str] = "run.started"
    version: ClassVar[int] = 4
    run: Name = Field(description="run id, the same as in the subject and the stream's name")
    config: dict[str, Any] = Field(
        description="the decision part of the configuration, as `RunConfig.decisions()` gives it"
    )
    rules: int = Field(default=RULES, ge=1, description="version of the decision rules that make the run")
    inherited: Inherited | None = Field(
        default=None, description="another run's groups that it begins with; null: none"
    )

    def id(self) -> str:
        return self.run

    def begins_with(self, fact: Fact) -> bool:
        """Whether the fact sends out a group that the run inherited: it is nobody's decision in this run."""
        return (
            self.inherited is not None
            and isinstance(fact, SequenceDispatched)
            and sample_index(fact.sample, fact.source) < self.inherited.groups.get(fact.source, 0)
        )


class RunStopped(Fact):
    """A run has ended: nothing more is dispatched, hosts may go."""

    type: ClassVar[str] = "run.stopped"
    run: Name = Field(description="run id, the same as in the subject and the stream's name")
    reason: Literal["completed", "cancelled"] = Field(
        description="completed: every step was trained; cancelled: a person ended it before"
    )
    steps: int = Field(ge=0, description="optimizer steps taken")

    def id(self) -> str:
        return self.run


class LimitChanged(Fact):
    """A person set how much of a pool or a source runs at once. The newest of a pool or a source holds."""

    type: ClassVar[str] = "limit.changed"
    of: Literal["pool", "source"] = Field(description="pool: trials in all its hosts; source: sequences")
    name: Name = Field(description="pool id or source id")
    number: int = Field(ge=1, description="changes of this limit so far, with this one")
    concurrency: int = Field(ge=0, le=1_000_000, description="how many run at once; 0: no limit")

    def scope(self) -> str:
        return self.name

    def id(self) -> str:
        return f"{self.of}-{self.number}"


class _SequenceFact(Fact):
    source: Name = Field(description="source id: the task distribution that the sample is of")
    sample: Name = Field(
        description="sample id, <source>-<index in six digits>: the group that the sequence is a member of"
    )
    sequence: Name = Field(description="sequence id, <sample>-<member>")

    def scope(self) -> str:
        return self.source

    def id(self) -> str:
        return self.sequence

    def correlation(self) -> str | None:
        return self.sample


class _AttemptFact(_SequenceFact):
    attempt: int = Field(ge=1, description="number of the attempt at this sequence, from 1")

    def id(self) -> str:
        return attempt_id(self.sequence, self.attempt)


class SequenceDispatched(_SequenceFact):
    """Work for an agent-loop host: one member of a sample's group."""

    type: ClassVar[str] = "sequence.dispatched"
    member: int = Field(ge=0, description="place in the group, from 0; below group_size")
    group_size: int = Field(ge=1, description="sequences of this sample")
    pool: Name = Field(description="pool id: the harness hosts that run it")
    task_index: int = Field(ge=0, description="which task of the source's environment")
    min_policy_version: int = Field(
        default=0, ge=0, description="wait for this version before the first token is sampled"
    )

    @model_validator(mode="after")
    def _named(self) -> SequenceDispatched:
        sample_index(self.sample, self.source)
        if self.member >= self.group_size or self.sequence != sequence_id(self.sample, self.member):
            raise ValueError(
                f"sequence {self.sequence!r} is not member {self.member} of a group of {self.group_size} of sample {self.sample!r}"
            )
        return self


class SequenceOpened(_AttemptFact):
    """An agent-loop host has a session for this attempt: work for the harness pool. Holds no secret."""

    type: ClassVar[str] = "sequence.opened"
    pool: Name = Field(description="pool id: the harness hosts that this is work for")
    task_index: int = Field(
        ge=0, description="which task of the source's environment, as in sequence.dispatched"
    )
    host: Name = Field(description="the agent-loop host, to which the verdict is addressed")
    base_url: str = Field(description="http://address:port of the agent-loop host", max_length=256)
    session: Name = Field(
        description="session id, a path component below base_url; the secret that goes with it is derived from the run's key, never sent"
    )
    budget_s: float = Field(gt=0, description="wall-clock seconds for the whole trial")

    def scope(self) -> str:
        return self.pool


class Failure(Frozen):
    """Why an attempt gave no sequence to train. `infra` is retried as a new attempt, never trained, never reward 0."""

    kind: Literal["infra", "model"] = Field(
        description="infra: the world failed (sandbox, engine, store, host), retried; model: the policy did, kept"
    )
    reason: Name = Field(description="short and countable: engine_unavailable, harness_lost, max_turns, ...")
    detail: str = Field(
        default="", max_length=2000, description="for people: the error's text, cut; empty: none"
    )


class Artefact(Frozen):
    """What a trial left to be looked at: a verifier's output, an agent's log."""

    name: Name = Field(description="what it is: verifier_stdout, agent_log, ...")
    ref: Ref = Field(description="where it is in the object store")


class SequenceVerified(_AttemptFact):
    """The harness host's verdict on one attempt, addressed to the agent-loop host that has the session."""

    type: ClassVar[str] = "sequence.verified"
    version: ClassVar[int] = 2
    host: Name = Field(description="the agent-loop host that has the session, as in sequence.opened")
    reward: Reward | None = Field(
        description="the verifier's reward, in the environment's own scale; null when a failure is given"
    )
    termination: Name = Field(
        default="completed", description="completed, max_turns, overlong, agent_timeout, ..."
    )
    failure: Failure | None = Field(
        default=None, description="why there is no reward; null when there is one"
    )
    artefacts: tuple[Artefact, ...] = Field(
        default=(), max_length=64, description="what the trial left in the object store, for people"
    )
    seconds: dict[Name, float] = Field(
        default_factory=dict,
        max_length=16,
        description="what the trial's phases took: queue, start, agent, verify",
    )
    peak_bytes: int = Field(
        default=0,
        ge=0,
        description="most memory that its sandbox used; 0: it had none, or it was not measured",
    )

    @model_validator(mode="after")
    def _verdict(self) -> SequenceVerified:
        if self.reward is not None and self.failure is not None:
            raise ValueError(
                f"a verdict has a reward or a failure, not both: {self.reward}, {self.failure.reason}"
            )
        return self

    def scope(self) -> str:
        return self.host


class SequenceFinished(_SequenceFact):
    """One attempt finished the sequence; its payload is in the store. At most one per sequence."""

    type: ClassVar[str] = "sequence.finished"
    version: ClassVar[int] = 3
    attempt: int = Field(ge=1, description="the attempt that finished it, from 1")
    reward: Reward = Field(description="the verifier's reward, in the environment's own scale")
    termination: Name = Field(
        description="why the agent ended: completed, max_turns, overlong, agent_timeout, ..."
    )
    turns: int = Field(ge=0, description="model calls that were answered")
    contexts: tuple[ContextMeta, ...] = Field(
        description="the token contexts of the sequence, in payload order, disjoint"
    )
    payload: PayloadHeader = Field(
        description="where its columns are in the object store, and how they lie there"
    )


class SequenceFailed(_SequenceFact):
    """Every attempt failed; the sequence will never be trained. What its last attempt had sampled is kept."""

    type: ClassVar[str] = "sequence.failed"
    version: ClassVar[int] = 4
    attempts: int = Field(ge=0, description="attempts that were made")
    failure: Failure = Field(description="why the last attempt failed")
    contexts: tuple[ContextMeta, ...] = Field(
        default=(),
        description="the token contexts of the last attempt that sampled any, as in sequence.finished",
    )
    payload: PayloadHeader | None = Field(
        default=None, description="where their columns are in the object store; null when none were kept"
    )


class SequenceScored(_SequenceFact):
    """A teacher's scores of a finished sequence are in the store, as a sidecar beside its payload; or why there will be none.
    One per teacher."""

    type: ClassVar[str] = "sequence.scored"
    version: ClassVar[int] = 2
    teacher: Name = Field(description="the teacher, as the configuration names it")
    tokens: int = Field(ge=0, description="sampled tokens that it scored")
    scores: PayloadHeader | None = Field(
        description="where the scores are in the object store, a row for each loss token in payload order: `logprobs` float32 [L], and of a top-k form `top_ids` int32 and `top_logprobs` float32 [L, k]; null when a failure is given"
    )
    failure: str | None = Field(
        default=None, max_length=500, description="why the teacher cannot score it; null when it did"
    )
    seconds: float = Field(default=0.0, ge=0, description="what the teacher took")

    @model_validator(mode="after")
    def _result(self) -> SequenceScored:
        if (self.scores is None) == (self.failure is None):
            raise ValueError("a teacher's answer has scores or a failure, one of the two")
        return self

    def id(self) -> str:
        return f"{self.sequence}-{self.teacher}"


class SequenceQuarantined(_SequenceFact):
    """An object of a sequence that a batch needs is damaged or gone: the sequence is trained in no step from then on. Its packer
    says so, once."""

    type: ClassVar[str] = "sequence.quarantined"
    step: int = Field(ge=1, description="the batch that the sequence is in")
    reason: Literal["damaged", "missing"] = Field(
        description="damaged: bytes do not match their checksum, or the object is too short; missing: there is no object"
    )
    key: Key = Field(description="the object: the sequence's payload or a sidecar")
    column: str = Field(
        default="", max_length=128, description="the damaged column; empty: the object as a whole"
    )
    block: int | None = Field(
        default=None, ge=0, description="the damaged block of BLOCK_TOKENS rows; null: the object as a whole"
    )
    detail: str = Field(default="", max_length=2000, description="for people: the error's text, cut")


class _SampleFact(Fact):
    source: Name = Field(description="source id: the task distribution that the sample is of")
    sample: Name = Field(description="sample id, <source>-<index in six digits>")

    def scope(self) -> str:
        return self.source

    def id(self) -> str:
        return self.sample

    def correlation(self) -> str | None:
        return self.sample


class SampleCompleted(_SampleFact):
    """Every sequence of the group has finished or failed: work for the grader."""

    type: ClassVar[str] = "sample.completed"
    sequences: tuple[Name, ...] = Field(description="the finished ones, in member order")
    rewards: tuple[Reward, ...] = Field(description="one per finished sequence, from its verifier")
    failed: int = Field(
        ge=0, description="sequences of the group that failed; with the finished ones, the whole group"
    )

    @model_validator(mode="after")
    def _paired(self) -> SampleCompleted:
        if len(self.rewards) != len(self.sequences):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.sequences)} sequences")
        return self


Quality = Annotated[float, Field(gt=0, le=1)]


class SampleGraded(_SampleFact):
    """The grader's rewards for the group, in the order of `sample.completed`.

    Revision 0 is what the group is decided on: the answer, or at the deadline the original rewards. Revision 1 is an answer
    that came after that.
    """

    type: ClassVar[str] = "sample.graded"
    version: ClassVar[int] = 2
    revision: int = Field(
        default=0, ge=0, le=1, description="0: what the group is decided on; 1: a late answer"
    )
    grader: Name = Field(
        description="the source's grader, a legal name made of its configuration; none: rewards are the verifiers'"
    )
    rewards: tuple[Reward, ...] = Field(
        description="one per finished sequence, in the order of sample.completed"
    )
    fallback: str | None = Field(
        default=None, max_length=500, description="why the original rewards were kept, if grading failed"
    )
    quality: tuple[Quality, ...] = Field(
        default=(), description="one per finished sequence, how good it is; empty: the grader does not say"
    )
    hacks: tuple[bool, ...] = Field(
        default=(),
        description="one per finished sequence, whether it is a confirmed reward hack, whose reward is 0; empty: none",
    )
    report: Ref | None = Field(
        default=None, description="the grader's whole answer (JSON) in the object store, with its reasons"
    )
    attempts: int = Field(default=0, ge=0, description="tries that it took")
    seconds: float = Field(default=0.0, ge=0, description="from the first try to the answer")
    cost: float = Field(
        default=0.0, ge=0, description="what the tries cost, in the unit of the grader's prices"
    )

    @model_validator(mode="after")
    def _whole(self) -> SampleGraded:
        for name in ("quality", "hacks"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.rewards):
                raise ValueError(f"{len(getattr(self, name))} {name} for {len(self.rewards)} rewards")
        return self

    def id(self) -> str:
        return self.sample if self.revision == 0 else f"{self.sample}-r{self.revision}"


class SampleAccepted(_SampleFact):
    """The group will be trained, once a batch takes it."""

    type: ClassVar[str] = "sample.accepted"
    pass_rate: float = Field(
        description="share of the finished sequences whose reward is at least the source's accept.pass_reward, 0 to 1"
    )
    mean_reward: float = Field(description="mean of the graded rewards of the finished sequences")
    tokens: int = Field(ge=0, description="tokens of all contexts of all finished sequences")
    min_version: int = Field(ge=0, description="oldest policy version among the group's sampled tokens")


class SampleRejected(_SampleFact):
    """The group will not be trained."""

    type: ClassVar[str] = "sample.rejected"
    version: ClassVar[int] = 2
    reason: Literal[
        "all_zero", "pass_rate", "failed", "no_loss", "overlong", "stale", "evaluation", "duplicate"
    ] = Field(
        description="failed: too few sequences finished, the grader answered for others, or its hooks gave no advantages; no_loss: no token carries loss; overlong: a context is longer than a micro-batch; pass_rate, all_zero: the source's accept rule; stale: too old for the next batch; evaluation: never trained; duplicate: another accepted group has its task"
    )
    pass_rate: float | None = Field(
        default=None,
        description="as in sample.accepted; null when no sequence finished, or when an accepted group has become stale",
    )
    mean_reward: float | None = Field(default=None, description="as in sample.accepted; null as pass_rate is")
    tokens: int = Field(default=0, ge=0, description="tokens of all contexts of all finished sequences")
    by: Literal["sampler", "hook"] = Field(
        default="sampler",
        description="who rejected it: the sampler, or the hook service an accepted group that it could not shape (failed), or whose advantages are all zero",
    )


class SampleShaped(_SampleFact):
    """Advantages of an accepted group, one per finished sequence, in the order of `sample.completed`. Those with the highest
    revision count, when they come before the group's batch is decided."""

    type: ClassVar[str] = "sample.shaped"
    version: ClassVar[int] = 2
    revision: int = Field(
        default=0, ge=0, description="0; that of a late sample.graded by which it is shaped anew"
    )
    estimator: Name = Field(
        description="what made the advantages: grpo, rloo, dr_grpo, ..., or a legal name made of a hook's import path"
    )
    advantages: tuple[float, ...] = Field(
        description="one per finished sequence: of each of its loss tokens, or with a sidecar their mean"
    )
    sidecars: tuple[PayloadHeader | None, ...] = Field(
        default=(),
        description="one per finished sequence: where the advantages of its loss tokens are (float32 column `advantages`, payload order), null for one without; empty: none has any",
    )
    by: Literal["sampler", "hook"] = Field(
        default="sampler", description="who shaped it: the sampler from events alone, or the hook service"
    )

    @model_validator(mode="after")
    def _whole(self) -> SampleShaped:
        if self.sidecars and len(self.sidecars) != len(self.advantages):
            raise ValueError(f"{len(self.sidecars)} sidecars for {len(self.advantages)} advantages")
        return self

    def id(self) -> str:
        return self.sample if self.revision == 0 else f"{self.sample}-r{self.revision}"


class SourceShare(Frozen):
    """What one source gave to a batch."""

    groups: int = Field(ge=0, description="samples")
    sequences: int = Field(ge=0, description="finished sequences of these samples")
    tokens: int = Field(ge=0, description="tokens of all their contexts")
    loss_tokens: int = Field(ge=0, description="tokens that carry loss")
    mean_reward: float = Field(description="mean of the graded rewards")
    max_staleness: int = Field(
        ge=0, description="versions between the policy that will be updated and the oldest token"
    )


class PenaltyFactors(Frozen):
    """What the advantages of unflagged tokens are multiplied by over the whole batch, so that penalties move none of its mass."""

    alpha: float = Field(ge=0, description="of sequences with a positive advantage")
    beta: float = Field(ge=0, description="of sequences with a negative one")


class BatchYielded(Fact):
    """A batch is decided. Its members are, of each source, the oldest `groups` samples that were shaped up to stream
    sequence `through` and are fresh enough for this step; so a refold needs no object. The plan is in the store."""

    type: ClassVar[str] = "batch.yielded"
    version: ClassVar[int] = 2
    step: int = Field(ge=1, description="number of the batch and of the optimizer step on it, from 1")
    through: int = Field(ge=0, description="stream sequence of the event that this was decided on")
    policy_version: int = Field(ge=0, description="version that the batch will update")
    sources: dict[Name, SourceShare] = Field(description="what each source gave, by source id")
    microbatches: int = Field(ge=1, description="per data-parallel rank, equal on all")
    plan: Ref = Field(description="the plan (JSON, see the plan's schema) in the object store")
    factors: PenaltyFactors | None = Field(
        default=None, description="of the hook segment_penalty; null where no source has it"
    )

    def id(self) -> str:
        return f"{self.step:06d}"

    def correlation(self) -> str | None:
        return self.id()


class BatchReplanned(Fact):
    """A batch without some of its sequences: its plan stands, but their rows carry no loss, as if their advantages were 0. All
    other rows keep their places and weights. The newest revision of a step counts."""

    type: ClassVar[str] = "batch.replanned"
    step: int = Field(ge=1, description="number of the batch")
    revision: int = Field(ge=1, description="how often the batch has been planned anew, with this time")
    without: tuple[Name, ...] = Field(
        min_length=1,
        max_length=MAX_LEFT_OUT,
        description="ids of the sequences that are left out, of this and all earlier revisions",
    )

    def id(self) -> str:
        return f"{self.step:06d}-r{self.revision}"

    def correlation(self) -> str | None:
        return f"{self.step:06d}"


class WindowPacked(Fact):
    """A packer has built one micro-batch for its coordinate."""

    type: ClassVar[str] = "window.packed"
    step: int = Field(ge=1, description="batch that it is of")
    microbatch: int = Field(ge=0, description="micro-batch of its data-parallel rank, from 0")
    dp: int = Field(ge=0, description="data-parallel rank, from 0")
    cp: int = Field(default=0, ge=0, description="context-parallel rank, from 0")
    pp: int = Field(default=0, ge=0, description="pipeline-parallel rank, from 0")
    tokens: int = Field(ge=0, description="tokens of the window")
    bytes: int = Field(ge=0, description="size of the shared copy")
    fetched: int = Field(ge=0, description="bytes read from the store for it")

    def id(self) -> str:
        return f"{self.step:06d}-d{self.dp}-c{self.cp}-p{self.pp}-m{self.microbatch}"

    def correlation(self) -> str | None:
        return f"{self.step:06d}"


class _StepFact(Fact):
    step: int = Field(ge=1, description="number of the batch and of the optimizer step on it, from 1")

    def id(self) -> str:
        return f"{self.step:06d}"

    def correlation(self) -> str | None:
        return self.id()


class BatchConsumed(_StepFact):
    """Every rank has read every window of the batch; its payloads may be collected once the step is trained."""

    type: ClassVar[str] = "batch.consumed"
    sequences: int = Field(ge=0, description="sequences of which the batch held a row")
    loss_tokens: int = Field(ge=0, description="tokens of the batch that carry loss")


class StepTrained(_StepFact):
    """One optimizer step on one batch, from exactly one parent checkpoint."""

    type: ClassVar[str] = "step.trained"
    parent: Ref | None = Field(description="weights that the step started from; null for the initial policy")
    weights: Ref = Field(description="weights after the step")
    optimizer: Ref = Field(description="optimizer state after the step")
    loss: float = Field(description="the objective that was minimized, per loss token, before the step")
    grad_norm: float = Field(description="global L2 norm of the gradients, before clipping")
    kl: float = Field(
        description="mean of logprob(rollout) - logprob(trainer before the step), nats per loss token"
    )
    loss_tokens: int = Field(ge=0, description="tokens of the batch that carried loss")
    seconds: float = Field(ge=0, description="wall-clock seconds of the step")


class PolicyPublished(_StepFact):
    """New weights for the engines. `step` is the policy version from then on."""

    type: ClassVar[str] = "policy.published"
    weights: Ref = Field(description="the weights that the engines are to load")


FACTS: dict[str, type[Fact]] = {
    fact.type: fact
    for fact in (
        RunStarted,
        RunStopped,
        LimitChanged,
        SequenceDispatched,
        SequenceOpened,
        SequenceVerified,
        SequenceFinished,
        SequenceFailed,
        SequenceScored,
        SequenceQuarantined,
        SampleCompleted,
        SampleGraded,
        SampleAccepted,
        SampleRejected,
        SampleShaped,
        BatchYielded,
        BatchReplanned,
        WindowPacked,
        BatchConsumed,
        StepTrained,
        PolicyPublished,
    )
}
