"""OpenHands SDK 1.58.2."""

from pipeline.capture.rules import Auxiliary, Rules

RULES = Rules(
    auxiliary=(
        # LLMSummarizingCondenser: the events to forget as text, without tools; the agent's next request has the summary in
        # their place, as a user's message.
        Auxiliary("compaction", system=r"\AYou are maintaining a context-aware state summary", tools=False),
    ),
)
