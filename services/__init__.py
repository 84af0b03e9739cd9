"""Deployable services, one module each, and the command line that starts them."""
