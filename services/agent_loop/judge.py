"""What an attempt comes to, from the harness's verdict and what its session saw. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.capture.recovery import Recovered
from schemas.config import Behaviour
from schemas.facts import Failure, SequenceVerified


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to: a failure of the world, or a reward with the reason why the agent ended."""

    failure: Failure | None
    reward: float = 0.0
    termination: str = "completed"


def judge(verdict: SequenceVerified | None, *, turns: int, owed: bool, malformed: bool) -> Result:
    """The result of an attempt from the harness's verdict and what its session saw. Pure.

    `turns`: recorded turns; `owed`: whether the engine owed the agent an answer; `malformed`: whether the last turn
    held a tool call that did not parse.
    """
    if verdict is None:
        return Result(
            Failure(kind="infra", reason="harness_timeout", detail="no verdict within the trial's budget")
        )
    if verdict.failure is not None:
        return Result(verdict.failure)
    if verdict.reward is None:
        return Result(
            Failure(
                kind="infra", reason="missing_reward", detail="the verdict has neither reward nor failure"
            )
        )
    if verdict.termination == "agent_timeout" and owed:
        # Turns are bounded in tokens, so an answer that is still owed is the engine's slowness, not the policy's.
        return Result(
            Failure(kind="infra", reason="engine_timeout", detail="the agent ran out of time in a model call")
        )
    if turns == 0:
        return Result(
            Failure(
                kind="infra",
                reason="nothing_sampled",
                detail=f"the agent ended ({verdict.termination}) without a turn",
            )
        )
    ended = "malformed" if malformed and verdict.termination == "completed" else verdict.termination
    return Result(None, verdict.reward, ended)


def judge_recovered(verdict: SequenceVerified | None, found: Recovered, behaviour: Behaviour) -> Result:
    """The result of an attempt whose host died, from what its journal holds.

    It stands only when the journal's end fits the verdict's: an agent that got a tool call as its last answer, and then
    ended, missed an answer that its host was not there to give.
    """
    if verdict is None:
        detail = f"its host died before the agent had ended, after {found.turns} turns"
        return Result(Failure(kind="infra", reason="host_lost", detail=detail))
    result = judge(verdict, turns=found.turns, owed=False, malformed=found.malformed > 0)
    if result.failure is not None:
        return result
    if not found.whole:
        detail = "its host died, and what is left of its journal is damaged: turns may be missing"
        return Result(Failure(kind="infra", reason="journal_damaged", detail=detail))
    fits = {
        "completed": found.finish in ("stop", "stop_sequence", "length"),
        "malformed": found.finish in ("stop", "stop_sequence"),
        "max_turns": found.turns >= behaviour.max_turns,
        "overlong": found.finish == "length",
    }
    if not fits.get(result.termination, False):
        detail = (
            f"its host died; the agent ended ({result.termination}) after an answer of finish {found.finish}"
        )
        return Result(Failure(kind="infra", reason="host_lost", detail=detail))
    return result
