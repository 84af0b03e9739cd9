"""Names that tell whose a thing is: the living's are kept, the dead's are known, everybody else's are let alone."""

from __future__ import annotations

import subprocess
import sys

from pipeline.harnesses.workspaces.owners import orphaned, owned

OWNED = "import sys; from pipeline.harnesses.workspaces.owners import owned; print(owned('Trial_1'))"


def test_a_name_of_ours_is_no_orphan() -> None:
    assert not orphaned(owned("Trial-1"))
    assert owned("Trial-1").endswith("-trial-1")


def test_what_a_dead_process_named_is_one() -> None:
    command = [sys.executable, "-c", OWNED]
    name = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    assert name.startswith("packtrain-")
    assert orphaned(name)


def test_a_process_that_has_the_number_of_a_dead_one_does_not_own_its_things() -> None:
    _, pid, start, place, rest = owned("x").split("-", 4)
    assert orphaned(f"packtrain-{pid}-{int(start) + 1}-{place}-{rest}")


def test_names_of_another_place_or_nobody_are_let_alone() -> None:
    _, _, _, place, _ = owned("x").split("-", 4)
    there = "0" * 8 if place != "0" * 8 else "1" * 8
    for name in (
        f"packtrain-1-1-{there}-x",
        "packtrain-demo-1",
        f"other-1-1-{place}-x",
        f"packtrain-1-1-{place}-",
    ):
        assert not orphaned(name)
