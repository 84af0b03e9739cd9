"""mini-swe-agent over LiteLLM, in all three protocols and never streaming: CI always plays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engines.base import EngineUnavailable
from tests.scaffolds.clients import mini_swe_agent
from tests.scaffolds.played import played
from tests.scaffolds.plays import in_turn
from tests.scaffolds.policy import Policy, Scene, call, think
from tests.scaffolds.stage import Stage
from tests.scaffolds.thorough import THOROUGH
from tests.scaffolds.wire import CUT, Wire, on_call

WIRES = ("chat", "responses", "messages")
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo fine")
TURNS = (
    think("I should look.") + "Looking." + call("bash", command="cat a.txt"),
    call("bash", command="echo one") + call("bash", command="echo two"),
    "I need no tool.",
)


@pytest.fixture(autouse=True)
def _mini(installed: Callable[[str], None]) -> None:
    installed("mini-swe-agent")


@pytest.mark.parametrize(
    "wire",
    [wire if wire == "chat" else pytest.param(wire, marks=THOROUGH) for wire in WIRES],
)
async def test_a_session_with_a_turn_that_the_agent_forgets(wire: str, tmp_path: Path) -> None:
    """An answer without a tool call never enters the history: the agent complains about it and asks again."""

    def play(scene: Scene) -> str:
        return SUBMIT if "Tool call error" in scene.last else TURNS[scene.said]

    run = await played(mini_swe_agent(wire), play, tmp_path)
    assert run.statuses == [200, 200, 200, 200]
    assert run.labels == ["main", "fork"]
    assert run.trained(0) == [*TURNS[:2], "I need no tool."]
    assert run.trained(1) == [SUBMIT]
    assert "hello a" in run.text(0)


async def test_a_failed_call_is_repeated_and_leaves_nothing(tmp_path: Path) -> None:
    status = {2: 429, 4: 500}
    run = await played(
        mini_swe_agent("chat"),
        in_turn(*TURNS[:2], SUBMIT),
        tmp_path,
        lambda call: status.get(call.number + 1),
    )
    assert run.statuses == [200, 429, 200, 500, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == [*TURNS[:2], SUBMIT]


@THOROUGH
async def test_a_lost_connection_gets_the_recorded_answer(tmp_path: Path) -> None:
    run = await played(mini_swe_agent("messages"), in_turn(*TURNS[:2], SUBMIT), tmp_path, on_call(2, CUT))
    assert len(run.wire.calls) == 4
    assert len(run.policy.emissions) == 3, "the turn that the client did not get was sampled again"
    assert run.trained(0) == [*TURNS[:2], SUBMIT]


@THOROUGH
async def test_the_engine_s_trouble_is_tried_again(tmp_path: Path) -> None:
    def unavailable(stage: Stage, wire: Wire, policy: Policy) -> None:
        policy.trouble = {2: EngineUnavailable("no replica")}

    play = in_turn(*TURNS[:2], SUBMIT)
    run = await played(mini_swe_agent("responses"), play, tmp_path, prepare=unavailable)
    assert run.statuses == [200, 503, 200, 200]
    assert run.trained(0) == [*TURNS[:2], SUBMIT]


@THOROUGH
@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_overflow_ends_the_run_at_once(wire: str, tmp_path: Path) -> None:
    """LiteLLM knows it by the protocols' own words, and the agent does not try again."""
    play = in_turn(call("bash", command="seq 1 2000"))
    run = await played(mini_swe_agent(wire), play, tmp_path, max_context=12_000, status=None)
    assert run.statuses == [200, 400]
    assert run.labels == ["main"]
