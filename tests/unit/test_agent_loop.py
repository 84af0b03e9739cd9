"""What an attempt comes to, as a pure function of the verdict and of what its session saw."""

from __future__ import annotations

import pytest

from pipeline.capture.recovery import Recovered
from schemas.config import Behaviour
from schemas.facts import Failure, SequenceVerified
from services.agent_loop.judge import Result, judge, judge_recovered


def verdict(
    reward: float | None = 1.0, termination: str = "completed", failure: Failure | None = None
) -> SequenceVerified:
    return SequenceVerified(
        source="s",
        sample="s-0",
        sequence="s-0-0",
        attempt=1,
        host="h",
        reward=reward,
        termination=termination,
        failure=failure,
    )


LOST = Failure(kind="infra", reason="harness_lost")


@pytest.mark.parametrize(
    ("given", "turns", "owed", "malformed", "expected"),
    [
        (verdict(), 2, False, False, Result(None, 1.0, "completed")),
        (verdict(0.0, "max_turns"), 4, False, False, Result(None, 0.0, "max_turns")),
        (verdict(0.0, "agent_timeout"), 1, False, False, Result(None, 0.0, "agent_timeout")),
        (verdict(0.0), 1, False, True, Result(None, 0.0, "malformed")),
        (verdict(0.0, "overlong"), 1, False, True, Result(None, 0.0, "overlong")),
        (verdict(None, "failed", LOST), 1, False, False, Result(LOST)),
    ],
)
def test_results(given: SequenceVerified, turns: int, owed: bool, malformed: bool, expected: Result) -> None:
    assert judge(given, turns=turns, owed=owed, malformed=malformed) == expected


@pytest.mark.parametrize(
    ("given", "turns", "owed", "reason"),
    [
        (None, 3, False, "harness_timeout"),
        (verdict(None), 1, False, "missing_reward"),
        (verdict(0.0, "agent_timeout"), 1, True, "engine_timeout"),
        (verdict(0.0, "overlong"), 0, False, "nothing_sampled"),
    ],
)
def test_what_is_not_the_policys_doing_is_infra(
    given: SequenceVerified | None, turns: int, owed: bool, reason: str
) -> None:
    result = judge(given, turns=turns, owed=owed, malformed=False)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.reason) == ("infra", reason)


def recovered(finish: str | None, turns: int = 2, malformed: int = 0) -> Recovered:
    return Recovered(turns=turns, finish=finish, malformed=malformed)  # pyright: ignore[reportArgumentType]  # a Finish


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        (verdict(), recovered("stop"), Result(None, 1.0, "completed")),
        (verdict(), recovered("stop", malformed=1), Result(None, 1.0, "malformed")),
        (verdict(0.0, "max_turns"), recovered("tool_calls", 4), Result(None, 0.0, "max_turns")),
        (verdict(0.0, "overlong"), recovered("length"), Result(None, 0.0, "overlong")),
    ],
)
def test_an_attempt_whose_host_died_stands_when_its_end_was_recorded(
    given: SequenceVerified, found: Recovered, expected: Result
) -> None:
    assert judge_recovered(given, found, Behaviour(max_turns=4)) == expected


@pytest.mark.parametrize(
    ("given", "found", "reason"),
    [
        (None, recovered("stop"), "harness_timeout"),
        (verdict(None, "failed", LOST), recovered("stop"), "harness_lost"),
        (verdict(), recovered("tool_calls"), "host_lost"),
        (verdict(0.0, "max_turns"), recovered("tool_calls", 3), "host_lost"),
        (verdict(0.0, "agent_timeout"), recovered("stop"), "host_lost"),
        (verdict(0.0, "overlong"), recovered("tool_calls"), "host_lost"),
        (verdict(), recovered(None, 0), "nothing_sampled"),
        (verdict(), recovered(None, 1), "host_lost"),
    ],
)
def test_an_agent_that_missed_its_hosts_answer_is_infra(
    given: SequenceVerified | None, found: Recovered, reason: str
) -> None:
    failure = judge_recovered(given, found, Behaviour(max_turns=4)).failure
    assert failure is not None
    assert (failure.kind, failure.reason) == ("infra", reason)
