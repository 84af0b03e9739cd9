"""Opens engines: what answers at an address, or at several, behind the one interface that capture speaks to."""

from __future__ import annotations

import json
from typing import Any, cast

from pipeline.engines.policies import PolicyMissing, policy_dir
from pipeline.engines.replicas import Replica, Replicas
from pipeline.engines.sglang import SglangReplica
from pipeline.engines.vllm import VllmReplica
from schemas.config import Engine as EngineConfig


class EngineClient(Replicas):
    """One server with vLLM's wire: vLLM, or the tiny engine. token: its bearer token. timeout: seconds, as of Replicas."""

    def __init__(self, base_url: str, token: str | None = None, timeout: float = 600.0) -> None:
        super().__init__([VllmReplica(base_url, token)], timeout)


def open_engine(config: EngineConfig, token: str | None, timeout: float) -> Replicas:
    """The engine that the configuration names. token: of all replicas. timeout: seconds for one generation."""
    return Replicas(open_replicas(config, token), timeout)


def open_replicas(config: EngineConfig, token: str | None) -> list[Replica]:
    """Its servers one by one, `url` first; the configuration names each once."""
    urls = [url.rstrip("/") for url in (config.url, *config.replicas)]
    if config.kind == "sglang":
        k = experts_per_token(config.policy)
        return [SglangReplica(url, token, k) for url in urls]
    return [VllmReplica(url, token) for url in urls]


def experts_per_token(policy: str) -> int | None:
    """Experts that a token is routed to in each layer, from the policy's config.json; None where there are none."""
    try:
        raw: object = json.loads((policy_dir(policy, ("config.json",)) / "config.json").read_text())
    except PolicyMissing:
        return None
    whole = cast("dict[str, Any]", raw)
    text = cast("dict[str, Any]", whole.get("text_config") or whole)
    for name in ("num_experts_per_tok", "moe_topk", "moe_top_k"):
        count = text.get(name)
        if isinstance(count, int) and count > 0:
            return count
    return None
