"""Which provider makes the workspaces: ours by its name, or one of Harbor's by `harbor:` and its name there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.harnesses.workspaces.base import Workspaces

KINDS = "overlay, or harbor:NAME with one of Harbor's environments: harbor:docker, harbor:daytona, ..."


def workspaces(kind: str, options: Mapping[str, Any]) -> Workspaces:
    """The provider of a kind. Raises ValueError for a kind that is none of `KINDS`, for options that it does not know,
    and for one whose package is not installed here."""
    provider, _, name = kind.partition(":")
    if kind == "overlay":
        from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces

        if options:
            raise ValueError(f"overlay workspaces take no options, and were given {sorted(options)}")
        return OverlayWorkspaces()
    if provider == "harbor" and name:
        from pipeline.harnesses.workspaces.harbor_environments import HarborEnvironments

        return HarborEnvironments(name, options)
    raise ValueError(f"there are no workspaces {kind!r}: it is {KINDS}")
