"""mini-swe-agent 2.4.6: one dialogue, no request but the agent's own, no header that names anything."""

from __future__ import annotations

import json

from pipeline.capture.rules import Rules
from pipeline.harnesses.scaffolds.base import MODEL, Job, Launch, Scaffold, by_python

RULES = Rules()


def launch(job: Job) -> Launch:
    home = job.places.home
    kwargs = {"api_base": job.base_url, "api_key": "none", "max_tokens": job.output}
    config = {"run": {"task": job.instruction}, "model": {"model_kwargs": kwargs}}
    arguments = ["-y", "--exit-immediately", "-l", "0", "-o", f"{home}/trajectory.json"]
    for file in ("mini.yaml", f"{home}/ours.yaml", f"{home}/settings.yaml"):
        arguments += ["-c", file]
    arguments += ["-m", f"{'anthropic' if job.wire == 'messages' else 'openai'}/{MODEL}"]
    arguments += ["--model-class", "litellm_response"] if job.wire == "responses" else []
    argv, env = by_python(job.places, "minisweagent.run.mini", *arguments)
    return Launch(
        argv,
        "",
        {
            **env,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        {"ours.yaml": json.dumps(config), "settings.yaml": json.dumps(dict(job.settings))},
    )


SCAFFOLD = Scaffold(
    name="mini-swe-agent",
    version="2.4.6",
    wires=("chat", "messages", "responses"),
    packages=("mini-swe-agent==2.4.6",),
    program="bin/python",
    check=("-c", "import minisweagent.run.mini, minisweagent.models.litellm_response_model"),
    registry="pypi",
    runtime="python",
    launch=launch,
    setting="a configuration beside mini.yaml",
    without=("datasets", "boto3"),
)
