"""Imports whose objects were in their store before them: another broker's log may use those, and nothing of them is removed."""

from __future__ import annotations

from pathlib import Path

from schemas.config import RunConfig

BORROWED = "borrowed-objects"
"""A file beside the record of such an import."""


def borrows(config: RunConfig) -> bool:
    """Whether the run is one; as far as its directory is here."""
    return bool(config.directory) and (Path(config.directory) / "runs" / config.run / BORROWED).exists()
