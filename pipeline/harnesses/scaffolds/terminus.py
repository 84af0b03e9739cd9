"""Terminus 2 of Harbor 0.26.0. It has no tools, no system text and no header: its own texts tell its requests apart."""

from pipeline.capture.rules import Auxiliary, Rules

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
