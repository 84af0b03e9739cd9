"""Which run a command means: a new one, or an unfinished one that goes on. Two runs are never mixed.

Promises:
- the runs of a base name are NAME, NAME-2, NAME-3, ...; the newest of them decides;
- an unfinished run goes on only with what it was started with, and only from the directory that started it;
- a directory's record of a run in one broker is never overwritten by a run of that name in another;
- hosts that were shared out when a run began stay so;
- nothing is ever deleted: `fresh` leaves an unfinished run where it is and takes the next name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import load
from pipeline.signal.hooks import built_in, chain
from schemas.config import Decisions, RunConfig
from services.cli.embedded import LaunchError, is_embedded
from services.cli.reach import read_record
from services.cli.service import label
from services.cli.teachers import scoring

_MOST = 10_000


@dataclass(frozen=True)
class Known:
    """A run that the broker has: what it decides on (None when it has no run.started yet), and whether it is over."""

    decisions: Mapping[str, Any] | None
    stopped: bool


@dataclass(frozen=True)
class Choice:
    """The run to start or to go on with, and a line that tells why; empty when there is nothing to tell."""

    run: str
    resumed: bool
    note: str = ""


def name_of(base: str, number: int) -> str:
    """`demo`, `demo-2`, `demo-3`, ..."""
    return base if number == 1 else f"{base}-{number}"


async def choose(
    config: RunConfig, fresh: bool, look: Callable[[str], Awaitable[Known | None]], directory: Path
) -> Choice:
    """The run to start or resume. `look` tells what the broker knows of a name. Raises LaunchError when refused."""
    base = config.run
    newest: tuple[str, Known] | None = None
    for number in range(1, _MOST):
        name = name_of(base, number)
        known = await look(name)
        if known is None:
            return decide(config, newest, name, fresh, directory)
        newest = (name, known)
    raise LaunchError(f"there are {_MOST - 1} runs named {base}; take another name with --run")


async def resumed(
    config: RunConfig, look: Callable[[str], Awaitable[Known | None]], directory: Path
) -> Choice:
    """The run of exactly that name, which must be unfinished. Raises LaunchError when it is not, or cannot go on here."""
    known = await look(config.run)
    if known is None:
        raise LaunchError(f"the broker has no run {config.run}; there is nothing to go on with")
    if known.stopped:
        raise LaunchError(f"run {config.run} is over; packtrain run or demo starts another one")
    return _resumed(config, config.run, known, name_of(config.run, 2), directory)


def decide(
    config: RunConfig, newest: tuple[str, Known] | None, following: str, fresh: bool, directory: Path
) -> Choice:
    """`newest` is the newest existing run of the name, `following` the next free name."""
    note = ""
    if newest is not None:
        name, known = newest
        if not known.stopped and not fresh:
            return _resumed(config, name, known, following, directory)
        note = f"run {name} {'is complete' if known.stopped else 'stays unfinished'}; starting {following}"
    _check_broker(config, following, directory)
    return Choice(following, resumed=False, note=note)


def _resumed(config: RunConfig, name: str, known: Known, following: str, directory: Path) -> Choice:
    record = directory / "runs" / name / "config.toml"
    if not record.is_file():
        raise LaunchError(
            f"run {name} is unfinished, but was not started from {directory}; name its directory with --directory, or "
            f"another run with --run, or start {following} with --fresh"
        )
    differing = differences(config, known.decisions, record, directory)
    if differing:
        raise LaunchError(
            f"run {name} is unfinished and was started with other settings ({', '.join(differing)}); "
            f"start {following} with --fresh, or take another name with --run"
        )
    return Choice(name, resumed=True, note=f"run {name} is unfinished; it goes on where it stopped")


def differences(
    config: RunConfig, decisions: Mapping[str, Any] | None, record: Path, directory: Path
) -> list[str]:
    """What an unfinished run was started with and this configuration has otherwise: keys, in order.

    Beside the decisions in the log these are the policy, what teachers score with, and the store, from the run's own
    record: other weights or other objects would make two runs of one; and the pools' shares of a host budget.
    """
    out = decided_otherwise(config, decisions) if decisions is not None else []
    recorded = read_record(record)
    if recorded.engine.policy != config.engine.policy:
        out.append("engine.policy")
    if scoring(recorded) != scoring(config):
        out.append("teachers")
    if recorded.store.url != store_url(config, directory):
        out.append("store.url")
    shared = recorded.host_budget or config.host_budget
    if shared and recorded.pool_hosts() != config.pool_hosts():
        out.append("host_budget")
    return out


def decided_otherwise(config: RunConfig, decisions: Mapping[str, Any]) -> list[str]:
    """The keys of a `run.started`'s decisions, in order, that this configuration has other values of."""
    mine, theirs = _plain(config.decisions()), _known(decisions)
    return [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]


