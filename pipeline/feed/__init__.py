"""The feed: one sealed copy of a window, passed by file descriptor from its packer to its ranks.

Imports nothing here, so that the packer does not load what only a trainer needs.
"""
