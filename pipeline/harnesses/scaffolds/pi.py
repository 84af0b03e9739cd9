"""pi (@mariozechner/pi-coding-agent) 0.73.1."""

from __future__ import annotations

import json
from typing import Any

from pipeline.capture.rules import Auxiliary, Rules
from pipeline.harnesses.scaffolds.base import MODEL, Job, Launch, Scaffold, last_first

RULES = Rules(
    auxiliary=(
        # Compaction and the summary of a branch that is left are written by a system prompt of their own, over the dialogue
        # as text; what goes on afterwards begins with the summary, as a user's message.
        Auxiliary("compaction", system=r"\AYou are a context summarization assistant\.", tools=False),
    ),
)


_API = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}


def launch(job: Job) -> Launch:
    at = job.places
    model = {"id": MODEL, "reasoning": True, "contextWindow": job.context, "maxTokens": job.output}
    provider = {"baseUrl": job.base_url, "api": _API[job.wire], "apiKey": "none", "models": [model]}
    argv = [at.node, f"{at.scaffold}/{SCAFFOLD.program}", "-p", "--mode", "json"]
    return Launch(
        (*argv, "--provider", "ours", "--model", MODEL, "--offline"),
        job.instruction,
        {"PI_TELEMETRY": "0"},
        {
            ".pi/agent/models.json": json.dumps({"providers": {"ours": provider}}),
            ".pi/agent/settings.json": json.dumps({"retry": {"baseDelayMs": 500}, **job.settings}),
        },
    )


def fault(stdout: str) -> str:
    """It exits with 0 whatever happened; the last message of its own tells."""
    for event in last_first(stdout):
        message: dict[str, Any] = event.get("message") or {}
        if event.get("type") == "message_end" and message.get("role") == "assistant":
            return str(message.get("errorMessage", "error")) if message.get("stopReason") == "error" else ""
    return ""


SCAFFOLD = Scaffold(
    name="pi",
    version="0.73.1",
    wires=("chat", "messages", "responses"),
    packages=("@mariozechner/pi-coding-agent@0.73.1",),
    program="node_modules/.bin/pi",
    check=("--version",),
    registry="npm",
    runtime="node",
    launch=launch,
    fault=fault,
    setting="its settings.json",
)
