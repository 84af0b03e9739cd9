"""Codex 0.171.0."""

from pipeline.capture.rules import Auxiliary, Rules

RULES = Rules(
    # Only subagents' requests have it. It names their parent: thread-id would name them, but the main agent has that, too.
    agent_header="x-codex-parent-thread-id",
    auxiliary=(
        # The header is JSON of the turn; request_kind is "turn" for an agent's own.
        Auxiliary("compaction", header=("x-codex-turn-metadata", r'.*"request_kind":\s*"compaction".*')),
    ),
)
