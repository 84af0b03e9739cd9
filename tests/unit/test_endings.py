"""How trials end and what that does: the table, a source's choice, and the clock that the phases share. Pure."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.harnesses import endings
from pipeline.harnesses.base import Phases
from pipeline.harnesses.clock import Clock, clocked, close_s
from pipeline.harnesses.endings import ENDINGS, REFUSALS, effect, refused_effects, termination
from pipeline.harnesses.environments.folders import FolderTask
from pipeline.harnesses.workspaces.base import Ended
from schemas.config import Effect, Timeouts
from schemas.facts import Failure, SequenceVerified
from schemas.names import checked_name
from services.agent_loop.judge import Result, judge
from services.harness.host import agent_s, budget_left, phases

ROOT = Path(__file__).parents[2]


def test_every_reason_is_a_legal_name_and_an_infra_reason_is_never_trained() -> None:
    for reason, ending in ENDINGS.items():
        assert checked_name(reason, "reason") == reason
        assert effect(reason, {}) == ("retry" if ending.kind == "infra" else "train"), reason
        for chosen in ("train", "mask", "retry"):
            given_: dict[str, Effect] = {reason: chosen}
            assert effect(reason, given_) == (chosen if ending.open else "retry"), reason
    assert effect("solved_by_hand", {}) == "train", "an adapter's own"


def test_every_infra_reason_that_the_code_gives_is_in_the_table() -> None:
    """A reason that is not would be taken for the policy's own."""
    found: set[str] = set()
    for folder in ("pipeline/harnesses", "services/harness", "services/agent_loop"):
        for file in sorted(set((ROOT / folder).rglob("*.py")) - {Path(endings.__file__)}):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "id", "")
                if name in ("InfraFailure", "VerifierFailed", "_infra") and node.args:
                    found |= {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
                elif name == "Failure":
                    found |= {
                        str(k.value.value)
                        for k in node.keywords
                        if k.arg == "reason" and isinstance(k.value, ast.Constant)
                    }
    assert len(found) > 25
    assert {reason for reason in found if ENDINGS.get(reason, ENDINGS["completed"]).kind != "infra"} == set()


def test_the_table_is_in_the_documents_with_class_and_effect() -> None:
    text = (ROOT / "docs" / "harnesses.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (infra|model) \| (\w+) \| ", text, re.MULTILINE)
    assert rows == [(reason, each.kind, effect(reason, {})) for reason, each in ENDINGS.items()]


def test_effects_that_name_what_cannot_be_chosen_are_refused_by_name() -> None:
    assert refused_effects({}) == ""
    assert refused_effects({"agent_timeout": "mask", "overlong": "retry", "agent_killed": "train"}) == ""
    assert "environment_failed" in refused_effects({"environment_failed": "train"}, own=True)
    assert "'agent_timeuot'" in (said := refused_effects({"agent_timeuot": "mask"}))
    assert "agent_timeout" in said, "the remedy"
    assert refused_effects({"gave_up": "mask"}, own=True) == "", "an adapter of one's own ends as it likes"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Ended(0, b"", b""), "completed"),
        (Ended(0, b"", b"", oom=True), "completed"),  # a command of the agent's was killed, and it went on
        (Ended(1, b"", b""), "agent_crashed"),
        (Ended(139, b"", b""), "agent_crashed"),
        (Ended(137, b"", b""), "agent_killed"),
        (Ended(1, b"", b"", oom=True), "agent_killed"),
        (Ended(137, b"", b"", stopped="time"), "agent_timeout"),
        (Ended(137, b"", b"", stopped="output"), "agent_crashed"),  # its own doing
    ],
)
def test_the_exit_of_an_agents_program_has_a_reason(ended: Ended, reason: str) -> None:
    assert termination(ended) == reason


def verdict(termination_: str, reward: float = 1.0) -> SequenceVerified:
    return SequenceVerified(
        source="s",
        sample="s-0",
        sequence="s-0-0",
        attempt=1,
        host="h",
        reward=reward,
        termination=termination_,
    )


def judged(
    termination_: str, effects: dict[str, Effect], refused: str = "", malformed: bool = False
) -> Result:
    return judge(
        verdict(termination_), turns=2, owed=False, malformed=malformed, refused=refused, effects=effects
    )


