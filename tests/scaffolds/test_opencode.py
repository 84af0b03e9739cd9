"""OpenCode, in all three protocols: a title request beside the first turn, subagents, compaction without end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scaffolds.clients import opencode
from tests.scaffolds.played import played
from tests.scaffolds.plays import after, in_turn
from tests.scaffolds.policy import Policy, Scene, call, think
from tests.scaffolds.stage import Stage
from tests.scaffolds.wire import CUT, Exchange, Wire, on_call

WIRES = ("chat", "messages", "responses")
TURNS = (
    think("I should look.") + "Looking." + call("bash", command="cat a.txt", description="Look"),
    call("read", filePath="a.txt") + call("bash", command="echo two", description="Say two"),
    "Done.",
)
TITLE = "A title"
"""Asked for beside the first turn, before it or after: the third call is the second turn's."""


@pytest.fixture(autouse=True)
def _opencode(installed: Callable[[str], None]) -> None:
    installed("opencode")


@pytest.mark.parametrize("wire", WIRES)
async def test_a_session_is_one_context_and_its_title_none(wire: str, tmp_path: Path) -> None:
    run = await played(opencode(wire), in_turn(*TURNS, aside=TITLE), tmp_path)
    assert run.statuses == [200, 200, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)
    assert run.export.excluded == {"title": len(run.policy.turn(TITLE))}
    assert "hello a" in run.text(0)


async def test_a_title_is_kept_where_the_configuration_says_so(tmp_path: Path) -> None:
    run = await played(opencode("chat"), in_turn(*TURNS, aside=TITLE), tmp_path, exclude=())
    assert run.labels == ["main", "title"]
    assert run.trained(1) == [TITLE]


@pytest.mark.parametrize(("wire", "status"), [("chat", 429), ("messages", 529), ("responses", 500)])
async def test_a_failed_call_is_repeated_and_leaves_nothing(status: int, wire: str, tmp_path: Path) -> None:
    run = await played(opencode(wire), in_turn(*TURNS, aside=TITLE), tmp_path, on_call(3, status))
    assert run.statuses.count(status) == 1
    assert run.statuses.count(200) == 4
    assert run.trained(0) == list(TURNS)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_cut_stream_loses_nothing_and_samples_nothing_twice(wire: str, tmp_path: Path) -> None:
    run = await played(opencode(wire), in_turn(*TURNS, aside=TITLE), tmp_path, on_call(3, CUT))
    assert len(run.policy.emissions) == len(run.wire.calls) - 1 == 4
    assert run.trained(0) == list(TURNS)


async def test_subagents_at_once_are_contexts_of_their_own(tmp_path: Path) -> None:
    spawn = "".join(
        call("task", description="look", prompt=f"report {which}", subagent_type="general")
        for which in ("one", "two")
    )

    def play(scene: Scene) -> str:
        if not scene.tools:
            return TITLE
        if "x-parent-session-id" not in scene.headers:
            return (spawn, "Done.")[scene.said]
        which = "one" if "report one" in scene.first else "two"
        return (call("bash", command=f"echo {which}", description="Say"), f"Report {which}.")[scene.said]

    run = await played(opencode("chat"), play, tmp_path)
    assert run.labels == ["main", "subagent", "subagent"]
    assert run.trained(0) == [spawn, "Done."]
    assert {run.trained(1)[-1], run.trained(2)[-1]} == {"Report one.", "Report two."}
    assert "Report one." in run.text(0)


@pytest.mark.parametrize("wire", ["chat", "messages"])
async def test_overflow_is_told_once_and_compacted(wire: str, tmp_path: Path) -> None:
    big = call("bash", command="seq 1 6000", description="Count")
    play = after("SUMMARY of it", in_turn("Done."), in_turn(big, aside="SUMMARY of it"))
    # It goes on to the end and exits with 1 all the same.
    run = await played(opencode(wire), play, tmp_path, max_context=60_000, status=None)
    assert run.statuses.count(400) == 1
    assert run.labels == ["main", "compacted", "compaction"]
    assert run.trained(1) == ["Done."]


async def test_compaction_without_end_ends_with_the_session(tmp_path: Path) -> None:
    """When the summary does not fit either it compacts again, at once and for ever: 400 stops nothing, and neither does the
    turn budget, since the summary that it asks for is the same and is not sampled again. 410 does."""
    closing: list[asyncio.Task[None]] = []

    def closed(stage: Stage, wire: Wire, policy: Policy) -> None:
        def fault(exchange: Exchange) -> None:
            assert wire.session is not None
            if wire.statuses.count(400) == 4 and not closing:
                closing.append(asyncio.create_task(wire.session.close()))

        wire.fault = fault

    play = in_turn(call("bash", command="seq 1 6000", description="Count"), aside="x " * 2000)
    run = await played(
        opencode("chat"), play, tmp_path, max_context=30_000, prepare=closed, status=None, within=120
    )
    assert 410 in run.statuses
    assert run.statuses.count(410) <= 3
    assert len(run.policy.emissions) <= 4
