"""Which provider makes the workspaces, and what is said of one that is not to be had here."""

from __future__ import annotations

import importlib.util

import pytest

from pipeline.harnesses.workspaces.choose import workspaces
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces


def test_ours_is_taken_by_its_name() -> None:
    assert isinstance(workspaces("overlay", {}), OverlayWorkspaces)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("", {}, "there are no workspaces '': it is overlay, or harbor:NAME"),
        ("docker", {}, "there are no workspaces 'docker': it is overlay, or harbor:NAME"),
        ("harbor", {}, "there are no workspaces 'harbor'"),
        ("overlay", {"network": "open"}, r"take no options, and were given \['network'\]"),
        ("harbor:docker", {"net": "open"}, "harbor:docker refuse their options: .*net"),
        ("harbor:docker", {"network": "half"}, "'closed' or 'open'"),
    ],
)
def test_a_wrong_kind_or_option_is_refused(kind: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){said}"):
        workspaces(kind, options)


@pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="Harbor is installed here")
def test_harbor_missing_is_told_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"packtrain\[harbor\].*Python 3\.12.*pool's `python`"):
        workspaces("harbor:docker", {})
