"""The `packtrain` command: starts a run, supervises its processes, and shows what they did."""
