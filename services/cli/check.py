"""What a configuration names must be there: harnesses, environments, graders, a policy, addresses.

Promises:
- nothing is started, listened on or written, and no heavy package is imported;
- other people's code, `module:name` or an entry point's, is imported in a process of its own (`services.cli.plugins`), as a host would
  import it, never in this one;
- all faults are told at once, each with its place; whether a harness takes its sources is asked when there are none.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from pipeline.batch.arranging import budget_fault
from pipeline.capture.rules import LABELS, UnknownRules, load_rules
from pipeline.config import ConfigError, Override, load, place
from pipeline.engines.policies import BESIDE_WEIGHTS, PolicyMissing, policy_dir
from pipeline.feed.memory import too_small
from pipeline.graders import base as graders
from pipeline.harnesses import base as harnesses
from pipeline.harnesses.endings import refused_effects
from pipeline.harnesses.environments import base as environments
from pipeline.log.connection import BrokerUnavailable, check_address
from pipeline.store import ObjectStore, StoreError
from schemas.config import Engine, Environment, Grader, Pool, RunConfig
from schemas.config import Store as StoreConfig
from services.cli.check_hooks import check_hooks
from services.cli.check_penalties import check_penalties
from services.cli.embedded import BadInput, host_and_port
from services.cli.plugins import Asked, refused
from services.cli.policy import check_policy
from services.cli.teachers import check_tiny, check_token_file

Place = tuple[int | str, ...]
_PACKAGES = {"chat": "openai", "tool": "openai", "shell": "openai", "arithmetic": "reasoning_gym"}
"""What built-in harnesses and environments import when they are made, too heavy to try here."""
_WITHOUT_CHECK = ("chat", "tool")
"""Built-in harnesses that run every source."""
_PLUGINS_S = 120.0


def load_checked(file: Path, overrides: Sequence[Override] = ()) -> RunConfig:
    """The configuration of a run that can be tried on this machine; raises ConfigError with every fault."""
    config = load(file, overrides)
    found = faults(config)
    if found:
        raise ConfigError([f"{place(file, path, overrides)}: {what}" for path, what in found])
    return config


def plain_faults(config: RunConfig) -> list[tuple[Place, str]]:
    """Those of `faults` that a configuration tells by itself, whatever machine it is read on."""
    found: list[tuple[Place, str]] = []

    def need(path: Place, check: Callable[..., object], *arguments: Any) -> None:
        try:
            check(*arguments)
        except (BadInput, StoreError) as error:
            found.append((path, str(error)))

    need(("broker", "url"), check_broker_url, config.broker.url)
    engines: list[tuple[Place, str, Any]] = [(("engine",), "engine", config.engine)]
    engines += [(("teachers", i), f"teachers[{i}]", teacher) for i, teacher in enumerate(config.teachers)]
    for at, key, engine in engines:
        need((*at, "url"), check_engine_url, engine.url, f"{key}.url")
        for i, url in enumerate(engine.replicas):
            need((*at, "replicas", i), check_engine_url, url, f"{key}.replicas[{i}]")
    need(("store", "url"), _check_store, config.store)
    if (problem := too_small(config.batch, config.packer)) is not None:
        found.append((("packer", "memory_bytes"), problem))
    if config.retention.expire_days and not config.store.url.startswith("s3://"):
        found.append(
            (
                ("retention", "expire_days"),
                "only a bucket expires objects by itself: set store.url to s3://bucket/prefix, or expire_days to 0",
            )
        )
    if config.trainer.rendezvous:
        need(("trainer", "rendezvous"), host_and_port, config.trainer.rendezvous, "trainer.rendezvous")
    if wrong := budget_fault(config.batch, config.engine.max_context):
        found.append((("batch", "token_budget"), wrong))
    return found


def faults(config: RunConfig) -> list[tuple[Place, str]]:
    """(path of the key, what is wrong with its value and the remedy) of everything that is not there."""
    found = plain_faults(config)
    asked: list[tuple[Place, Asked]] = []
    fit: list[tuple[Place, Asked]] = []

    def need(path: Place, check: Callable[..., object], *arguments: Any) -> None:
        try:
            check(*arguments)
        except (
            BadInput, StoreError, harnesses.UnknownHarness, environments.UnknownEnvironment, UnknownRules,
        ) as error:  # fmt: skip
            found.append((path, str(error)))

    engine = config.engine
    if engine.weights_dir and not Path(engine.weights_dir).is_dir():
        found.append(
            (
                ("engine", "weights_dir"),
                f"{engine.weights_dir} is no directory; make it, where engines read it under the same path",
            )
        )
    asked += _renderer(engine)
    need(("engine", "policy"), check_policy, config.engine.policy, Path(config.directory))
    for i, teacher in enumerate(config.teachers):
        at = ("teachers", i)
        need((*at, "token_file"), check_token_file, teacher)
        if teacher.kind == "tiny":
            need((*at, "policy"), check_tiny, teacher, engine, Path(config.directory))
    for i, pool in enumerate(config.pools):
        if pool.python:
            need(("pools", i, "python"), _check_python, pool.python)
        if ":" in pool.harness or pool.python or pool.harness in harnesses.KINDS.named():
            asked.append((("pools", i, "harness"), Asked("harness", pool.harness, pool.options, pool.python)))
        else:
            need(("pools", i, "harness"), _check_harness, pool)
        if ":" in pool.rules:
            asked.append((("pools", i, "rules"), Asked("rules", pool.rules)))
        else:
            need(("pools", i, "rules"), load_rules, pool.rules)
    own = {pool.name for pool in config.pools if pool.harness not in harnesses.BUILT_IN}
    pools = {pool.name: pool for pool in config.pools}
    for i, source in enumerate(config.sources):
        if wrong := refused_effects(source.effects, own=source.pool in own):
            found.append((("sources", i, "effects"), wrong))
        kind = ("sources", i, "environment", "kind")
        python = pools[source.pool].python
        if ":" in source.environment.kind or python:
            given = source.environment.model_dump(mode="json")
            asked.append((kind, Asked("environment", source.environment.kind, given, python)))
        else:
            need(kind, _check_environment, source.environment)
        if (pool := pools[source.pool]).harness in _WITHOUT_CHECK:
            if source.environment.kind == "harbor":
                found.append(
                    (
                        kind,
                        f"environment.kind 'harbor' needs a harness that works in a workspace, which {pool.harness!r} does not: give the source a pool whose harness is shell or harbor",
                    )
                )
        else:
            both = {
                "options": pool.options,
                **source.model_dump(mode="json", include={"environment", "behaviour"}),
            }
            fit.append((("sources", i), Asked("source", pool.harness, both, python)))
        unknown = [label for label in source.behaviour.exclude if label not in LABELS]
        if unknown and not any(":" in pool.rules for pool in config.pools):
            found.append(
                (
                    ("sources", i, "behaviour", "exclude"),
                    f"no rules label a request {unknown[0]!r}; labels: {', '.join(LABELS)}",
                )
            )
        judge = ("sources", i, "grader", "kind")
        if source.grader.kind in (graders.NONE, *graders.BUILT_IN):
            need(judge, _check_grader, source.grader)
        else:
            asked.append((judge, Asked("grader", source.grader.kind, source.grader.options)))
    told = check_hooks(config)
    found, asked, fit = found + told.found, asked + told.asked, fit + told.fit
    wrong_penalties, asked_rules = check_penalties(config)
    found, asked = found + wrong_penalties, asked + asked_rules
    # An interpreter that does not start is told once.
    broken = {config.pools[int(at[1])].python for at, _ in found if (at[0], at[-1]) == ("pools", "python")}
    found += _refused([(path, what) for path, what in asked if what.python not in broken])
    # Whether a harness takes a source can be asked only of what is there.
    return found or _refused(fit)


def _refused(asked: Sequence[tuple[Place, Asked]]) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    for python in dict.fromkeys(what.python for _, what in asked):
        these = [(path, what) for path, what in asked if what.python == python]
        answers = _tried([what for _, what in these], python or sys.executable)
        found += [(path, said) for (path, _), said in zip(these, answers, strict=True) if said]
    return found


def _renderer(engine: Engine) -> list[tuple[Place, Asked]]:
    """To be proven where something is named, as a host proves it when it starts. What is left open is the host's to find."""
    choice = {
        "choice": engine.renderer,
        "tool_parser": engine.tool_parser,
        "reasoning_parser": engine.reasoning_parser,
    }
    if set(choice.values()) == {"auto"}:
        return []
    try:
        directory = policy_dir(engine.policy, BESIDE_WEIGHTS)
    except PolicyMissing:
        # Told already, or brought by the launcher.
        return []
    return [(("engine", "renderer"), Asked("renderer", str(directory), choice))]


