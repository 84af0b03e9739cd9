"""OpenCode 1.18.33."""

from __future__ import annotations

import json

from pipeline.capture.rules import Auxiliary, Rules
from pipeline.harnesses.scaffolds.base import MODEL, Job, Launch, Scaffold

RULES = Rules(
    # Every request names its agent; only subagents' name a parent.
    agent_header="x-session-id",
    subagent_header="x-parent-session-id",
    auxiliary=(
        # The first request of a session, to small_model.
        Auxiliary("title", system=r"\AYou are a title generator\.", tools=False),
        # Over the dialogue as text; what goes on afterwards begins with the summary as if the assistant had said it.
        Auxiliary("compaction", system=r"\AYou are a context summarization agent\.", tools=False),
    ),
)


_SDK = {"chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic", "responses": "@ai-sdk/openai"}
_OFF = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")


def launch(job: Job) -> Launch:
    model = {
        "limit": {"context": job.context, "output": job.output},
        "tool_call": True,
        "reasoning": True,
    }
    provider = {
        "npm": _SDK[job.wire],
        "name": "ours",
        "options": {"baseURL": job.url, "apiKey": "none"},
        "models": {name: {"name": name, **model} for name in (MODEL, "small")},
    }
    config = {
        "provider": {"ours": provider},
        "model": f"ours/{MODEL}",
        "small_model": "ours/small",
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
        **job.settings,
    }
    argv = [f"{job.places.scaffold}/{SCAFFOLD.program}", "run", "--format", "json"]
    return Launch(
        tuple(argv),
        job.instruction,
        {f"OPENCODE_DISABLE_{name}": "1" for name in _OFF},
        {".config/opencode/opencode.json": json.dumps(config)},
    )


SCAFFOLD = Scaffold(
    name="opencode",
    version="1.18.33",
    wires=("chat", "messages", "responses"),
    packages=("opencode-ai@1.18.33",),
    program="node_modules/.bin/opencode",
    check=("--version",),
    registry="npm",
    runtime="",
    launch=launch,
    setting="its opencode.json",
    native=True,
)
