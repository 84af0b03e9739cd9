"""Claude Code: subagents at once with their parent, compaction in the middle, retries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engines.base import EngineUnavailable
from tests.scaffolds.clients import claude_code
from tests.scaffolds.played import played
from tests.scaffolds.plays import after, by_text, in_turn
from tests.scaffolds.policy import Policy, Scene, call, think
from tests.scaffolds.stage import Stage
from tests.scaffolds.wire import CUT, Wire, on_call

TURNS = (
    think("I should look.") + "Looking." + call("Bash", command="cat a.txt"),
    call("Read", file_path="a.txt") + call("Bash", command="echo two"),
    "Done.",
)
COMPACT = "Respond with TEXT ONLY"


@pytest.fixture(autouse=True)
def _claude(installed: Callable[[str], None]) -> None:
    installed("claude-code")


async def test_a_session_is_one_context_of_the_sampled_tokens(tmp_path: Path) -> None:
    run = await played(claude_code(), in_turn(*TURNS), tmp_path)
    assert run.statuses == [200, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)
    assert "hello a" in run.text(0)


async def test_the_attribution_header_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    run = await played(claude_code(CLAUDE_CODE_ATTRIBUTION_HEADER="1"), in_turn(*TURNS), tmp_path)
    assert b"x-anthropic-billing-header" in run.wire.calls[0].raw
    assert "x-anthropic-billing-header" not in run.text(0)
    assert run.labels == ["main"]


@pytest.mark.parametrize("status", [429, 500, 529])
async def test_a_failed_call_is_repeated_and_leaves_nothing(status: int, tmp_path: Path) -> None:
    run = await played(claude_code(), in_turn(*TURNS), tmp_path, on_call(2, status))
    assert run.statuses == [200, status, 200, 200]
    assert run.labels == ["main"]
    assert run.trained(0) == list(TURNS)


async def test_the_engine_s_trouble_is_tried_again(tmp_path: Path) -> None:
    def unavailable(stage: Stage, wire: Wire, policy: Policy) -> None:
        policy.trouble = {2: EngineUnavailable("no replica")}

    run = await played(claude_code(), in_turn(*TURNS), tmp_path, prepare=unavailable)
    assert run.statuses == [200, 529, 200, 200]
    assert run.trained(0) == list(TURNS)


async def test_a_cut_stream_loses_nothing_and_samples_nothing_twice(tmp_path: Path) -> None:
    run = await played(claude_code(), in_turn(*TURNS), tmp_path, on_call(2, CUT))
    assert len(run.policy.emissions) == len(run.wire.calls) - 1 == 3
    assert run.trained(0) == list(TURNS)


async def test_subagents_at_once_are_contexts_of_their_own(tmp_path: Path) -> None:
    # In the foreground: the results come with the parent's next request, whichever agent is the first to end.
    kind = {"subagent_type": "general-purpose", "run_in_background": False}
    spawn = [call("Agent", description="look", prompt=f"report {which}", **kind) for which in ("one", "two")]

    def play(scene: Scene) -> str:
        if "x-claude-code-agent-id" not in scene.headers:
            return ("".join(spawn), "Done.")[scene.said]
        which = "one" if "report one" in scene.first else "two"
        return (call("Bash", command=f"echo {which}"), f"Report {which}.")[scene.said]

    run = await played(claude_code(), play, tmp_path)
    assert run.labels == ["main", "subagent", "subagent"]
    assert run.trained(0) == ["".join(spawn), "Done."]
    assert sorted(run.trained(1) + run.trained(2)) == sorted(
        [call("Bash", command="echo one"), "Report one.", call("Bash", command="echo two"), "Report two."]
    )
    agents = {call.headers.get("x-claude-code-agent-id") for call in run.wire.calls}
    assert len(agents) == 3
    assert "Report one." in run.text(0)
    assert "Report two." in run.text(0)


async def test_compaction_is_told_from_the_agent_s_own_turns(tmp_path: Path) -> None:
    big = call("Bash", command="seq 1 5000")
    play = after("SUMMARY of it", in_turn("Done."), in_turn(big))
    play = by_text([(COMPACT, "<analysis>x</analysis><summary>SUMMARY of it</summary>")], play)
    run = await played(claude_code(CLAUDE_CODE_AUTO_COMPACT_WINDOW="100000"), play, tmp_path)
    assert set(run.statuses) == {200}
    assert run.labels == ["main", "compacted", "compaction"]
    assert run.trained(0)[0] == big
    assert run.trained(1) == ["Done."]
    assert "SUMMARY of it" in run.trained(2)[0]


async def test_overflow_is_told_once_and_compacted(tmp_path: Path) -> None:
    """It knows overflow by Anthropic's words: any other 400 it repeats six times, with tools added and fields dropped."""

    def ruled(stage: Stage, wire: Wire, policy: Policy) -> None:
        # A first message that is long: when it compacts in need, it leaves that out.
        (stage.work / "CLAUDE.md").write_text("A rule of the house.\n" * 1500)

    big = call("Bash", command="seq 1 4000")
    play = after("SUMMARY of it", in_turn("Done."), in_turn(big, "Done."))
    play = by_text([(COMPACT, "<analysis>x</analysis><summary>SUMMARY of it</summary>")], play)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    roomy = await played(claude_code(), play, tmp_path / "1", prepare=ruled)
    last = len(roomy.policy.emissions[-1].prompt)
    run = await played(claude_code(), play, tmp_path / "2", prepare=ruled, max_context=last - 500)
    assert run.statuses == [200, 400, 200, 200]
    assert run.labels == ["main", "compacted", "compaction"]
    assert run.trained(1) == ["Done."]


async def test_overflow_that_no_compaction_cures_ends_the_run(tmp_path: Path) -> None:
    big = call("Bash", command="seq 1 5000")
    run = await played(claude_code(), in_turn(big), tmp_path, max_context=60_000, status=1)
    assert run.statuses == [200, 400, 400, 400]
    assert run.labels == ["main"]
