"""Sections of a configuration: what becomes of finished sequences: graders, teachers, hooks, penalties, dispatch."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from schemas.names import Name
from schemas.section import Section
from schemas.servers import without_credentials

MAX_PENALTIES = 16
"""Rules of one source: each has a bit of a segment's flags."""


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"options must be JSON values, as they stand in an event: {error}; write dates as text, and leave out infinite numbers"
        ) from None
    return options


Options = Annotated[dict[str, Any], AfterValidator(_as_json)]


class Grader(Section):
    """Who judges the groups of a source, and how long they wait for it."""

    kind: str = Field(
        default="none",
        description="none (the verifiers' rewards stand), rubric, command, an entry point of packtrain.graders, or module:function",
    )
    options: Options = Field(default_factory=dict, description="the grader's own options, validated by it")
    policy: Literal["wait", "lag"] = Field(
        default="wait",
        description="wait: a group is decided on the grader's rewards, or on its own once the deadline has passed; lag: on its own at once. An answer that comes after that shapes the group anew, if it is in no batch yet",
    )
    deadline_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="wait: seconds from sample.completed after which a group waits no more",
    )
    timeout_s: float = Field(default=120.0, gt=0, le=86_400, description="seconds of one try of one group")
    attempts: int = Field(
        default=3, ge=1, le=100, description="tries of one group before it keeps its own rewards"
    )
    concurrency: int = Field(
        default=16, ge=1, le=10_000, description="groups of the source that one grader process judges at once"
    )


class Teacher(Section):
    """A model that scores the tokens of finished sequences, for on-policy distillation."""

    name: Name = Field(
        description="teacher id, in sources.teachers and in the names of sidecars", max_length=32
    )
    kind: Literal["tiny", "vllm", "sglang"] = Field(
        default="tiny", description="which engine scores; tiny: in the teacher service's own process"
    )
    url: str = Field(default="", description="http://host:port of the first engine; empty for tiny")
    replicas: tuple[str, ...] = Field(default=(), description="further engines of the same model")
    token_file: str = Field(default="", description="file that holds the engines' bearer token; empty: none")
    policy: str = Field(
        default="tiny", description="tiny: the policy directory that scores, or a name as engine.policy"
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="likeliest tokens that are kept at each sampled token; 0: the token's own log-probability alone",
    )
    max_context: int = Field(
        default=32_768,
        ge=16,
        description="tokens of one request, with the one that a server samples after them; longer rows go in chunks",
    )
    overlap: int = Field(
        default=4096,
        ge=1,
        description="tokens before the first loss token of a later chunk that go with it: what it is scored upon, at least",
    )
    concurrency: int = Field(
        default=16,
        ge=1,
        le=10_000,
        description="sequences of each source that one teacher process scores at once",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="seconds of one request, with its retries")

    _url = field_validator("url")(without_credentials)

    @field_validator("replicas")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(without_credentials(url) for url in value)

    @model_validator(mode="after")
    def _placed(self) -> Teacher:
        if (self.kind == "tiny") == bool(self.url):
            raise ValueError(
                f"teacher {self.name!r}: kind {self.kind!r} with url {self.url!r}; tiny scores in its own process and has no url, "
                "vllm and sglang are servers and need one"
            )
        if self.overlap >= self.max_context - 1:
            raise ValueError(
                f"teacher {self.name!r}: overlap {self.overlap} leaves no room in max_context {self.max_context}"
            )
        return self


class Hook(Section):
    """One step from a group's rewards to its advantages."""

    kind: str = Field(
        description="length_penalty, overlong, grpo, dr_grpo, rloo, leave_one_out, reinforce_pp_baseline, redistribute, segment_penalty, opd, opd_topk, an entry point of packtrain.hooks, or module:Class"
    )
    options: Options = Field(default_factory=dict, description="the hook's own options, validated by it")


Strategy = Literal["monitor", "mask", "scale", "set", "subtract", "weigh"]


class Penalty(Section):
    """A rule that flags what an agent did, and what becomes of the flagged tokens."""

    rule: str = Field(
        description="malformed_call, unknown_tool, repetition, garbled, nonzero_exit, infra_failure, or module:Class"
    )
    options: Options = Field(default_factory=dict, description="the rule's own options, validated by it")
    scope: Literal["segment", "context", "sequence"] = Field(
        default="segment",
        description="what is flagged when a turn is: that turn, its context's turns, or the sequence's",
    )
    strategy: Strategy = Field(
        default="monitor",
        description="what becomes of a flagged token's advantage. monitor: nothing; mask: it is not trained; scale: it is multiplied by value; set: it is value; subtract: value is taken off; weigh: by the batch's factors, with the hook segment_penalty",
    )
    value: float = Field(default=0.0, ge=-1e6, le=1e6, description="of scale, set and subtract")
    stop: bool = Field(default=False, description="end the rollout (early_stop) when the rule flags a turn")


class Mixer(Section):
    """How much of each source is dispatched, and in which order."""

    dispatch: Literal["fixed", "demand"] = Field(
        default="fixed",
        description="fixed: each source has groups times oversample groups in play; demand: by acceptance rate, time and deficit",
    )
    alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="weight of a source's demand against its deficit, in the order of dispatch: by demand, or under in_flight",
    )
    oversample: float = Field(
        default=0.5,
        ge=0,
        le=100,
        description="demand: groups in play beyond the demand, as a part of it: the mean over all sources",
    )
    oversample_min: float = Field(
        default=0.0, ge=0, le=100, description="demand: that part of one source, at least"
    )
    oversample_max: float = Field(
        default=2.0, ge=0, le=100, description="demand: that part of one source, at most"
    )
    in_flight: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="sequences of all training sources that run at once; 0: no limit",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Mixer:
        if not self.oversample_min <= self.oversample <= self.oversample_max:
            raise ValueError(
                f"mixer.oversample {self.oversample:g} is not between oversample_min {self.oversample_min:g} and oversample_max {self.oversample_max:g}"
            )
        return self
