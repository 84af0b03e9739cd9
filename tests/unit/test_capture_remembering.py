"""A host renders a preamble once, and what it renders is what the renderer renders."""

from __future__ import annotations

import pytest

from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Message, Tool
from pipeline.capture.renderers import remembering
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.renderers.remembering import Remembering
from tests.capture_parts import byte_level_renderer

TOOLS = (Tool("f", "does f", {"type": "object"}),)
TURNS = (Message("user", "q"), Message("assistant", "a"), Message("user", "more"))


@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("system", [None, "", "be brief"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_it_renders_what_the_renderer_renders(
    tools: tuple[Tool, ...], system: str | None, first: int
) -> None:
    plain = byte_level_renderer()
    kept = Remembering(plain)
    opening = () if system is None else (Message("system", system),)
    dialogue = Dialogue((*opening, *TURNS), tools)
    for _ in range(2):
        assert kept.steps(dialogue, first) == plain.steps(dialogue, first)


def test_a_preamble_is_rendered_once_and_the_few_used_last_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str | None] = []
    preamble = ChatMLRenderer.preamble

    def counted(self: ChatMLRenderer, tools: tuple[Tool, ...], system: str | None) -> list[int]:
        rendered.append(system)
        return preamble(self, tools, system)

    monkeypatch.setattr(ChatMLRenderer, "preamble", counted)
    monkeypatch.setattr(remembering, "_KEPT", 2)
    kept = Remembering(byte_level_renderer())
    for system in ("one", "two", "one", "three", "one", "two"):
        kept.steps(Dialogue((Message("system", system), *TURNS)), 0)
    assert rendered == ["one", "two", "three", "two"]
