"""Makes what a configuration names as `module:name`, as a host would, and says what came of it.

A program of its own, run by `services.cli.check`: importing other people's code may start threads, print, or end the
process. It reads a JSON list of `Asked` from stdin and writes one answer each: null, or what is wrong in one line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.rules import UnknownRules, load_rules
from pipeline.graders.base import UnknownGrader
from pipeline.graders.base import make as make_grader
from pipeline.harnesses.base import UnknownHarness, resolve
from pipeline.harnesses.environments.base import UnknownEnvironment, make_environment
from pipeline.signal import hooks
from pipeline.signal import rules as penalty_rules
from pipeline.signal.chain_faults import chain_faults
from schemas.config import Behaviour, Environment, RunConfig


@dataclass(frozen=True)
class Asked:
    """`kind` is harness, rules, environment, grader, source, whose name is its harness, renderer, whose name is a policy's
    directory, hook, rule (of a penalty), or chain, whose name is a source; `settings` is an environment's section, a harness's,
    hook's or rule's options, both and a behaviour for a source, what `load_renderer` takes beside the directory, or the configuration of a chain."""

    kind: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    """The interpreter that is asked, where it is not ours."""


def problem(asked: Asked) -> str | None:
    """What is wrong with it, in one line; None when nothing is."""
    try:
        match asked.kind:
            case "harness":
                resolve(asked.name, asked.settings)
            case "source":
                return _source(asked)
            case "rules":
                load_rules(asked.name)
            case "renderer":
                load_renderer(asked.name, **asked.settings)
            case "hook":
                hooks.resolve(asked.name, asked.settings)
            case "chain":
                config = RunConfig.model_validate(asked.settings["config"])
                return _line("; ".join(chain_faults(config, config.source(asked.name)))) or None
            case "rule":
                penalty_rules.resolve(asked.name, asked.settings)
            case "environment":
                make_environment(Environment.model_validate(asked.settings))
            case "grader":
                make_grader(asked.name, asked.settings)
            case _:
                raise ValueError(f"nothing is of kind {asked.kind!r}")
    except (
        UnknownGrader,
        UnknownHarness,
        UnknownRules,
        UnknownEnvironment,
        TemplateError,
        hooks.BadHook,
        penalty_rules.BadRule,
    ) as error:
        return _line(str(error))
    except ValidationError as error:
        return refused(f"{asked.kind} {asked.name!r}", error)
    # Whatever it raises, a host would die of it.
    except (Exception, SystemExit) as error:
        return _line(f"{asked.kind} {asked.name!r} cannot be used: {type(error).__name__}: {error}")
    return None


def _source(asked: Asked) -> str | None:
    """What the environment says to its options, and the harness to the source. That either is no such thing is told where
    it is named."""
    try:
        check = getattr(resolve(asked.name, asked.settings["options"]), "check", None)
    except (Exception, SystemExit):
        return None
    given = Environment.model_validate(asked.settings["environment"])
    if ":" in given.kind and check is None:
        return None
    try:
        environment = make_environment(given)
    except (Exception, SystemExit) as error:
        return None if ":" in given.kind else _line(f"environment.kind {given.kind!r}: {error}")
    try:
        if check is not None:
            check(environment, Behaviour.model_validate(asked.settings["behaviour"]))
    except ValueError as error:
        return _line(str(error))
    return None


def refused(what: str, error: ValidationError) -> str:
    """A model's faults in one line: `environment.kind 'calculator' refuses options low: ...`."""
    said = "; ".join(
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}" if one["loc"] else one["msg"]
        for one in error.errors(include_url=False, include_context=False)
    )
    return _line(f"{what} refuses its options: {said}")


def _line(text: str) -> str:
    return " ".join(text.split())[:1000]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints is no answer
    asked = [Asked(**one) for one in json.load(sys.stdin)]
    json.dump([problem(one) for one in asked], answers)
    answers.flush()
    os._exit(0)  # a module's threads do not keep us


if __name__ == "__main__":
    main()
