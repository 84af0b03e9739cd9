"""The contract: events, payload headers, plans and configuration. Pure data, no I/O, nothing of ours imported."""
