"""How a trial ends, and what that does to its sequence. Pure.

Promises:
- every reason has a class: `infra` (the world failed: the attempt says nothing about the policy, and is never trained and
  never a reward of 0) or `model` (the policy's own end: verified, kept, with its reason);
- a source's `effects` decides what a `model` reason does: `train` (the default), `mask` (its reward counts in its group's
  baseline and pass rate, none of its tokens is trained) or `retry` (a new attempt, as if the world had failed);
- an infra reason is always `retry`, and `effects` may not name it. One is open to choice: `agent_killed`, which a policy
  that fills its memory brings about itself as well.

| what ended the agent | reason |
|---|---|
| the policy answered, submitted, or its program ended with status 0 | `completed` |
| the program ended with another status, or by a signal of its own (a crash), or wrote more than a workspace takes | `agent_crashed` |
| SIGKILL, status 137, or a status other than 0 after the kernel's out-of-memory kill | `agent_killed` |
| its seconds were over | `agent_timeout` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.harnesses.workspaces.base import Ended
from schemas.config import Effect

Class = Literal["infra", "model"]
_KILLED = 128 + 9


@dataclass(frozen=True, slots=True)
class Ending:
    """`says` is what happened, for people. `open`: whether `effects` may name it."""

    kind: Class
    says: str
    open: bool


def _model(says: str) -> Ending:
    return Ending("model", says, open=True)


def _infra(says: str, *, open: bool = False) -> Ending:
    return Ending("infra", says, open)


ENDINGS: Mapping[str, Ending] = {
    "completed": _model("the policy ended by itself"),
    "malformed": _model("the policy's last turn held a tool call that does not parse"),
    "max_turns": _model("behaviour.max_turns model calls were made"),
    "overlong": _model("a turn was cut at its length, or the context or the session's token limit was full"),
    "early_stop": _model("a rule of a penalty with stop flagged a turn, and no further turn was sampled"),
    "agent_timeout": _model("the agent's seconds were over while nobody owed it an answer"),
    "agent_crashed": _model(
        "the agent's program ended with a status other than 0, by a signal of its own, or for all that it wrote"
    ),
    "agent_killed": _infra("the agent was killed: SIGKILL, status 137, out of memory", open=True),
    "environment_failed": _infra("the sandbox did not start, or broke"),
    "environment": _infra("a tool of the environment broke"),
    "verifier_timeout": _infra("the verifier was stopped at its limit, also when it was run again"),
    "verifier_crashed": _infra("the verifier was killed, also when it was run again"),
    "no_reward": _infra("the verifier left no reward"),
    "bad_reward": _infra("the reward is no finite number"),
    "verifier": _infra("the verifier of an environment without a sandbox broke"),
    "cancelled": _infra("the host handed the trial back: the attempt has no verdict, and another begins"),
    "budget_spent": _infra("the sandbox's start left the agent no time"),
    "queue_spent": _infra("no host had a free slot within agent_loop.queue_s and the trial's budget"),
    "harness_timeout": _infra("no verdict within the trial's budget"),
    "harness_lost": _infra("the harness host that had the trial is gone"),
    "harness_error": _infra("the adapter raised what it should not"),
    "host_lost": _infra("the agent-loop host that had the session is gone"),
    "journal_damaged": _infra("a lost agent-loop host's journal cannot be read to its end"),
    "attempts_lost": _infra("every attempt's hosts were lost"),
    "engine_timeout": _infra("the agent's seconds were over while the engine owed it an answer"),
    "engine_unavailable": _infra("the engine failed, and the agent gave up"),
    "agent_loop_unreachable": _infra("the session URL could not be reached"),
    "session_lost": _infra("the session was gone while the agent worked"),
    "rule_failed": _infra("a penalty's rule raised, so that nobody knows what it flags"),
    "nothing_sampled": _infra("the agent ended without a turn"),
    "missing_reward": _infra("a verdict without reward and without failure"),
    "protocol": _infra("the proxy answered what the agent cannot read"),
    "bad_request": _infra("the proxy refused a request of the built-in agent"),
    "unknown_source": _infra("the host's configuration lacks the source"),
    "policy_version": _infra("the engine stayed behind the policy version that is wanted"),
    "store_unavailable": _infra("the payload could not be written"),
    "payload_exists": _infra("another payload stands under the attempt's key"),
    "routing_layers": _infra("the engine's routing has other layers than batch.pp_layers divides"),
    "image_missing": _infra("an image that a recovered session shows is not in the store"),
    "event_too_large": _infra("the finished sequence is no legal event"),
    "dead_letter": _infra("the dispatch was delivered too often"),
}
"""Every reason that the code gives, and `cancelled`, which no verdict has. An adapter may end with another legal name: it is of class model."""

REFUSALS: Mapping[str, str] = {
    "context_length_exceeded": "overlong",
    "max_sampled_tokens": "overlong",
    "max_turns": "max_turns",
    "max_requests": "max_turns",
    "max_wall_time": "agent_timeout",
    "early_stop": "early_stop",
}
"""What a session refuses a request for, by the code of its answer 400: how an agent ended that was told so."""


def effect(reason: str, effects: Mapping[str, Effect]) -> Effect:
    """What an end of that reason does to its sequence."""
    ending = ENDINGS.get(reason)
    if ending is None or ending.open:
        default: Effect = "retry" if ending is not None and ending.kind == "infra" else "train"
        return effects.get(reason, default)
    return "retry"


def refused_effects(effects: Mapping[str, Effect], *, own: bool = False) -> str:
    """What is wrong with a source's `effects`; empty when nothing is. `own`: the pool's adapter is not built in, so that
    it may end by reasons of its own."""
    for reason in effects:
        ending = ENDINGS.get(reason)
        if ending is not None and not ending.open:
            return f"effects names {reason!r}, which is infra ({ending.says}): such an attempt is always tried again; leave it out"
        if ending is None and not own:
            known = sorted(name for name, each in ENDINGS.items() if each.open)
            return f"effects names {reason!r}, which ends no agent; reasons: {', '.join(known)}"
    return ""


def termination(ended: Ended) -> str:
    """The reason by which a program that is the whole agent ended; its table is in the module's text."""
    if ended.stopped == "time":
        return "agent_timeout"
    if ended.stopped == "output":
        return "agent_crashed"
    if ended.returncode == 0:
        return "completed"
    return "agent_killed" if ended.oom or ended.returncode == _KILLED else "agent_crashed"
