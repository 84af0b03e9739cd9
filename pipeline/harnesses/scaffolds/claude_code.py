"""Claude Code 2.1.332."""

from __future__ import annotations

import json

from pipeline.capture.rules import Auxiliary, Rules
from pipeline.harnesses.scaffolds.base import MODEL, Job, Launch, Scaffold

RULES = Rules(
    # Subagents have it, each its own; the main agent's requests do not.
    agent_header="x-claude-code-agent-id",
    auxiliary=(
        # Asks for the rate limit's headers before the first turn; off with CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1.
        Auxiliary("probe", first=r"\Aquota\Z", max_tokens=1, tools=False),
        # The instruction to summarize follows the whole dialogue as a user's text, with the agent's own tools and system text:
        # nothing else marks it. The next request begins anew with the summary.
        Auxiliary(
            "compaction",
            last=r"CRITICAL: Respond with TEXT ONLY\. Do NOT call any tools\..*"
            r"an <analysis> block followed by a <summary> block\. Tool calls will be rejected and you will fail the task\.\s*\Z",
        ),
        # Titles, page extracts, suggestions and whatever else the client asks for itself: an agent always has tools.
        Auxiliary("auxiliary", tools=False),
    ),
)


_QUIET = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
_MODELS = ("MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_HAIKU_MODEL")


def launch(job: Job) -> Launch:
    given = {
        **dict.fromkeys(_QUIET, "1"),
        **{f"ANTHROPIC_{name}": MODEL for name in _MODELS},
        "ANTHROPIC_BASE_URL": job.bare_url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(job.output),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(job.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # It refuses to skip permissions as root outside of a sandbox.
        "IS_SANDBOX": "1",
    }
    argv = [f"{job.places.scaffold}/{SCAFFOLD.program}", "-p", "--dangerously-skip-permissions"]
    return Launch(
        (*argv, "--output-format", "json"),
        job.instruction,
        given,
        {".claude/settings.json": json.dumps(dict(job.settings))},
    )


SCAFFOLD = Scaffold(
    name="claude-code",
    version="2.1.332",
    wires=("messages",),
    packages=("@anthropic-ai/claude-code@2.1.332",),
    program="node_modules/.bin/claude",
    check=("--version",),
    registry="npm",
    runtime="",
    launch=launch,
    setting="its settings.json",
    native=True,
)
