"""Scaffolds by their descriptions, without one of them: how each is started, what is installed where, what is refused."""

from __future__ import annotations

import io
import json
import re
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from pipeline.capture.rules import Rules, load_rules, pool_rules
from pipeline.harnesses.harbor import HarborHarness, absolute, archive
from pipeline.harnesses.scaffolds import NAMES, scaffold
from pipeline.harnesses.scaffolds.base import Job, Launch, Places
from pipeline.harnesses.scaffolds.install import Unavailable, ensure, mounts, need
from schemas.config import Behaviour, Pool
from services.cli.main import app
from services.cli.plugins import Asked, problem
from tests.scaffolds.table import BEGIN, DOCUMENT, END, table, written

SECRET = "5ec2e7" * 8
URL = f"http://127.0.0.1:8080/s/session-1/{SECRET}/v1"
INSTRUCTION = '--help @/etc/passwd\n"quoted" $HOME `x` \\ é'
PLACES = Places("/opt/x", "/opt/node", "/opt/python", "/opt/lib", "/opt/drivers", "/home/agent")
WIRES = [(name, wire) for name in NAMES for wire in scaffold(name).wires]


def job(wire: str, **settings: Any) -> Job:
    return Job(INSTRUCTION, URL, wire, Behaviour(), 32_000, 1000, PLACES, settings)


def launched(name: str, wire: str, **settings: Any) -> Launch:
    return scaffold(name).launch(job(wire, **settings))


def texts(value: Any) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in texts(item)]


def in_files(launch: Launch) -> list[str]:
    return [
        t for name, text in launch.files.items() if not name.endswith("toml") for t in texts(json.loads(text))
    ]


@pytest.mark.parametrize(("name", "wire"), WIRES)
def test_neither_the_secret_nor_the_instruction_is_an_argument(name: str, wire: str) -> None:
    launch = launched(name, wire)
    assert not [a for a in launch.argv if SECRET in a or INSTRUCTION in a]
    assert [launch.stdin, *in_files(launch)].count(INSTRUCTION) == 1
    assert SECRET not in repr(job(wire))


@pytest.mark.parametrize(("name", "wire"), WIRES)
def test_the_session_url_is_given_once_in_the_form_that_the_protocol_s_client_wants(
    name: str, wire: str
) -> None:
    launch = launched(name, wire)
    whole = json.dumps([*launch.env.values(), *launch.files.values()])
    assert whole.count(SECRET) == 1
    takes_bare = wire == "messages" and name != "opencode"
    assert (f"{SECRET}/v1" in whole) != takes_bare
    if SECRET in json.dumps(dict(launch.env)):
        assert name in ("claude-code", "qwen")


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_named_where_the_workspace_shows_them_and_files_stay_in_the_home(name: str) -> None:
    launch = launched(name, scaffold(name).wires[0])
    assert launch.argv[0].startswith(("/opt/x/", "/opt/node", "/opt/python"))
    assert not [path for path in launch.files if path.startswith("/") or ".." in path]


@pytest.mark.parametrize(
    ("name", "settings", "file"),
    [
        ("pi", {"compaction": {"enabled": False}}, ".pi/agent/settings.json"),
        ("claude-code", {"permissions": {"deny": ["WebFetch"]}}, ".claude/settings.json"),
        ("opencode", {"username": "me"}, ".config/opencode/opencode.json"),
        ("qwen", {"tools": {"exclude": ["web_fetch"]}}, ".qwen/settings.json"),
        ("openhands", {"condense": {"max_size": 6}}, "options.json"),
        ("terminus", {"parser_name": "xml"}, "options.json"),
        ("mini-swe-agent", {"agent": {"step_limit": 3}}, "settings.yaml"),
    ],
)
def test_settings_are_the_scaffold_s_own(name: str, settings: dict[str, Any], file: str) -> None:
    found = json.loads(launched(name, scaffold(name).wires[0], **settings).files[file])
    assert {key: found[key] for key in settings} == settings


def test_codex_settings_are_toml() -> None:
    text = launched("codex", "responses", model_auto_compact_token_limit=7).files[".codex/config.toml"]
    assert "model_auto_compact_token_limit = 7" in text


