"""What a configuration names is looked up before anything starts: every kind of fault, at its key, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import ConfigError, Override, load
from pipeline.harnesses.environments.harbor import BrokenTasks
from schemas.config import Grader, Penalty, RunConfig
from services.cli import check
from services.cli.check import Place, faults, load_checked
from services.cli.policy import SMOLLM2
from tests.lifecycle_parts import PASS, tasks

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
PLUGINS = """
print("on import")  # no answer of ours

def grade(completed): ...

class Good:
    def __init__(self, seed, options):
        import pydantic
        pydantic.create_model("Options", __config__={"extra": "forbid"}, size=(int, 1)).model_validate(options)

class Harness: ...

class Flags:
    judges = "turn"
    def __init__(self, options=None):
        import pydantic
        pydantic.create_model("Options", __config__={"extra": "forbid"}).model_validate(options or {})
    def __call__(self, seen): return False

class Broken:
    def __init__(self):
        raise RuntimeError("no\\nserver")

not_callable = 1
"""


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules where a service would find them."""
    (tmp_path / "mine.py").write_text(PLUGINS)
    (tmp_path / "deadly.py").write_text(
        "import os, sys\nprint('bye', file=sys.stderr, flush=True)\nos._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def changed(section: str, index: int | None, **values: Any):
    config = load(DEMO)
    old = getattr(config, section)
    if index is None:
        return config.model_copy(update={section: old.model_copy(update=values)})
    items = list(old)
    items[index] = items[index].model_copy(update=values)
    return config.model_copy(update={section: tuple(items)})


def environment(**values: Any):
    source = load(DEMO).sources[1]
    return changed("sources", 1, environment=source.environment.model_copy(update=values))


def test_what_is_there_has_no_fault() -> None:
    assert faults(load(DEMO)) == []
    for config in (
        changed("pools", 0, harness="mine:Harness"),
        changed("sources", 0, grader=Grader(kind="mine:grade")),
        environment(kind="mine:Good", options={"size": 2}),
        changed("store", None, url="s3://bucket/prefix"),
    ):
        assert faults(config) == []


KIND: Place = ("sources", 1, "environment", "kind")


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        (
            changed("engine", None, policy="absent"),
            ("engine", "policy"),
            "policy 'absent' is not a directory",
        ),
        (changed("broker", None, url="nats://"), ("broker", "url"), "is not nats://host:port"),
        (changed("engine", None, url="h:1"), ("engine", "url"), "is not http://host:port"),
        (changed("store", None, url="ftp://h/p"), ("store", "url"), "is neither file:///path nor s3://"),
        (changed("packer", None, memory_bytes=1000), ("packer", "memory_bytes"), "raise it to at least"),
        (changed("trainer", None, rendezvous="h:99999"), ("trainer", "rendezvous"), "is not host:port"),
        (changed("pools", 1, harness="tol"), ("pools", 1, "harness"), "harness 'tol' is none of"),
        (changed("pools", 1, harness="absent:X"), ("pools", 1, "harness"), "No module named 'absent'"),
        (changed("pools", 1, harness="mine:X"), ("pools", 1, "harness"), "has no attribute 'X'"),
        (changed("pools", 1, harness="mine:Broken"), ("pools", 1, "harness"), "RuntimeError: no server"),
        (changed("pools", 1, harness="deadly:X"), ("pools", 1, "harness"), "process with status 3: bye"),
        (environment(kind="chess"), KIND, "environment.kind 'chess' is neither one of"),
        (environment(kind="absent:X"), KIND, "cannot be imported: No module named 'absent'"),
        (environment(kind="mine:Good", options={"sise": 2}), KIND, "refuses its options: sise: Extra inputs"),
        (
            environment(options={"lo": 2}),
            KIND,
            "environment.kind 'calculator' refuses its options: lo: Extra",
        ),
        (
            changed("sources", 0, grader=Grader(kind="nun")),
            ("sources", 0, "grader", "kind"),
            "is none of ['command', 'none', 'rubric'",
        ),
        (
            changed(
                "sources", 0, grader=Grader(kind="rubric", options={"url": "http://j/v1", "rubric": "r"})
            ),
            ("sources", 0, "grader", "kind"),
            "grader 'rubric' refuses its options: model: Field required",
        ),
        (
            changed("sources", 0, grader=Grader(kind="command", options={"argv": ["/nowhere"]})),
            ("sources", 0, "grader", "kind"),
            "'/nowhere' is no program that can be run",
        ),
        (
            changed("sources", 0, grader=Grader(kind="mine:grade", options={"floor": 1})),
            ("sources", 0, "grader", "kind"),
            "is a function and takes no options",
        ),
        (
            changed("sources", 0, grader=Grader(kind="mine:absent")),
            ("sources", 0, "grader", "kind"),
            "has no attribute 'absent'",
        ),
        (
            changed("sources", 0, grader=Grader(kind="mine:not_callable")),
            ("sources", 0, "grader", "kind"),
            "is not callable",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_there_is_told_at_its_key(config: Any, path: Place, said: str) -> None:
    ((where, what),) = faults(config)
    assert where == path
    assert said in what
    assert "\n" not in what


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    found = faults(load(DEMO))
    assert [path for path, _ in found] == [
        ("pools", 0, "harness"), ("pools", 1, "harness"), ("sources", 0, "environment", "kind"),
    ]  # fmt: skip
    assert all("pip install 'packtrain[harnesses]'" in what for _, what in found)
    monkeypatch.setattr("services.cli.policy.find_spec", lambda name: None)
    config = changed("engine", None, policy=SMOLLM2).model_copy(update={"directory": str(tmp_path)})
    assert any("make smollm2" in what for _, what in faults(config))
    made = tmp_path / "policies" / SMOLLM2
    made.mkdir(parents=True)
    (made / "model.safetensors").touch()
    assert not any("smollm2" in what for _, what in faults(config))


def test_every_fault_has_its_line_or_its_option(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = DEMO.read_text().replace('kind = "calculator"', 'kind = "chess"')
    file.write_text(text.replace('harness = "tool"', 'harness = "tol"'))
    lines = file.read_text().splitlines()
    with pytest.raises(ConfigError) as caught:
        load_checked(file, [Override("--policy", ("engine", "policy"), "absent")])
    policy, harness, kind = caught.value.faults
    assert policy.startswith("--policy: policy 'absent'")
    for fault, key in ((harness, 'harness = "tol"'), (kind, 'kind = "chess"')):
        assert fault.startswith(f"{file}:{lines.index(key) + 1}: ")


def test_a_check_imports_nothing_heavy_and_makes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from services.cli.check import load_checked;"
        f"load_checked(Path({str(DEMO)!r}));"
        "print([m for m in ('torch', 'openai', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == "[]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deadly.py", "mine.py"]


@pytest.mark.parametrize(
    ("section", "index", "values", "place", "said"),
    [
        ("engine", None, {"renderer": "jinja"}, ("engine", "renderer"), "engine.renderer is 'jinja'"),
        ("engine", None, {"renderer": "template"}, ("engine", "renderer"), "template"),
        ("engine", None, {"tool_parser": "bogus"}, ("engine", "renderer"), "engine.tool_parser"),
        ("engine", None, {"weights_dir": "/nonexistent/w"}, ("engine", "weights_dir"), "is no directory"),
        ("engine", None, {"replicas": ("banana",)}, ("engine", "replicas", 0), "engine.replicas[0] 'banana'"),
        ("pools", 0, {"rules": "claude-code"}, ("pools", 0, "rules"), "claude_code, codex"),
        ("pools", 0, {"rules": "mine:grade"}, ("pools", 0, "rules"), "not pipeline.capture.rules.Rules"),
    ],
)
def test_what_capture_cannot_use_is_told_before_a_host_starts(
    section: str, index: int | None, values: dict[str, Any], place: Place, said: str
) -> None:
    ((found, what),) = faults(changed(section, index, **values))
    assert found == place
    assert said in what


def test_a_penalty_that_cannot_be_is_told_at_its_key() -> None:
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"rule": "repetitions"}, "rule", "rule 'repetitions' is none of ['garbled'"),
        ({"rule": "repetition", "options": {"m": 3}}, "options", "refuses its options: m: Extra"),
        ({"rule": "nonzero_exit", "options": {"pattern": "("}}, "options", "is no pattern"),
        ({"rule": "garbled", "strategy": "mask", "value": 0.5}, "value", "'mask' takes no value"),
        ({"rule": "garbled", "strategy": "subtract"}, "strategy", "changes nothing"),
        ({"rule": "mine:Absent"}, "rule", "has no attribute 'Absent'"),
        ({"rule": "mine:Harness"}, "rule", "needs judges"),
        ({"rule": "mine:Flags", "options": {"m": 3}}, "rule", "refuses its options: m: Extra"),
    ]
    good = (Penalty(rule="mine:Flags", stop=True), Penalty(rule="garbled", strategy="set", value=-1))
    penalties = (*good, *(Penalty.model_validate(penalty) for penalty, _, _ in bad))
    found = faults(changed("sources", 0, penalties=penalties))
    assert [place for place, _ in found] == [
        ("sources", 0, "penalties", i, key) for i, (_, key, _) in enumerate(bad, 2)
    ]
    for (_, what), (_, _, said) in zip(found, bad, strict=True):
        assert said in what
        assert "\n" not in what


