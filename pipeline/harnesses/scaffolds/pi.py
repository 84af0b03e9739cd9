"""pi (@mariozechner/pi-coding-agent) 0.73.1."""

from pipeline.capture.rules import Auxiliary, Rules

RULES = Rules(
    auxiliary=(
        # Compaction and the summary of a branch that is left are written by a system prompt of their own, over the dialogue
        # as text; what goes on afterwards begins with the summary, as a user's message.
        Auxiliary("compaction", system=r"\AYou are a context summarization assistant\.", tools=False),
    ),
)
