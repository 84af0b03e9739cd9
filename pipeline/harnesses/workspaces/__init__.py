"""Sandboxes in which an agent and its verifier run programs: one a trial."""
