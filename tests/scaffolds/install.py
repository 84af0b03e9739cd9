"""The scaffolds that tests drive, in the project's own folder: `packtrain scaffolds install` puts them there."""

from __future__ import annotations

from pathlib import Path

from pipeline.harnesses.scaffolds import NAMES, scaffold
from pipeline.harnesses.scaffolds.install import Unavailable, ensure, installed

ROOT = Path(__file__).resolve().parents[2] / ".scaffolds"
SCAFFOLDS = {name: scaffold(name) for name in NAMES}
ALWAYS = ("pi", "mini-swe-agent")
"""Installed by whatever test needs them; the others' tests run where they are."""


def missing(name: str) -> str:
    """Why a scaffold cannot be played here; "" when it can. Raises Unavailable for one of ALWAYS."""
    if name in ALWAYS:
        try:
            ensure(name, ROOT)
        except Unavailable as error:
            raise Unavailable(f"{name} could not be installed: {error}") from error
    return "" if installed(SCAFFOLDS[name], ROOT) else f"{name} is not installed: run `make scaffolds`"
