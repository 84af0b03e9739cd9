"""A host: one process, one event loop, many tenants. Agent-loop hosts and harness hosts are both `hosts.host.Host`."""