def store_url(config: RunConfig, directory: Path) -> str:
    """The store that a run has: the given one, or files in the launcher's directory."""
    return config.store.url or (directory / "objects").as_uri()


def _check_broker(config: RunConfig, name: str, directory: Path) -> None:
    """Refuses a name that this broker has no run of, but another one has, begun from this directory."""
    path = directory / "runs" / name / "config.toml"
    if not path.is_file():
        return
    record = load(path)
    theirs = "" if is_embedded(record) else record.broker.url
    if theirs != config.broker.url:
        raise LaunchError(
            f"{directory} has run {name} of {f'broker {theirs}' if theirs else 'the embedded broker'}; go on with it there, or "
            "take another name with --run, or another directory with --directory"
        )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(value))


def _known(decisions: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run.started, as this release would write them: one of an older release lacks the keys that came since."""
    with suppress(ValidationError):
        return _plain(Decisions.model_validate(decisions).model_dump(mode="json"))
    return _plain(dict(decisions))


@dataclass(frozen=True)
class HostPlace:
    """One rollout host of a run: a process, or a Ray actor.

    python: its pool's own interpreter; empty: the launcher's, or the cluster's. resources: what it takes of a Ray node.
    """

    service: str
    index: int
    pool: str = ""
    python: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return label(self.service, self.index, self.pool)


def host_places(config: RunConfig) -> list[HostPlace]:
    """Every rollout host, in the order they are started in; none more, however many sequences there are."""
    loop, counts = config.agent_loop, config.pool_hosts()
    hosts = [HostPlace("agent-loop", index, resources=loop.resources) for index in range(loop.hosts)]
    for pool in config.pools:
        hosts += [
            HostPlace("harness", index, pool.name, pool.python, pool.resources)
            for index in range(counts[pool.name])
        ]
    return hosts


def longest_drain(config: RunConfig) -> float:
    """Seconds that some host of the run may take to let its tenants end when it is told to stop."""
    return max(config.agent_loop.drain_s, *(pool.drain_s for pool in config.pools))


def interpreter(config: RunConfig, arguments: Sequence[str]) -> str:
    """What runs a service with these arguments of `packtrain service`: its pool's own Python, or this one."""
    if "--pool" in arguments:
        name = arguments[arguments.index("--pool") + 1]
        return next(pool.python for pool in config.pools if pool.name == name) or sys.executable
    return sys.executable


def unit_arguments(config: RunConfig) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """(unit, [(member, arguments of `packtrain service`)]) of every service, in the order they are started in."""

    def single(name: str) -> tuple[str, list[tuple[str, list[str]]]]:
        return name, [(name, [name])]

    def indexed(service: str, index: int) -> tuple[str, list[str]]:
        return f"{service}-{index}", [service, "--index", str(index)]

    units = [single("sampler"), single("dispatcher"), single("grader")]
    if not all(built_in(source) and chain(source).pure for source in config.sources):
        units.append(single("hook"))
    if any(source.teachers for source in config.sources):
        units.append(single("teacher"))
    if config.retention.removes:
        units.append(single("collector"))
    for host in host_places(config):
        pool = ["--pool", host.pool] if host.pool else []
        units.append((host.name, [(host.name, [host.service, *pool, "--index", str(host.index)])]))
    sizes = config.batch.sizes
    for number in range(sizes.packers):
        member = indexed("packer", number)
        units.append((member[0], [member]))
    if config.trainer.kind == "reference":
        # The ranks of the trainer are a gang: a collective cannot go on without one of them.
        units.append(("trainer", [indexed("trainer", rank) for rank in range(sizes.ranks)]))
    return units
