"""What an environment is, and how one is made from its configuration.

Promises:
- `task(index)` is a pure function of (seed, options, index): every member of a group, every retry and every replay
  sees the same task;
- `call` and `verify` may block (they run programs); callers put them on a thread;
- a verifier that does not work raises `EnvironmentBroken`: its absence is never a reward of 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import schemas.config
from pipeline.capture.messages import Tool

BUILT_IN: Mapping[str, str] = {
    "arithmetic": "pipeline.harnesses.environments.arithmetic:Arithmetic",
    "calculator": "pipeline.harnesses.environments.calculator:Calculator",
    "harbor": "pipeline.harnesses.environments.harbor:HarborTasks",
}


class EnvironmentBroken(Exception):
    """The environment itself failed: an infra failure, whatever the policy did."""


class UnknownEnvironment(ValueError):
    """A kind that names no environment."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `prompt` is the user's text, `expected` the right final answer as text; agents never see it."""

    index: int
    prompt: str
    expected: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One executed tool call: `arguments` is the JSON text that the policy wrote; `ok` is whether the tool ran it."""

    name: str
    arguments: str
    output: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent left behind: the text of its last turn and the tool calls in order."""

    answer: str
    uses: tuple[ToolUse, ...] = ()


class Environment(Protocol):
    """Constructed as `Class(seed=..., options=...)`; raises pydantic's ValidationError on options it does not know."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools offered to the policy; none for a task answered by text."""
        ...

    def task(self, index: int) -> Task:
        """Task `index` >= 0; raises IndexError past the end of the distribution."""
        ...

    def call(self, task: Task, name: str, arguments: str) -> ToolUse:
        """Run one tool call. Bad names and arguments are answered to the policy as text with `ok` False."""
        ...

    def verify(self, task: Task, outcome: Outcome) -> float:
        """The reward; raises `EnvironmentBroken` when it cannot be told."""
        ...


def make_environment(config: schemas.config.Environment) -> Environment:
    """The environment that a source's configuration names; raises `UnknownEnvironment` with the built-in kinds."""
    target = BUILT_IN.get(config.kind, config.kind)
    module, _, name = target.partition(":")
    if not module or not name:
        raise UnknownEnvironment(
            f"environment.kind {config.kind!r} is neither one of {sorted(BUILT_IN)} nor of the form module:Class"
        )
    try:
        factory: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnknownEnvironment(f"environment.kind {config.kind!r} cannot be imported: {error}") from error
    return cast(Environment, factory(seed=config.seed, options=config.options))