def test_pi_s_failure_is_read_from_what_it_prints() -> None:
    def end(**message: str) -> str:
        return json.dumps({"type": "message_end", "message": {"role": "assistant", **message}})

    fault = scaffold("pi").fault
    assert fault(f"{end(stopReason='stop')}\n[1]\nnoise") == ""
    failed = end(stopReason="error", errorMessage="503 overloaded")
    assert fault(f"{end(stopReason='stop')}\n{failed}\n" + '{"type": "agent_end"}') == "503 overloaded"
    assert fault(f"{failed}\n{end(stopReason='stop')}") == ""


@pytest.mark.parametrize("name", NAMES)
def test_every_scaffold_has_rules_and_a_pool_of_it_gets_them(name: str) -> None:
    pool = Pool(name="p", harness="harbor", options={"agent": name})
    assert isinstance(load_rules(pool_rules(pool)), Rules)
    assert pool_rules(pool) == name.replace("-", "_")


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ({"harness": "harbor", "options": {"agent": "oracle"}}, ""),
        ({"harness": "harbor", "options": {"agent": 3}}, ""),
        ({"harness": "harbor", "options": {"agent": "pi"}, "rules": "codex"}, "codex"),
        ({"harness": "chat"}, ""),
        ({"harness": "mine:Own", "options": {"agent": "pi"}}, ""),
    ],
)
def test_rules_of_other_pools_are_their_own(given: dict[str, Any], rules: str) -> None:
    assert pool_rules(Pool(name="p", **given)) == rules


@pytest.mark.parametrize(
    "options",
    [{}, {"agent": "nobody"}, {"agent": "pi", "version": "1"}, {"agent": "pi", "wire": "soap"}],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HarborHarness(options)


def test_a_protocol_that_the_scaffold_does_not_speak_is_refused() -> None:
    with pytest.raises(ValidationError, match="it speaks messages"):
        HarborHarness({"agent": "claude_code", "wire": "chat"})


def test_what_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=f"packtrain scaffolds install codex --folder {tmp_path}"):
        need(scaffold("codex"), tmp_path)


RUN = """
[[pools]]
name = "agents"
harness = "harbor"
options = { agent = "codex", folder = "FOLDER" }
[[sources]]
name = "fixes"
pool = "agents"
groups = 2
[sources.environment]
kind = "harbor"
options = { tasks = "examples/tasks" }
"""


