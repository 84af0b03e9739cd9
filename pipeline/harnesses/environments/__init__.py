"""Environments: what the tasks of a source are, which tools they offer and how an outcome is verified."""