def test_an_end_whose_effect_is_retry_is_a_failure_of_the_world() -> None:
    for reason, effects in (("agent_killed", {}), ("agent_crashed", {"agent_crashed": "retry"})):
        result = judged(reason, effects)  # type: ignore[arg-type]
        assert isinstance(result.failure, Failure)
        assert (result.failure.kind, result.failure.reason) == ("infra", reason)
    assert judged("environment_failed", {}).failure is not None, "an adapter that says so in a verdict"


def test_an_end_whose_effect_is_train_or_mask_keeps_its_reward_and_reason() -> None:
    for chosen in ("train", "mask"):
        for reason in ("agent_timeout", "agent_killed", "completed", "solved_by_hand"):
            assert judged(reason, {reason: chosen}) == Result(None, 1.0, reason)  # type: ignore[dict-item]
    assert judged("agent_crashed", {}) == Result(None, 1.0, "agent_crashed"), "verified: the work may be done"


def test_a_program_that_the_session_refused_ended_for_that() -> None:
    for code, reason in REFUSALS.items():
        assert judged("agent_crashed", {}, refused=code).termination == reason
        assert judged("completed", {}, refused=code, malformed=True).termination == reason
    assert judged("agent_timeout", {}, refused="max_turns").termination == "agent_timeout"
    assert judged("completed", {}, refused="bad_request").termination == "completed"
    assert judged("completed", {}, malformed=True).termination == "malformed"
    assert judged("completed", {"max_turns": "retry"}, refused="max_turns").failure is not None


LIMITS = st.one_of(st.just(0.0), st.floats(0.01, 10_000))


@given(
    left=st.floats(0, 100_000),
    source=st.tuples(LIMITS, LIMITS, LIMITS),
    task=st.tuples(LIMITS, LIMITS, LIMITS),
    late=st.floats(0, 1),
)
def test_phases_do_not_add_up_past_the_budget_and_the_verifier_keeps_its_seconds(
    left: float, source: tuple[float, float, float], task: tuple[float, float, float], late: float
) -> None:
    start, agent, verify = source
    limits = phases(Timeouts(start_s=start, agent_s=agent, verify_s=verify))
    clock = Clock(limits, FolderTask(0, "", "", start_s=task[0], agent_s=task[1], verify_s=task[2]))
    started = left - late * clock.start_s(left)
    assert clock.start_s(left) <= left
    worst = started - clock.agent_s(started) - clock.slack_s(started)
    kept = min(verify or task[2] or math.inf, started / 2)
    if kept < started / 2 or verify or task[2]:
        assert worst - close_s(started) >= kept * 0.999 - 1e-9, "the agent's lateness is its own"
    assert worst >= -1e-9
    assert clock.verify_s(worst - close_s(worst)) <= worst + 1e-9
    if agent and agent < started / 4:
        assert clock.agent_s(started) == agent, "a limit that fits is kept to the second"


def test_a_sources_limits_go_before_the_tasks() -> None:
    task = FolderTask(0, "", "", start_s=10, agent_s=20, verify_s=30)
    own = Clock(phases(Timeouts()), task)
    assert (own.start_s(1000), own.agent_s(1000), own.verify_s(1000)) == (10, 20, 30)
    source = Clock(phases(Timeouts(start_s=1, agent_s=200, verify_s=3)), task)
    assert (source.start_s(1000), source.agent_s(1000), source.verify_s(1000)) == (1, 200, 3)
    nobody = Clock(Phases(math.inf, math.inf, math.inf), FolderTask(0, "", ""))
    assert nobody.start_s(1000) == 60
    assert 700 < nobody.agent_s(1000) < 800


def test_a_trials_budget_counts_from_when_a_host_takes_it() -> None:
    assert budget_left(60, 600, 0) == budget_left(60, 600, 599) == 60
    assert budget_left(60, 600, 630) == 30, "the agent-loop host waits for so long"
    assert budget_left(60, 600, 660) == 0
    assert budget_left(60, 600, 661) < 0


def test_without_a_sandbox_the_agent_has_what_the_verifier_does_not_need() -> None:
    assert agent_s(phases(Timeouts()), 100) == 80
    assert agent_s(phases(Timeouts(verify_s=5)), 100) == 95
    assert agent_s(phases(Timeouts(verify_s=500)), 100) == 50
    assert agent_s(phases(Timeouts(agent_s=7)), 100) == 7


def test_a_phase_that_fails_has_its_seconds_too() -> None:
    took: dict[str, float] = {}
    with pytest.raises(ValueError, match="x"), clocked(took, "agent"):
        raise ValueError("x")
    assert took["agent"] >= 0
