"""Qwen Code 0.24.4."""

from __future__ import annotations

import json

from pipeline.capture.rules import Rules
from pipeline.harnesses.scaffolds.base import MODEL, Job, Launch, Scaffold

RULES = Rules()
HEAP_MB = 1024


def launch(job: Job) -> Launch:
    settings = {
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "model": {
            "generationConfig": {
                "samplingParams": {"max_tokens": job.output},
                "contextWindowSize": job.context,
            }
        },
        **job.settings,
    }
    at = job.places
    # Its launcher starts it anew, twice, with a heap of half the machine's memory, which a workspace does not have.
    argv = [at.node, "--expose-gc", f"--max-old-space-size={HEAP_MB}", f"{at.scaffold}/{SCAFFOLD.program}"]
    return Launch(
        (*argv, "--yolo", "--output-format", "json", "--auth-type", "openai", "--model", MODEL),
        job.instruction,
        {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": job.url,
            "NO_UPDATE_NOTIFIER": "1",
            "QWEN_CODE_NO_RELAUNCH": "1",
        },
        {".qwen/settings.json": json.dumps(settings)},
    )


SCAFFOLD = Scaffold(
    name="qwen",
    version="0.24.4",
    wires=("chat",),
    packages=("@qwen-code/qwen-code@0.24.4",),
    program="node_modules/@qwen-code/qwen-code/cli.js",
    check=("--version",),
    registry="npm",
    runtime="node",
    launch=launch,
    setting="its settings.json",
)
