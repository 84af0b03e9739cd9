"""The configuration of a run. Every field is documented; unknown keys and impossible values are refused by path.

`RunConfig.decisions()` is the part that decisions depend on; it enters the log in `run.started`, so that a refold
needs nothing but the log. Secrets are never in the configuration: it names the files that hold them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, field_validator, model_validator

from schemas.facts import MAX_BODY, MAX_LEFT_OUT
from schemas.names import Name
from schemas.parallel import LayoutName, Sizes
from schemas.section import Section
from schemas.servers import Broker, Engine, Retention, Store, checked_bind
from schemas.shares import largest_remainder
from schemas.signal import Grader, Hook, Mixer, Penalty, Teacher
from schemas.sources import Accept, Behaviour, Effect, Environment, Source, SourceName, Timeouts
from schemas.vision import Vision

__all__ = [
    "Accept",
    "AgentLoop",
    "Batch",
    "Behaviour",
    "Broker",
    "Decisions",
    "Effect",
    "Engine",
    "Environment",
    "Grader",
    "Hook",
    "Metrics",
    "Mixer",
    "Packer",
    "Penalty",
    "Pool",
    "Retention",
    "RunConfig",
    "Section",
    "Source",
    "SourceName",
    "Store",
    "Teacher",
    "Timeouts",
    "Trainer",
    "Vision",
]

Resources = dict[str, Annotated[float, Field(ge=0)]]
"""Amounts by the name of a resource."""
MAX_DECISIONS = MAX_BODY - 1024
"""Bytes of `RunConfig.decisions()` as JSON: it enters the log in one `run.started`."""


class Pool(Section):
    """Hosts that import the same harness codebase."""

    name: Name = Field(description="pool id, in subjects and process names")
    harness: str = Field(
        description="chat, tool, shell, harbor, an entry point of packtrain.harnesses, or module:Class of an adapter"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="the harness's own options, validated by it"
    )
    hosts: int = Field(
        default=0, ge=0, le=1024, description="processes; 0: one, or its share where there is a host_budget"
    )
    share: float = Field(
        default=1.0, gt=0, le=1e6, description="its part of host_budget, against the other pools' shares"
    )
    tenants: int = Field(default=32, ge=1, le=10_000, description="harness instances in one host at a time")
    concurrency: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="trials at once in all its hosts; 0: no limit. Changed while it runs by `packtrain limit`",
    )
    threads: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="blocking calls (environments, verifiers) of one host at a time",
    )
    drain_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds that a host which is told to stop lets its trials finish in before it hands them back",
    )
    python: str = Field(
        default="",
        description="interpreter of its hosts, where the codebase and packtrain are installed; empty: the launcher's own",
    )
    resources: Resources = Field(
        default_factory=dict,
        description="what one host takes of a Ray node: CPU, GPU, memory (bytes) or a custom name; empty: one CPU",
    )
    rules: str = Field(
        default="",
        description="what the agent-loop host knows of the scaffold's requests: claude_code, opencode, pi, codex, mini_swe_agent, openhands, terminus, qwen, or module:NAME; empty: nothing, and in a harbor pool what its agent's are",
    )


class AgentLoop(Section):
    """The agent-loop hosts."""

    hosts: int = Field(default=1, ge=1, le=1024, description="processes that the launcher starts")
    tenants: int = Field(default=64, ge=1, le=10_000, description="sessions in one host at a time")
    bind: str = Field(default="127.0.0.1", description="address that session URLs are served on")
    advertise: str = Field(
        default="",
        description="address that harness hosts reach it at; empty: the bound one, and for bind 0.0.0.0 or :: (every address) the one that the machine has towards the broker",
    )
    trial_budget_s: float = Field(
        default=120.0,
        gt=0,
        description="wall-clock seconds for one attempt, all phases, from when a harness host takes it",
    )
    queue_s: float = Field(
        default=600.0,
        ge=0,
        description="seconds that an attempt may wait for a free slot in its pool before that",
    )
    drain_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds that a host which is told to stop lets its sessions finish in before it hands them back",
    )
    max_attempts: int = Field(
        default=5, ge=1, le=100, description="attempts of a sequence before it fails as infra"
    )
    ack_wait_s: float = Field(
        default=5.0, ge=1, description="seconds of silence after which a host's sequences go to another"
    )
    run_key_file: str = Field(
        default="",
        description="file that holds the key from which session secrets are derived; empty: made by the launcher",
    )
    journal_dir: str = Field(
        default="",
        description="local directory in which hosts keep recorded turns until their sequence ends, so that a killed host's are not lost; empty: made by the launcher",
    )
    resources: Resources = Field(
        default_factory=dict,
        description="what one host takes of a Ray node: CPU, GPU, memory (bytes) or a custom name; empty: one CPU",
    )


class Batch(Section):
    """How a batch is cut, and over which ranks."""

    dp: int = Field(default=2, ge=1, le=4096, description="data-parallel ranks")
    cp: int = Field(
        default=1, ge=1, le=1024, description="context-parallel ranks, which share each micro-batch by tokens"
    )
    tp: int = Field(
        default=1, ge=1, le=1024, description="tensor-parallel ranks, which share one copy of their window"
    )
    pp: int = Field(default=1, ge=1, le=1024, description="pipeline stages")
    vpp: int = Field(
        default=1,
        ge=1,
        le=64,
        description="a rank's micro-batches are a multiple of this, as virtual pipeline stages want it",
    )
    pp_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="layers with routing (MoE) of each pipeline stage, by which payloads divide their routing; empty: an even division",
    )
    layout: LayoutName = Field(
        default="contiguous",
        description="how a pack is padded and cut over context-parallel ranks: megatron, verl, slime, contiguous, ulysses; also zigzag_pack and slime_allgather",
    )
    fp8: bool = Field(default=False, description="pad as FP8 kernels want it (layouts megatron, verl)")
    adaptive_cp: bool = Field(
        default=False,
        description="give micro-batches of short contexts a smaller context-parallel size, a divisor of cp",
    )
    token_budget: int = Field(
        default=4096,
        ge=16,
        description="tokens of one micro-batch at most, padding of its contexts included, over all its context-parallel ranks",
    )
    overlong: Literal["reject", "drop", "truncate"] = Field(
        default="reject",
        description="what becomes of a context that is longer than a micro-batch: its group is rejected, it is left out, or its beginning is, and what remains keeps its loss",
    )
    order: Literal["small_ends", "descending"] = Field(
        default="small_ends",
        description="a rank's micro-batches by cost: small ones at both ends, where pipelines fill and drain; or descending",
    )
    ahead: int = Field(
        default=1, ge=0, le=64, description="batches that may be yielded before the step under way is trained"
    )

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.dp, self.cp, self.tp, self.pp)

    @model_validator(mode="after")
    def _stages(self) -> Batch:
        if self.pp_layers and len(self.pp_layers) != self.pp:
            raise ValueError(
                f"pp_layers has {len(self.pp_layers)} entries for pp {self.pp}: give one a stage"
            )
        if self.fp8 and self.layout not in ("megatron", "verl"):
            raise ValueError(f"fp8 pads for layouts megatron and verl, not for {self.layout!r}: leave it out")
        return self


class Packer(Section):
    """The packers, one per (dp, cp, pp) coordinate."""

    socket_dir: str = Field(
        default="", description="directory of the packers' Unix sockets; empty: in the run's directory"
    )
    columns: tuple[Literal["routed_experts", "candidates"], ...] = Field(
        default=(), description="optional columns that windows have, where payloads do"
    )
    prefetch: int = Field(default=2, ge=1, le=64, description="windows built ahead of the trainer")
    memory_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="bytes of windows that may exist at once"
    )
    quarantine: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description=f"share of a batch's sequences that may be left out because their objects are damaged or gone, and {MAX_LEFT_OUT} at most; beyond it packing stops and says why",
    )


class Trainer(Section):
    """The reference trainer, or yours."""

    kind: Literal["reference", "external"] = Field(
        default="reference",
        description="reference: the launcher starts its ranks; external: yours takes windows from the packers and says what it has trained",
    )
    lr: float = Field(default=1e-4, gt=0, description="AdamW learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="PPO ratio is clipped to at least 1 - this")
    clip_high: float = Field(default=0.28, gt=0, description="PPO ratio is clipped to at most 1 + this")
    clip_positive_low: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="where the advantage is positive, a ratio below this has no gradient; 0: no such bound",
    )
    clip_negative_high: float = Field(
        default=0.0,
        ge=0,
        description="where the advantage is negative, a ratio above this, dual-clip PPO's c > 1, has no gradient; 0: no such bound",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this global norm")
    rendezvous: str = Field(
        default="",
        description="host:port of rank 0, where all ranks meet; empty: a free loopback port, for ranks that one process starts",
    )
    threads: int = Field(default=1, ge=1, le=256, description="torch threads of a rank")

    @field_validator("clip_negative_high")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError(
                f"a bound of {value} would stop what has only begun to move: give more than 1, or 0"
            )
        return value


class Metrics(Section):
    """What processes tell Prometheus."""

    bind: str = Field(
        default="",
        description="host:port on which every service process serves /metrics; port 0: a free one each, which `packtrain status --json` tells for hosts; a trainer's ranks that one `packtrain service trainer` runs take the port and those after it; empty: nowhere",
    )

    _bind = field_validator("bind")(checked_bind)


def _named(sources: tuple[Source, ...], name: str) -> Source:
    for source in sources:
        if source.name == name:
            return source
    raise KeyError(f"no source {name!r}; sources: {[s.name for s in sources]}")


class RunConfig(Section):
    """A whole run."""

    run: Name = Field(default="demo", description="run id: stream RL_<run>, key prefix runs/<run>")
    steps: int = Field(default=5, ge=1, description="optimizer steps")
    host_budget: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="harness hosts of all pools together, divided by their shares when the run starts; 0: each pool has its own number of hosts",
    )
    directory: str = Field(
        default=".packtrain", description="where the launcher keeps broker, objects, logs and sockets"
    )
    broker: Broker = Broker()
    store: Store = Store()
    engine: Engine = Engine()
    agent_loop: AgentLoop = AgentLoop()
    batch: Batch = Batch()
    packer: Packer = Packer()
    retention: Retention = Retention()
    trainer: Trainer = Trainer()
    metrics: Metrics = Metrics()
    mixer: Mixer = Mixer()
    teachers: tuple[Teacher, ...] = Field(default=(), max_length=64)
    pools: tuple[Pool, ...] = Field(min_length=1)
    sources: tuple[Source, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        pools = [pool.name for pool in self.pools]
        names = [source.name for source in self.sources]
        teachers = [teacher.name for teacher in self.teachers]
        for what, given in (("pool", pools), ("source", names), ("teacher", teachers)):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is defined twice")
        if self.host_budget:
            counted = [pool.name for pool in self.pools if pool.hosts]
            if counted:
                raise ValueError(
                    f"pool {counted[0]!r} has its own number of hosts, and host_budget is {self.host_budget}: give the pool a share, or leave host_budget out"
                )
            if self.host_budget < len(pools):
                raise ValueError(
                    f"host_budget {self.host_budget} is below the number of pools, {len(pools)}: every pool needs a host"
                )
        else:
            shared = [pool for pool in self.pools if pool.share != 1.0]
            if shared:
                raise ValueError(
                    f"pool {shared[0].name!r} has share {shared[0].share:g} of no host_budget: give the run a host_budget, or the pool hosts"
                )
        for source in self.sources:
            if source.pool not in pools:
                raise ValueError(
                    f"source {source.name!r} is bound to pool {source.pool!r}, which does not exist; pools: {pools}"
                )
            unknown = [name for name in source.teachers if name not in teachers]
            if unknown:
                raise ValueError(
                    f"source {source.name!r} is scored by teacher {unknown[0]!r}, which does not exist; teachers: {teachers}"
                )
            if source.groups and 0 < self.mixer.in_flight < source.group_size:
                raise ValueError(
                    f"mixer.in_flight {self.mixer.in_flight} is below group_size {source.group_size} of source {source.name!r}, and a group "
                    "is dispatched as a whole; raise mixer.in_flight, or leave it 0 for no limit"
                )
            if source.behaviour.max_tokens >= self.engine.max_context:
                raise ValueError(
                    f"source {source.name!r}: behaviour.max_tokens {source.behaviour.max_tokens} leaves no room for a prompt in "
                    f"engine.max_context {self.engine.max_context}"
                )
        if self.engine.max_context > self.batch.token_budget and self.batch.overlong == "reject":
            raise ValueError(
                f"batch.token_budget {self.batch.token_budget} is below engine.max_context {self.engine.max_context}: "
                "a full context would fit no micro-batch; raise the budget, or set batch.overlong to drop or truncate"
            )
        if self.trainer.kind == "reference" and self.batch.pp > 1:
            raise ValueError(
                f"batch.pp is {self.batch.pp}, and the reference trainer has no pipeline stages: set pp to 1, or trainer.kind to external"
            )
        if self.trainer.kind == "reference" and "routed_experts" in self.packer.columns:
            raise ValueError(
                "packer.columns has routed_experts, which the reference trainer would ignore, as its policy has no experts: leave it out, "
                "or set trainer.kind to external"
            )
        members = sum(source.groups * source.group_size for source in self.sources)
        if members < self.batch.dp:
            raise ValueError(
                f"a batch has {members} sequences, fewer than batch.dp {self.batch.dp}; raise groups or lower dp"
            )
        size = len(orjson.dumps(self.decisions()))
        if size > MAX_DECISIONS:
            raise ValueError(
                f"steps, batch, mixer and sources are {size} bytes as JSON, limit {MAX_DECISIONS} (they go into one event); "
                "shorten system prompts and environment options"
            )
        return self

    def source(self, name: str) -> Source:
        """The source of that name; raises KeyError that lists the names."""
        return _named(self.sources, name)

    def pool_hosts(self) -> dict[str, int]:
        """Processes of each pool, by its name: its own number, or its share of `host_budget`."""
        if not self.host_budget:
            return {pool.name: pool.hosts or 1 for pool in self.pools}
        return largest_remainder(self.host_budget, {pool.name: pool.share for pool in self.pools})

    def decisions(self) -> dict[str, Any]:
        """What decide() functions may read: steps, batch, mixer, sources and what encoding an image costs. JSON values only."""
        whole = self.model_dump(mode="json")
        whole["vision"] = whole["engine"]["vision"]
        return {key: whole[key] for key in Decisions.model_fields}


class Decisions(Section):
    """`RunConfig.decisions()` read back from `run.started`."""

    steps: int
    batch: Batch
    mixer: Mixer = Mixer()
    vision: Vision = Vision()
    """`engine.vision`."""
    sources: tuple[Source, ...]

    def source(self, name: str) -> Source:
        return _named(self.sources, name)

    def training(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.groups > 0)

    def evaluation(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.evaluate > 0)
