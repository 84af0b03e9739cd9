"""What a harness is: it drives an agent against a session URL and brings back a verdict.

Promises:
- a harness knows no tokens, no log and no store: it gets a `Trial` and returns a `Verdict`;
- it raises `InfraFailure` when the world failed, and returns a verdict, with its termination, when the policy did;
- one instance serves every trial of a host at once, so it keeps no state between them, and does not block: what may
  block goes through `pipeline.harnesses.blocking.on_thread`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pipeline.harnesses.environments.base import Environment, Task
from schemas.config import Behaviour
from schemas.names import checked_name

BUILT_IN: Mapping[str, str] = {
    "chat": "pipeline.harnesses.chat:ChatHarness",
    "tool": "pipeline.harnesses.tool:ToolHarness",
}


class InfraFailure(Exception):
    """The trial says nothing about the policy. `reason` is short and countable: a legal name, or BadName is raised."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = checked_name(reason, "the reason of an infra failure")
        self.detail = detail


class UnknownHarness(ValueError):
    """A name that is no harness."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at one task. `session_url` holds a secret: it is not shown. `agent_s` is how many seconds the agent
    may take; verification has time of its own after that, inside the trial's budget."""

    session_url: str = field(repr=False)
    behaviour: Behaviour
    environment: Environment
    task: Task
    agent_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`termination` is why the agent ended: completed, max_turns, overlong, agent_timeout; any legal name."""

    reward: float
    termination: str = "completed"


class Harness(Protocol):
    async def run(self, trial: Trial) -> Verdict:
        """Raises `InfraFailure`."""
        ...


def resolve(name: str) -> Harness:
    """The harness of a built-in name or `module:Class` (constructed without arguments); raises `UnknownHarness`."""
    target = BUILT_IN.get(name, name)
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise UnknownHarness(
            f"harness {name!r} is neither one of {sorted(BUILT_IN)} nor of the form module:Class"
        )
    try:
        factory: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownHarness(f"harness {name!r} cannot be imported: {error}") from error
    return cast(Harness, factory())