def run_of(folder: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(RUN.replace("FOLDER", str(folder)))
    return file


def said_of(file: Path) -> str:
    done = CliRunner().invoke(app, ["config", "check", str(file)])
    return done.stderr if done.exit_code else ""


def test_a_configuration_is_refused_when_its_scaffold_is_missing(tmp_path: Path) -> None:
    assert f"packtrain scaffolds install codex --folder {tmp_path}" in said_of(run_of(tmp_path))
    (tmp_path / scaffold("codex").folder).mkdir()
    assert said_of(run_of(tmp_path)) == ""


@pytest.mark.parametrize(
    ("to", "said"),
    [("nobody", "there is no agent 'nobody'"), ('codex", wire = "chat', "it speaks responses")],
)
def test_a_configuration_with_options_that_mean_nothing_is_refused(
    to: str, said: str, tmp_path: Path
) -> None:
    file = run_of(tmp_path)
    file.write_text(file.read_text().replace('"codex"', f'"{to}"'))
    assert said in said_of(file)


@pytest.mark.parametrize(
    ("environment", "behaviour", "said"),
    [
        ({"kind": "calculator"}, {}, "has no task folders"),
        ({"kind": "harbor", "options": {"tasks": "examples/none"}}, {}, "is no folder"),
        (
            {"kind": "harbor", "options": {"tasks": "examples/tasks"}},
            {"system": "Be brief."},
            "prompt of its own",
        ),
    ],
)
def test_a_source_that_it_cannot_run_is_refused(
    environment: dict[str, Any], behaviour: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / scaffold("codex").folder).mkdir()
    options = {"agent": "codex", "folder": str(tmp_path)}
    given = {"options": options, "environment": environment, "behaviour": behaviour}
    assert said in str(problem(Asked("source", "harbor", given)))


def test_paths_are_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute({"agent": "pi"}) == {"agent": "pi", "folder": str(tmp_path / ".scaffolds")}
    assert absolute({"agent": "pi", "folder": "/x"})["folder"] == "/x"


def test_a_workspace_is_shown_the_scaffold_and_its_interpreter_alone(tmp_path: Path) -> None:
    for name, shown in (("claude-code", 1), ("pi", 2), ("terminus", 3)):
        found = scaffold(name)
        folder = tmp_path / found.folder
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").symlink_to("/usr/local/bin/python9")
        given, places = mounts(found, tmp_path, "/tmp/home")
        assert len(given) == shown
        assert given[0].source == folder
        assert all(mount.target.startswith("/opt/scaffolds/") for mount in given)
        assert found.launch(replace(job(found.wires[0]), places=places)).argv[0].startswith("/opt/scaffolds/")
    assert given[1].source == Path("/usr/local")
    assert places.python == "/opt/scaffolds/python/bin/python9"


def test_a_failed_installation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(scaffold("pi"), packages=("file:./not-there",))
    monkeypatch.setattr("pipeline.harnesses.scaffolds.pi.SCAFFOLD", broken)
    with pytest.raises(Unavailable, match="not-there"):
        ensure("pi", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pi.lock"]


def test_the_home_s_files_are_its_owner_s() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive({".a/b/c": "one", "d": "two"}))) as found:
        names = {entry.name: (entry.isdir(), entry.mode) for entry in found}
        assert found.extractfile(".a/b/c").read() == b"one"  # pyright: ignore[reportOptionalMemberAccess]  # it is a file
    assert names == {
        ".a": (True, 0o700),
        ".a/b": (True, 0o700),
        ".a/b/c": (False, 0o600),
        "d": (False, 0o600),
    }


def test_the_command_lists_versions_protocols_and_places(tmp_path: Path) -> None:
    (tmp_path / scaffold("pi").folder).mkdir()
    done = CliRunner().invoke(app, ["scaffolds", "list", "--folder", str(tmp_path), "--json"])
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == set(NAMES)
    assert rows["pi"]["installed"] == str(tmp_path / scaffold("pi").folder)
    assert rows["codex"] == {"name": "codex", "version": "0.171.0", "wires": ["responses"], "installed": None}


def test_the_command_refuses_what_it_does_not_know() -> None:
    done = CliRunner().invoke(app, ["scaffolds", "install", "nobody"])
    assert done.exit_code == 2
    assert "there is no scaffold 'nobody'" in done.stderr


def row(name: str, reward: float = 1.0) -> dict[str, Any]:
    counted = {
        "requests": 2,
        "contexts": 1,
        "tokens": 12_345,
        "generated": 678,
        "seconds": 1.5,
        "memory": 9e7,
    }
    found = scaffold(name)
    return {"scaffold": name, "version": found.version, "wire": found.wires[0], "reward": reward, **counted}


def test_the_table_takes_the_place_of_the_former_one() -> None:
    made = table([row("pi", 0.0), *map(row, NAMES)])
    assert made.count("\n") == len(NAMES) + 2
    assert "| pi | 0.73.1 | chat | 1.0 | 2 | 1 | 12,345 | 678 | 1.5 | 90 MB |\n" in made
    document = f"before\n{BEGIN}old\n{END}\nafter"
    assert written(document, made) == f"before\n{BEGIN}{made}{END}\nafter"


def test_a_table_with_a_scaffold_that_did_not_solve_its_task_is_not_made() -> None:
    with pytest.raises(ValueError, match="of codex, pi"):
        table([row(name) for name in NAMES if name != "codex"] + [row("pi", 0.0)])
    with pytest.raises(ValueError, match="has no place"):
        written("no marks", "")


def test_the_pools_of_the_document_are_all_and_legal() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    pools = [Pool(**pool) for block in blocks for pool in tomllib.loads(block).get("pools", [])]
    made = [HarborHarness(pool.options).options for pool in pools]
    assert {options.agent for options in made} == set(NAMES)
