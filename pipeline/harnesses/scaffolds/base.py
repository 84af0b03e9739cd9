"""What a scaffold is: an agent that somebody else wrote, run headless in a workspace against a session URL.

Promises:
- a description is data and a pure function: `launch` says which files, arguments and environment a job needs, and touches
  nothing;
- where a scaffold and its interpreter lie is the job's to say, so that one description serves every kind of sandbox;
- the session URL, which holds a secret, stands in files of the agent's own home, never in arguments, which the machine's
  other users can read; two scaffolds take it from their environment alone;
- an instruction is text: no option, no file name, whatever it begins with;
- what is set beside it keeps the client from the network (updates, telemetry, lists of models), which a workspace does not have,
  or shortens its waits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from schemas.config import Behaviour

Wire = Literal["chat", "messages", "responses"]
"""Protocols: OpenAI Chat Completions, Anthropic Messages, OpenAI Responses."""
Runtime = Literal["node", "python", ""]
MODEL = "policy"
"""The model's name, as scaffolds are told it; capture serves any."""


@dataclass(frozen=True, slots=True)
class Places:
    """Absolute paths as a program in the workspace writes them: the scaffold's folder, its interpreters (that of Python with
    its libraries), our drivers, and a home that only it has."""

    scaffold: str
    node: str
    python: str
    python_lib: str
    drivers: str
    home: str


@dataclass(frozen=True, slots=True)
class Job:
    """What one agent is to do. `url` ends with /v1; `context` and `output` are the model's limits in tokens; `settings`
    are the scaffold's own configuration, in its own words."""

    instruction: str
    url: str = field(repr=False)
    wire: str
    behaviour: Behaviour
    context: int
    output: int
    places: Places
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def bare_url(self) -> str:
        """Without /v1, as clients of Anthropic's protocol are given it."""
        return self.url.removesuffix("/v1")

    @property
    def base_url(self) -> str:
        """As LiteLLM and pi want it: bare for Anthropic's protocol alone."""
        return self.bare_url if self.wire == "messages" else self.url


@dataclass(frozen=True, slots=True)
class Launch:
    """How the agent is started. `files` are texts by their path in its home; `env` is beside what every program gets.
    `stdin` is the instruction, where no file has it: an argument has a limit, and may look like an option."""

    argv: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])


def by_python(at: Places, program: str, *arguments: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """argv and environment that run a module, or one of our drivers (`NAME.py`), with the scaffold's packages.

    A shared build finds its library by the path that it was built for; `start.py` takes the variable away again.
    """
    named = f"{at.drivers}/{program}" if program.endswith(".py") else program
    argv = (at.python, "-IS", f"{at.drivers}/start.py", at.scaffold, named, *arguments)
    return argv, {"LD_LIBRARY_PATH": at.python_lib}


def last_first(stdout: str) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines, the last first. Lines that are none are passed over: an output is cut anywhere."""
    for line in reversed(stdout.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield cast(dict[str, Any], found)


def no_fault(stdout: str) -> str:
    """For a scaffold whose exit status tells all."""
    return ""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """An agent at a pinned version.

    `wires`: the protocols that it speaks, the usual one first. `packages` of `registry` are pinned; `program` is the file
    that runs it, inside its folder, and `check` arguments that prove that it starts. `runtime`: the interpreter that it needs in
    the workspace. `fault`: what its standard output tells of a failure that its exit status hides, "" for none.
    `setting`: what `Job.settings` are in its words; "" where it has none.

    `without`: dependencies of PyPI packages that are imported only by what is not used here. `python`: the oldest that its
    packages run on. `native`: npm's optional dependencies are left out unless they hold the program itself. `commands`: what
    the workspace's own PATH must have.
    """

    name: str
    version: str
    wires: tuple[Wire, ...]
    packages: tuple[str, ...]
    program: str
    check: tuple[str, ...]
    registry: Literal["npm", "pypi"]
    runtime: Runtime
    launch: Callable[[Job], Launch]
    fault: Callable[[str], str] = no_fault
    setting: str = ""
    python: tuple[int, int] = (3, 11)
    without: tuple[str, ...] = ()
    native: bool = False
    commands: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of its folder among the others."""
        return f"{self.name}-{self.version}"
