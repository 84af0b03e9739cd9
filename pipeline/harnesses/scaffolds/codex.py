"""Codex 0.171.0."""

from __future__ import annotations

from typing import Any

import tomli_w

from pipeline.capture.rules import Auxiliary, Rules
from pipeline.harnesses.scaffolds.base import MODEL, Job, Launch, Scaffold

RULES = Rules(
    # Every request names its agent; only subagents' name a parent.
    agent_header="thread-id",
    subagent_header="x-codex-parent-thread-id",
    auxiliary=(
        # The header is JSON of the turn; request_kind is "turn" for an agent's own.
        Auxiliary("compaction", header=("x-codex-turn-metadata", r'.*"request_kind":\s*"compaction".*')),
    ),
)


def launch(job: Job) -> Launch:
    provider = {"name": "ours", "base_url": job.url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    config: dict[str, Any] = {
        "model": MODEL,
        "model_provider": "ours",
        "model_providers": {"ours": provider},
        "model_context_window": job.context,
        "check_for_update_on_startup": False,
        "analytics": {"enabled": False},
        **job.settings,
    }
    at = job.places
    argv = [at.node, f"{at.scaffold}/{SCAFFOLD.program}", "exec", "--json", "--skip-git-repo-check"]
    return Launch(
        (*argv, "--dangerously-bypass-approvals-and-sandbox", "-"),
        job.instruction,
        {"OPENAI_API_KEY": "none"},
        {".codex/config.toml": tomli_w.dumps(config)},
    )


SCAFFOLD = Scaffold(
    name="codex",
    version="0.171.0",
    wires=("responses",),
    packages=("@openai/codex@0.171.0",),
    program="node_modules/.bin/codex",
    check=("--version",),
    registry="npm",
    runtime="node",
    launch=launch,
    setting="its config.toml",
    native=True,
)
