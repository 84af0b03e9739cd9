"""mini-swe-agent 2.4.6: one dialogue, no request but the agent's own, no header that names anything."""

from pipeline.capture.rules import Rules

RULES = Rules()
