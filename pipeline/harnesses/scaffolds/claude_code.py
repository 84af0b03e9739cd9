"""Claude Code 2.1.332."""

from pipeline.capture.rules import Auxiliary, Rules

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
