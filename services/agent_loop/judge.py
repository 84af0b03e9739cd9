"""What an attempt comes to, from the harness's verdict, what its session saw, and what the source says of such an end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.capture.recovery import Recovered
from pipeline.harnesses.endings import ENDINGS, REFUSALS, effect
from schemas.config import Behaviour, Effect
from schemas.facts import Failure, SequenceVerified


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to: a failure of the world, or a reward with the reason why the agent ended."""

    failure: Failure | None
    reward: float = 0.0
    termination: str = "completed"


_OWN_EXITS = frozenset({"completed", "agent_crashed"})
"""How a program ends that does not say what it ended for."""
_NO_EFFECTS: Mapping[str, Effect] = {}


def judge(
    verdict: SequenceVerified | None,
    *,
    turns: int,
    owed: bool,
    malformed: bool,
    refused: str = "",
    stopped: bool = False,
    broken: str = "",
    effects: Mapping[str, Effect] = _NO_EFFECTS,
) -> Result:
    """The result of an attempt from the harness's verdict and what its session saw. Pure.

    `turns`: recorded turns; `owed`: whether the engine owed the agent an answer; `malformed`: whether the last turn
    held a tool call that did not parse; `refused`: the code of the limit for which the session refused its newest request,
    by which the end of a program that does not tell it gets its name; `stopped`: whether a rule has ended the rollout;
    `broken`: why a rule could not judge it; `effects`: the source's.
    """
    if broken:
        return Result(Failure(kind="infra", reason="rule_failed", detail=broken[:2000]))
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
    if verdict.termination == "agent_crashed" and owed:
        # A program that gives up when it gets no answer exits as it does for a fault of its own.
        return Result(
            Failure(kind="infra", reason="engine_unavailable", detail="the agent ended without an answer")
        )
    if turns == 0:
        return Result(
            Failure(
                kind="infra",
                reason="nothing_sampled",
                detail=f"the agent ended ({verdict.termination}) without a turn",
            )
        )
    ended = verdict.termination
    if stopped and (ended not in ENDINGS or ENDINGS[ended].kind == "model"):
        # Whatever the agent made of it: the policy was not asked again.
        ended = "early_stop"
    elif ended in _OWN_EXITS and refused in REFUSALS:
        ended = REFUSALS[refused]
    elif ended == "completed" and malformed:
        ended = "malformed"
    if effect(ended, effects) == "retry":
        says = ENDINGS[ended].says if ended in ENDINGS else "the adapter gave this reason"
        return Result(Failure(kind="infra", reason=ended, detail=f"{says}; its effect is retry"))
    return Result(None, verdict.reward, ended)


def judge_recovered(
    verdict: SequenceVerified | None,
    found: Recovered,
    behaviour: Behaviour,
    effects: Mapping[str, Effect] = _NO_EFFECTS,
    *,
    stopped: bool = False,
) -> Result:
    """The result of an attempt whose host died, from what its journal holds.

    It stands only when the journal's end fits the verdict's: an agent that got a tool call as its last answer, and then
    ended, missed an answer that its host was not there to give.
    """
    if verdict is None:
        detail = f"its host died before the agent had ended, after {found.turns} turns"
        return Result(Failure(kind="infra", reason="host_lost", detail=detail))
    malformed = found.malformed > 0
    result = judge(
        verdict, turns=found.turns, owed=False, malformed=malformed, stopped=stopped, effects=effects
    )
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
        # It missed a refusal, no more.
        "early_stop": stopped,
    }
    if not fits.get(result.termination, False):
        detail = (
            f"its host died; the agent ended ({result.termination}) after an answer of finish {found.finish}"
        )
        return Result(Failure(kind="infra", reason="host_lost", detail=detail))
    return result
