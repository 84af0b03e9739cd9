"""What a harness is: it drives an agent against a session URL and brings back a verdict.

Promises:
- a harness knows no tokens, no log and no store: it gets a `Trial` and returns a `Verdict`;
- it raises `InfraFailure` when the world failed, and returns a verdict, with its termination, when the policy did;
- one instance serves every trial of a host at once, so it keeps no state between them, and does not block: what may
  block goes through `pipeline.harnesses.blocking.on_thread`.

An adapter of your own is a class with `run`, named in a pool's `harness` as module:Class or by an entry point of the group
`packtrain.harnesses`. It is constructed with the pool's `options`, if there are any, else without arguments. It may have a
method `check(environment, behaviour)` that raises ValueError for a source that it cannot run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pipeline.harnesses.environments.base import Environment, Task
from pipeline.plugin import Kinds
from schemas.config import Behaviour
from schemas.names import checked_name

BUILT_IN: Mapping[str, str] = {
    "chat": "pipeline.harnesses.chat:ChatHarness",
    "tool": "pipeline.harnesses.tool:ToolHarness",
    "shell": "pipeline.harnesses.shell:ShellHarness",
    "harbor": "pipeline.harnesses.harbor:HarborHarness",
}
ENTRY_POINTS = "packtrain.harnesses"
"""Group of the entry points by which other packages name their adapters."""


class InfraFailure(Exception):
    """The trial says nothing about the policy. `reason` is short and countable: a legal name, or BadName is raised."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = checked_name(reason, "the reason of an infra failure")
        self.detail = detail


class UnknownHarness(ValueError):
    """A name that is no harness."""


KINDS = Kinds("harness", BUILT_IN, UnknownHarness, ENTRY_POINTS)


class Artefacts(Protocol):
    """Where a trial leaves what people want to look at later: a verifier's output, an agent's log."""

    async def save(self, name: str, data: bytes) -> None:
        """Keeps `data` in the store as artefact `name` of the attempt (a legal name, once); the verdict's event refers to it."""
        ...


class Nowhere:
    """Artefacts that nobody keeps: an adapter's trial by hand."""

    async def save(self, name: str, data: bytes) -> None:
        """Checks the name."""
        checked_name(name, "artefact")


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds that each phase of a trial may take, at most. All of them end within the trial's budget: who is late takes
    time from the agent, never from the verification."""

    start_s: float
    agent_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at one task. `session_url` holds a secret: it is not shown. `agent_s` is how many seconds the agent
    may take; verification has time of its own after that, inside the trial's budget.

    `name` is the attempt's id, `deadline` the end of its budget on `time.monotonic`'s clock. `phases` are the source's
    limits, for adapters that have a sandbox to start and a verifier to run; `took` gets what the phases took, and
    `peak_bytes` the sandbox's memory.
    """

    session_url: str = field(repr=False)
    behaviour: Behaviour
    environment: Environment
    task: Task
    agent_s: float
    name: str = "trial"
    deadline: float = math.inf
    phases: Phases = Phases(math.inf, math.inf, math.inf)
    artefacts: Artefacts = field(default_factory=Nowhere)
    took: dict[str, float] = field(default_factory=dict[str, float])
    peak_bytes: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Verdict:
    """`termination` is why the agent ended: completed, max_turns, overlong, agent_timeout, agent_crashed; any legal name."""

    reward: float
    termination: str = "completed"


class Harness(Protocol):
    async def run(self, trial: Trial) -> Verdict:
        """Raises `InfraFailure`."""
        ...


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Harness:
    """The harness of a built-in name, an entry point or `module:Class`; raises `UnknownHarness`, and what its constructor
    raises for options that it does not know (pydantic's ValidationError, by custom)."""
    factory: Any = KINDS.load(name)
    return cast(Harness, factory(options=dict(options)) if options else factory())
