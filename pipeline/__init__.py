"""The packtrain library: pure decisions over metadata, and thin adapters for the log, the store and the engines."""
