"""Codex 0.171.0."""

from pipeline.capture.rules import Auxiliary, Rules

RULES = Rules(
    # Every request names its agent; only subagents' name a parent.
    agent_header="thread-id",
    subagent_header="x-codex-parent-thread-id",
    auxiliary=(
        # The header is JSON of the turn; request_kind is "turn" for an agent's own.
        Auxiliary("compaction", header=("x-codex-turn-metadata", r'.*"request_kind":\s*"compaction".*')),
    ),
)
