"""OpenHands SDK 1.58.2."""

from __future__ import annotations

import json

from pipeline.capture.rules import Auxiliary, Rules
from pipeline.harnesses.scaffolds.base import Job, Launch, Scaffold, by_python

RULES = Rules(
    auxiliary=(
        # LLMSummarizingCondenser: the events to forget as text, without tools; the agent's next request has the summary in
        # their place, as a user's message.
        Auxiliary("compaction", system=r"\AYou are maintaining a context-aware state summary", tools=False),
    ),
)


# It chooses the protocol by the model's name.
_MODEL = {"chat": "openai/policy", "messages": "anthropic/policy", "responses": "openai/gpt-5-mini"}


def launch(job: Job) -> Launch:
    llm = {
        "model": _MODEL[job.wire],
        "base_url": job.base_url,
        "api_key": "none",
        "max_input_tokens": job.context,
        "max_output_tokens": job.output,
        "num_retries": 5,
        "retry_min_wait": 1,
        "retry_max_wait": 8,
    }
    options = {
        "instruction": job.instruction,
        "max_turns": job.behaviour.max_turns,
        "llm": llm,
        **job.settings,
    }
    argv, env = by_python(job.places, "run_openhands.py", f"{job.places.home}/options.json")
    return Launch(
        argv,
        "",
        {**env, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"},
        {"options.json": json.dumps(options)},
    )


SCAFFOLD = Scaffold(
    name="openhands",
    version="1.58.2",
    wires=("chat", "messages", "responses"),
    packages=("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
    program="bin/python",
    check=("-c", "import openhands.sdk, openhands.tools"),
    registry="pypi",
    runtime="python",
    launch=launch,
    setting="condense: {max_size, keep_first} of its condenser that summarizes",
    python=(3, 12),
)
