"""Batches: what goes in, how it is balanced, when it yields, and the rows of each window. Decisions without I/O."""
