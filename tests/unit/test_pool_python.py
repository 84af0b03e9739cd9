"""A pool's own interpreter: it runs the pool's hosts and no others, and it is what the pool's code is tried in."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load
from schemas.config import RunConfig
from services.cli import launch
from services.cli.check import faults
from services.cli.launch import Options
from services.cli.runs import interpreter, unit_arguments
from services.cli.supervise import Unit

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
PLUGIN = """
class Harness:
    pass

class Environment:
    def __init__(self, seed, options):
        if options:
            raise ValueError("nothing is to be chosen")
"""


def demo(pool: dict[str, Any], **source: Any) -> RunConfig:
    """The demo's configuration, its first pool and that pool's sources changed so."""
    config = load(DEMO)
    name = config.pools[0].name
    sources = [one.model_copy(update=source) if one.pool == name else one for one in config.sources]
    pools = (config.pools[0].model_copy(update=pool), *config.pools[1:])
    return config.model_copy(update={"pools": pools, "sources": tuple(sources)})


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """An interpreter that has a module which ours has not, and records what it ran."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "onlythere.py").write_text(PLUGIN)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\nPYTHONPATH={tmp_path}/lib exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def environment(config: RunConfig, **update: Any) -> Any:
    return config.sources[0].environment.model_copy(update=update)


def test_its_code_is_tried_in_it(other: Path) -> None:
    config = load(DEMO)
    there = environment(config, kind="onlythere:Environment", options={})
    both = demo({"harness": "onlythere:Harness", "python": str(other)}, environment=there)
    assert faults(both) == []
    assert "services.cli.plugins" in (other.parents[1] / "ran").read_text()

    assert find_spec("onlythere") is None, "it is there alone"

    options = environment(config, kind="onlythere:Environment", options={"a": 1})
    wrong = faults(demo({"harness": "onlythere:Harness", "python": str(other)}, environment=options))
    assert [("nothing is to be chosen" in said, path[-1]) for path, said in wrong] == [(True, "kind")]


def test_one_that_cannot_run_packtrain_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "bare").write_text("#!/bin/sh\necho \"No module named 'services'\" >&2\nexit 1\n")
    (tmp_path / "old").write_text("#!/bin/sh\necho 0.0.1\n")
    for name in ("bare", "old"):
        (tmp_path / name).chmod(0o755)
    for python, said in (
        (str(tmp_path / "none"), "does not start"),
        (str(tmp_path / "bare"), "cannot run packtrain: No module named 'services'"),
        (str(tmp_path / "old"), "has packtrain 0.0.1"),
    ):
        ((path, told),) = faults(demo({"python": python}))
        assert path == ("pools", 0, "python")
        assert said in told
        assert "install packtrain" in told


def test_it_runs_the_hosts_of_its_pool_alone() -> None:
    config = demo({"python": "/opt/python"})
    mine = config.pools[0].name
    commands = [arguments for _, members in unit_arguments(config) for _, arguments in members]
    theirs = [arguments for arguments in commands if interpreter(config, arguments) != sys.executable]
    assert len(theirs) == config.pool_hosts()[mine]
    for arguments in theirs:
        assert interpreter(config, arguments) == "/opt/python"
        assert arguments[:3] == ["harness", "--pool", mine]


def test_the_launcher_starts_hosts_with_it_wherever_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        """What would be started."""

        def __init__(self) -> None:
            self.commands: dict[str, tuple[str, ...]] = {}

        def keep(self, unit: Unit) -> None:
            self.commands.update({member.name: member.argv for member in unit.members})

    monkeypatch.chdir(tmp_path)
    config = demo({"python": "bin/python"})
    made = launch._Launch(config, Options(), tmp_path, console=None)  # type: ignore[arg-type]
    made.supervisor, made.actors = Kept(), None  # type: ignore[assignment]
    resolved = made._resolve("demo", config.broker)
    made._start(resolved)
    absolute = str(tmp_path / "bin" / "python")
    first = {name: command[0] for name, command in made.supervisor.commands.items()}  # type: ignore[attr-defined]
    pool = config.pools[0].name
    assert {name for name, python in first.items() if python == absolute} == {
        f"harness-{pool}-{index}" for index in range(config.pool_hosts()[pool])
    }
    assert set(first.values()) == {absolute, sys.executable}
    # What `runs resume` starts again, from anywhere.
    assert load(tmp_path / "runs/demo/given.toml").pools[0].python == absolute
