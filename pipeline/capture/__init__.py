"""Capture: from agents' HTTP dialogues to token sequences that an engine sampled."""
