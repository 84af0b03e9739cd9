"""Codex: the Responses protocol, after a WebSocket that is refused; compaction of its own kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engines.base import EngineUnavailable
from tests.scaffolds.clients import codex
from tests.scaffolds.played import played
from tests.scaffolds.plays import after, by_text, in_turn
from tests.scaffolds.policy import Policy, Scene, call, think
from tests.scaffolds.stage import Stage
from tests.scaffolds.wire import CUT, Wire, on_call

TURNS = (
    think("I should look.") + "Looking." + call("exec_command", cmd="cat a.txt"),
    call("exec_command", cmd="echo one") + call("exec_command", cmd="echo two"),
    "Done.",
)
COMPACT = ("You are performing a CONTEXT CHECKPOINT COMPACTION", "SUMMARY of it")


@pytest.fixture(autouse=True)
def _codex(installed: Callable[[str], None]) -> None:
    installed("codex")


async def test_a_session_is_one_context_of_the_sampled_tokens(tmp_path: Path) -> None:
    run = await played(codex(), in_turn(*TURNS), tmp_path)
    assert run.statuses == [200, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)
    assert "hello a" in run.text(0)


async def test_its_own_provider_falls_back_from_a_websocket_at_once(tmp_path: Path) -> None:
    run = await played(codex(builtin=True), in_turn(*TURNS), tmp_path)
    first, second = run.wire.exchanges[:2]
    assert (first.method, first.status, first.headers["upgrade"]) == ("GET", 426, "websocket")
    assert second.asks
    assert run.trained(0) == list(TURNS)


async def test_a_failed_call_is_repeated_and_leaves_nothing(tmp_path: Path) -> None:
    run = await played(codex(), in_turn(*TURNS), tmp_path, on_call(2, 500))
    assert run.statuses == [200, 500, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)


async def test_429_ends_the_run_with_its_tokens(tmp_path: Path) -> None:
    """It never repeats one; what was sampled before is kept."""
    run = await played(codex(), in_turn(*TURNS), tmp_path, on_call(2, 429), status=1)
    assert run.statuses == [200, 429]
    assert run.trained(0) == list(TURNS[:1])


async def test_the_engine_s_trouble_is_tried_again(tmp_path: Path) -> None:
    def unavailable(stage: Stage, wire: Wire, policy: Policy) -> None:
        policy.trouble = {2: EngineUnavailable("no replica")}

    run = await played(codex(), in_turn(*TURNS), tmp_path, prepare=unavailable)
    assert run.statuses == [200, 503, 200, 200]
    assert run.trained(0) == list(TURNS)


async def test_a_cut_stream_loses_nothing_and_samples_nothing_twice(tmp_path: Path) -> None:
    run = await played(codex(), in_turn(*TURNS), tmp_path, on_call(2, CUT))
    assert len(run.policy.emissions) == len(run.wire.calls) - 1 == 3
    assert run.trained(0) == list(TURNS)


async def test_what_came_whole_before_a_cut_is_history_and_trained_once(tmp_path: Path) -> None:
    """The next request has the items that were whole, the reasoning here, so that it is another one."""

    def later(stage: Stage, wire: Wire, policy: Policy) -> None:
        wire.patience = 8

    run = await played(codex(), in_turn(*TURNS), tmp_path, on_call(1, CUT), prepare=later)
    assert any(item["type"] == "reasoning" for item in run.wire.calls[1].body["input"])
    said = [text for i in range(len(run.labels)) for text in run.trained(i)]
    assert len(said) == len(run.policy.emissions) == len(run.wire.calls)
    assert said.count(TURNS[0]) == 1
    assert run.labels == ["main", "other"]


async def test_compaction_is_told_from_the_agent_s_own_turns(tmp_path: Path) -> None:
    big = call("exec_command", cmd="seq 1 3000")
    play = by_text([COMPACT], after("SUMMARY of it", in_turn("Done."), in_turn(big)))
    limits = {"model_context_window": "200000", "model_auto_compact_token_limit": "60000"}
    run = await played(codex(config=limits), play, tmp_path)
    assert set(run.statuses) == {200}
    assert run.labels == ["main", "compacted", "compaction"]
    assert run.trained(0)[0] == big
    assert run.trained(1) == ["Done."]
    assert run.trained(2) == ["SUMMARY of it"]


async def test_a_subagent_is_a_context_of_its_own(tmp_path: Path) -> None:
    """Its tools are in a namespace: the policy calls them by both names, Codex is sent them apart."""

    def play(scene: Scene) -> str:
        if "x-codex-parent-thread-id" in scene.headers:
            return (call("exec_command", cmd="echo one"), "Report one.")[scene.said]
        spawned = re.search(r'"agent_id":\s*"([^"]+)"', scene.last)
        wait = call("multi_agent_v1.wait_agent", targets=[spawned[1] if spawned else ""])
        return (call("multi_agent_v1.spawn_agent", message="report one"), wait, "Done.")[scene.said]

    run = await played(codex(), play, tmp_path)
    assert run.labels == ["main", "subagent"]
    assert len(run.trained(0)) == 3
    assert run.trained(1) == [call("exec_command", cmd="echo one"), "Report one."]
    assert "Report one." in run.text(0)


async def test_overflow_ends_the_run_at_once(tmp_path: Path) -> None:
    play = in_turn(call("exec_command", cmd="seq 1 3000"))
    run = await played(codex(), play, tmp_path, max_context=60_000, status=1)
    assert run.statuses[-1] == 400
    assert run.statuses.count(400) == 1
    assert run.labels == ["main"]
