"""Harnesses: the environment side of a rollout. An adapter drives an agent against a session URL and knows no tokens."""
