"""Programs that environments run in the sandbox. Standard library only; each reads stdin and prints its result."""