def test_a_label_that_no_rule_gives_is_a_mistake() -> None:
    behaviour = load(DEMO).sources[0].behaviour.model_copy(update={"exclude": ("titel",)})
    ((place, what),) = faults(changed("sources", 0, behaviour=behaviour))
    assert place == ("sources", 0, "behaviour", "exclude")
    assert "'titel'; labels: title, probe" in what


def test_an_adapter_of_an_entry_point_is_made_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[packtrain.harnesses]\nours = mine:Harness\ntheirs = mine:Broken\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pools = [
        pool.model_copy(update={"harness": name})
        for pool, name in zip(load(DEMO).pools, ("ours", "theirs"), strict=True)
    ]
    ((place, what),) = faults(load(DEMO).model_copy(update={"pools": tuple(pools)}))
    assert place == ("pools", 1, "harness")
    assert "RuntimeError: no server" in what
    assert "mine" not in sys.modules


@pytest.mark.parametrize("harness", ["shell", "mine:Harness", "chat", "tool"])
def test_task_folders_that_cannot_be_run_are_told_with_whatever_harness(tmp_path: Path, harness: str) -> None:
    with pytest.raises(BrokenTasks):
        tasks(tmp_path, PASS, dockerfile="RUN --mount=type=cache make")
    given = {"kind": "harbor", "options": {"tasks": str(tmp_path / "tasks")}}
    config = load(DEMO)
    whole = config.model_dump(mode="json")
    whole["pools"] = [{"name": "only", "harness": harness}]
    whole["sources"] = [{"name": "fixes", "pool": "only", "groups": 1, "environment": given}]
    ((place, what),) = faults(RunConfig.model_validate(whole))
    assert place[:2] == ("sources", 0)
    assert ("needs a harness that" if harness in ("chat", "tool") else "Dockerfile, line 3: RUN with") in what
