"""The OpenHands SDK over LiteLLM: reasoning dropped from history, a condenser that summarizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engines.base import EngineUnavailable
from tests.scaffolds.clients import openhands
from tests.scaffolds.played import played
from tests.scaffolds.plays import after, in_turn
from tests.scaffolds.policy import Policy, call, think
from tests.scaffolds.stage import Stage
from tests.scaffolds.wire import CUT, Wire, on_call

WIRES = ("chat", "messages", "responses")
FINISH = call("finish", message="Done.")
TURNS = (
    think("I should look.") + "Looking." + call("terminal", command="cat a.txt"),
    call("terminal", command="echo one") + call("file_editor", command="view", path="/etc/hostname"),
    FINISH,
)


@pytest.fixture(autouse=True)
def _openhands(installed: Callable[[str], None]) -> None:
    installed("openhands")


@pytest.mark.parametrize("wire", WIRES)
async def test_a_session_is_one_context_of_the_sampled_tokens(wire: str, tmp_path: Path) -> None:
    run = await played(openhands(wire), in_turn(*TURNS), tmp_path)
    assert run.statuses == [200, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)
    assert "hello a" in run.text(0)


async def test_a_failed_call_is_repeated_and_leaves_nothing(tmp_path: Path) -> None:
    status = {2: 429, 4: 500}
    run = await played(openhands("chat"), in_turn(*TURNS), tmp_path, lambda call: status.get(call.number + 1))
    assert run.statuses == [200, 429, 200, 500, 200]
    assert run.trained(0) == list(TURNS)


async def test_a_lost_connection_gets_the_recorded_answer(tmp_path: Path) -> None:
    run = await played(openhands("messages"), in_turn(*TURNS), tmp_path, on_call(2, CUT))
    assert len(run.policy.emissions) == len(run.wire.calls) - 1 == 3
    assert run.trained(0) == list(TURNS)


async def test_the_engine_s_trouble_is_tried_again(tmp_path: Path) -> None:
    def unavailable(stage: Stage, wire: Wire, policy: Policy) -> None:
        policy.trouble = {2: EngineUnavailable("no replica")}

    run = await played(openhands("responses"), in_turn(*TURNS), tmp_path, prepare=unavailable)
    assert run.statuses == [200, 503, 200, 200]
    assert run.trained(0) == list(TURNS)


async def test_condensation_is_told_from_the_agent_s_own_turns(tmp_path: Path) -> None:
    more = call("terminal", command="echo more")
    aside = "SUMMARY of it"
    play = after(aside, in_turn(FINISH, aside=aside), in_turn(more, aside=aside))
    client = openhands("chat", condense={"max_size": 6, "keep_first": 1})
    run = await played(client, play, tmp_path)
    assert set(run.statuses) == {200}
    assert run.labels == ["main", "compacted", "compaction"]
    assert run.trained(1) == [FINISH]
    assert run.trained(2) == [aside]


async def test_overflow_ends_the_run_without_a_storm(tmp_path: Path) -> None:
    play = in_turn(call("terminal", command="seq 1 5000"))
    run = await played(openhands("chat"), play, tmp_path, max_context=40_000, status=None)
    assert run.statuses[0] == 200
    assert run.statuses.count(400) == 1
