"""Engines: the token-in/token-out wire, its client, and a small engine of our own."""