def check_broker_url(url: str) -> None:
    """Refuses what is no address of a NATS server; raises BadInput."""
    try:
        if url:
            check_address(url)
    except BrokerUnavailable as error:
        raise BadInput(str(error)) from error


def check_engine_url(url: str, key: str = "engine.url") -> None:
    """Refuses what is no address of an engine; raises BadInput."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port over 65,535, or none at all
        good = False
    if url and not good:
        raise BadInput(f"{key} {url!r} is not http://host:port")


def _check_store(store: StoreConfig) -> None:
    # Opening a directory makes it; opening a bucket contacts nobody.
    if store.url and not store.url.startswith(("file:///", "file://localhost/")):
        ObjectStore.open(store)


def _check_harness(pool: Pool) -> None:
    name = pool.harness
    if name not in harnesses.BUILT_IN:
        harnesses.resolve(name, pool.options)
        return
    _check_package(f"harness {name!r}", _PACKAGES.get(name))
    module = importlib.import_module(harnesses.BUILT_IN[name].partition(":")[0])
    options = getattr(module, "Options", None)
    if options is None and pool.options:
        raise BadInput(
            f"harness {name!r} has no options, and is given {', '.join(pool.options)}: leave them out"
        )
    if options is not None:
        _check_options(f"harness {name!r}", options, pool.options)


def _check_options(what: str, options: type[BaseModel], given: dict[str, Any]) -> None:
    try:
        options.model_validate(given)
    except ValidationError as error:
        raise BadInput(refused(what, error)) from error


def _check_environment(environment: Environment) -> None:
    kind = environment.kind
    if kind not in environments.BUILT_IN:
        environments.make_environment(environment)
    _check_package(f"environment.kind {kind!r}", _PACKAGES.get(kind))
    options = importlib.import_module(environments.BUILT_IN[kind].partition(":")[0]).Options
    _check_options(f"environment.kind {kind!r}", options, environment.options)


def _check_grader(grader: Grader) -> None:
    try:
        graders.make(grader.kind, grader.options)
    except ValidationError as error:
        raise BadInput(refused(f"grader {grader.kind!r}", error)) from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def _check_package(what: str, package: str | None) -> None:
    if package is not None and find_spec(package) is None:
        raise BadInput(
            f"{what} needs the package {package}, not installed here: pip install 'packtrain[harnesses]'"
        )


def _check_python(python: str) -> None:
    """Refuses an interpreter in which a pool's hosts would not start; raises BadInput."""
    told = "import importlib.metadata, services.cli.main; print(importlib.metadata.version('packtrain'))"
    remedy = f"install packtrain {version('packtrain')} with it, or name the interpreter of an environment that has it"
    try:
        done = subprocess.run([python, "-P", "-c", told], capture_output=True, text=True, timeout=_PLUGINS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{python} does not start: {error}; {remedy}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise BadInput(f"{python} cannot run packtrain: {last}; {remedy}")
    if done.stdout.strip() != version("packtrain"):
        raise BadInput(f"{python} has packtrain {done.stdout.strip()}; {remedy}")


def _tried(asked: Sequence[Asked], python: str) -> list[str | None]:
    """What is wrong with each, None for what is well."""
    command = [python, "-P", "-m", "services.cli.plugins"]
    question = json.dumps([what.__dict__ for what in asked])
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=_PLUGINS_S)
    except subprocess.TimeoutExpired:
        return [f"{what.kind} {what.name!r} is not imported within {_PLUGINS_S:.0f} s" for what in asked]
    if done.returncode == 0:
        return json.loads(done.stdout)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return [
        f"{what.kind} {what.name!r} ends its process with status {done.returncode}: {last}" for what in asked
    ]
