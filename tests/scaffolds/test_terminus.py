"""Terminus 2 of Harbor: no tools, no system text; keystrokes as JSON; a summary in three requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engines.base import EngineUnavailable
from tests.scaffolds.clients import terminus
from tests.scaffolds.played import played
from tests.scaffolds.plays import after, by_text
from tests.scaffolds.policy import Play, Policy, Scene, think
from tests.scaffolds.stage import Stage
from tests.scaffolds.wire import CUT, Wire, on_call


def keys(*commands: str, done: bool = False) -> str:
    """A turn that types the commands."""
    typed = [{"keystrokes": f"{command}\n", "duration": 0.1} for command in commands]
    return json.dumps({"analysis": "I look.", "plan": "Go on.", "commands": typed, "task_complete": done})


TURNS = (
    think("I should look.") + keys("cat a.txt"),
    keys("echo one", "echo two"),
    keys(done=True),
    keys(done=True),
)
SUMMARY = (
    ("You are about to hand off your work", "SUMMARY of it"),
    ("You are picking up work", "Is it so?"),
    ("The next agent has a few questions", "It is so."),
)


def in_turn(*turns: str) -> Play:
    def play(scene: Scene) -> str:
        return turns[min(scene.said, len(turns) - 1)]

    return play


@pytest.fixture(autouse=True)
def _terminus(installed: Callable[[str], None]) -> None:
    installed("terminus")
    if shutil.which("tmux") is None:
        pytest.skip("tmux is missing (Debian: tmux)")


async def test_a_session_is_one_context_of_the_sampled_tokens(tmp_path: Path) -> None:
    run = await played(terminus(), in_turn(*TURNS), tmp_path)
    assert run.statuses == [200, 200, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)
    assert "hello a" in run.text(0)


async def test_a_failed_call_is_repeated_and_leaves_nothing(tmp_path: Path) -> None:
    status = {2: 429, 4: 500}
    run = await played(terminus(), in_turn(*TURNS), tmp_path, lambda call: status.get(call.number + 1))
    assert run.statuses == [200, 429, 200, 500, 200, 200]
    assert run.trained(0) == list(TURNS)


async def test_a_lost_connection_gets_the_recorded_answer(tmp_path: Path) -> None:
    run = await played(terminus(), in_turn(*TURNS), tmp_path, on_call(2, CUT))
    assert len(run.policy.emissions) == len(run.wire.calls) - 1 == 4
    assert run.trained(0) == list(TURNS)


async def test_the_engine_s_trouble_is_tried_again(tmp_path: Path) -> None:
    def unavailable(stage: Stage, wire: Wire, policy: Policy) -> None:
        policy.trouble = {2: EngineUnavailable("no replica")}

    run = await played(terminus(), in_turn(*TURNS), tmp_path, prepare=unavailable)
    assert run.statuses == [200, 503, 200, 200, 200]
    assert run.trained(0) == list(TURNS)


async def test_the_three_requests_of_a_summary_are_told_from_the_agent_s_own(tmp_path: Path) -> None:
    """Overflow brings it on; the agent goes on with questions that it never asked in that dialogue."""
    more, done = keys("seq 1 30"), keys(done=True)
    play = by_text(SUMMARY, after("It is so.", in_turn(done), in_turn(more)))
    # It unwinds turns until 4,000 tokens are free, of the limit that it is told and by its own count.
    client = terminus(
        max_turns=40,
        proactive_summarization_threshold=0,
        model_info={"max_input_tokens": 5000, "max_output_tokens": 500},
    )
    run = await played(client, play, tmp_path, max_context=7000)
    assert run.statuses.count(400) == 1
    assert run.labels == ["main", "compacted", "summary", "summary"]
    assert set(run.trained(1)) == {done}
    assert sorted(run.trained(2) + run.trained(3)) == sorted(answer for _, answer in SUMMARY)
