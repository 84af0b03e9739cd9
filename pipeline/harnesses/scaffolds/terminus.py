"""Terminus 2 of Harbor 0.26.0. It has no tools, no system text and no header: its own texts tell its requests apart."""

from __future__ import annotations

import json

from pipeline.capture.rules import Auxiliary, Rules
from pipeline.harnesses.scaffolds.base import Job, Launch, Scaffold, by_python

RULES = Rules(
    auxiliary=(
        # Summarization is three requests: a summary after the whole dialogue, questions to it in a dialogue of their own,
        # and their answers after the whole dialogue and the summary. The agent goes on with its first message, the
        # questions as if it had asked them, and the answers.
        Auxiliary("summary", last=r"\AYou are about to hand off your work to another AI agent\."),
        Auxiliary("summary", last=r"\AYou are picking up work from a previous AI agent on this task:"),
        Auxiliary("summary", last=r"\AThe next agent has a few questions for you"),
        # When that fails: a short one in a dialogue of its own.
        Auxiliary(
            "summary", first=r"\ABriefly continue this task: ", last=r"Next steps \(2-3 sentences\):\Z"
        ),
    ),
)


def launch(job: Job) -> Launch:
    options = {
        "instruction": job.instruction,
        "model_name": "openai/policy",
        "api_base": job.url,
        # One turn more than it is given, so that it is the session that ends it, as with every scaffold.
        "max_turns": job.behaviour.max_turns + 1,
        "model_info": {"max_input_tokens": job.context, "max_output_tokens": job.output},
        **job.settings,
    }
    home = job.places.home
    argv, env = by_python(job.places, "run_terminus.py", f"{home}/options.json")
    return Launch(
        argv,
        "",
        {
            **env,
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HARBOR_TELEMETRY": "0",
            "TMUX_TMPDIR": home,
        },
        {"options.json": json.dumps(options)},
    )


SCAFFOLD = Scaffold(
    name="terminus",
    version="0.26.0",
    wires=("chat",),
    packages=("harbor==0.26.0",),
    program="bin/python",
    check=("-c", "import harbor.agents.terminus_2"),
    registry="pypi",
    runtime="python",
    launch=launch,
    setting="keyword arguments of its class",
    python=(3, 12),
    commands=("tmux",),
)
