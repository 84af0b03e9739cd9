"""OpenCode 1.18.33."""

from pipeline.capture.rules import Auxiliary, Rules

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
