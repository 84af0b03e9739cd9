"""OpenCode 1.18.33."""

from pipeline.capture.rules import Auxiliary, Rules

RULES = Rules(
    # Only subagents' requests have it. It names their parent: x-session-id would name them, but the main agent has that, too.
    agent_header="x-parent-session-id",
    auxiliary=(
        # The first request of a session, to small_model.
        Auxiliary("title", system=r"\AYou are a title generator\.", tools=False),
        # Over the dialogue as text; what goes on afterwards begins with the summary as if the assistant had said it.
        Auxiliary("compaction", system=r"\AYou are a context summarization agent\.", tools=False),
    ),
)
