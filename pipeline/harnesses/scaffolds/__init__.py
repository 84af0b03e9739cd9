"""Agent scaffolds: what capture is told of each one's requests (RULES), and how each is installed and started (SCAFFOLD), a
file a scaffold. Observed at the versions that they name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.harnesses.scaffolds.base import Scaffold

NAMES = ("claude-code", "openhands", "opencode", "terminus", "codex", "mini-swe-agent", "qwen", "pi")


class UnknownScaffold(ValueError):
    """A name that is no scaffold's."""


def scaffold(name: str) -> Scaffold:
    """The description of one of `NAMES`, written with - or with _. Raises UnknownScaffold."""
    found = name.replace("_", "-")
    if found not in NAMES:
        raise UnknownScaffold(f"there is no scaffold {name!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{found.replace('-', '_')}").SCAFFOLD
