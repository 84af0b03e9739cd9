"""Scripts for the policy double. A play looks at the scene alone, so that a retry gets what the first try would have got."""

from __future__ import annotations

from collections.abc import Sequence

from tests.capture_parts import Reply
from tests.scaffolds.policy import Play, Scene


def in_turn(*turns: str, aside: str = "An aside.") -> Play:
    """The turns one after the other, the last one again and again; `aside` for requests that offer no tools."""

    def play(scene: Scene) -> str:
        return turns[min(scene.said, len(turns) - 1)] if scene.tools else aside

    return play


def by_text(asides: Sequence[tuple[str, str]], otherwise: Play) -> Play:
    """The answer of the first whose text is in the scene's last turn."""

    def play(scene: Scene) -> Reply:
        return next((answer for mark, answer in asides if mark in scene.last), None) or otherwise(scene)

    return play


def after(mark: str, then: Play, before: Play) -> Play:
    """`then` once the mark stands in the dialogue's text, system text aside."""

    def play(scene: Scene) -> Reply:
        told = any(mark in text for role, text in scene.turns if role != "system")
        return (then if told else before)(scene)

    return play
