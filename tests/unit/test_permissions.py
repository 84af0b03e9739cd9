"""The rights of the broker's users: their table in the documents, and the commands that print them."""

from __future__ import annotations

import json
import stat
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.config import loads
from pipeline.log.permissions import EVERY_RUN, KINDS, permissions_for, table, users_conf, work_of
from pipeline.store.policies import KINDS as STORE_KINDS
from schemas.names import BadName
from services.cli.deploy_secrets import Settings
from services.cli.main import app
from services.process import SERVICES
from tests.secured import nkey_pair, public_key
from tests.signal_example import example

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["broker", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "broker").mkdir()
    for kind in KINDS:
        (tmp_path / "broker" / f"{kind}.nk").write_text(nkey_pair()[0] + "\n")
    return tmp_path


def test_the_table_in_the_documents_is_the_codes() -> None:
    assert table() in (ROOT / "docs" / "permissions.md").read_text()
    assert run("table") == (0, table())


def test_every_service_has_a_user_of_broker_and_store() -> None:
    assert {*SERVICES, "reader", "launcher"} == set(KINDS) == set(STORE_KINDS) - {"admin"}


def test_only_the_launcher_may_what_has_no_limit() -> None:
    for kind in KINDS:
        given = permissions_for(kind, "mine")
        wide = [s for s in given.publish if s.endswith(".>") and "mine" not in s.replace("RL_mine", "mine")]
        assert wide == []
        wide = [s for s in permissions_for(kind, EVERY_RUN).publish if s == "$JS.API.>"]
        assert (wide == []) == (kind != "launcher"), wide
        assert given.subscribe == (("_INBOX.>",) if kind == "launcher" else (f"_INBOX.{kind}.>",))


def test_the_permissions_of_a_run_are_told() -> None:
    told = permissions_for("harness", "mine", ["harness-chat"])
    status, output = run("permissions", "harness", "--run", "mine", "--work", "harness-chat", "--json")
    assert (status, json.loads(output)) == (
        0,
        {"publish": list(told.publish), "subscribe": ["_INBOX.harness.>"]},
    )
    assert "$JS.ACK.RL_mine.harness-chat.>" in told.publish
    status, output = run("permissions", "packer")
    assert (status, "  rl.*.window.packed.*.*" in output.splitlines()) == (0, True)
    status, output = run("permissions", "pakcer")
    assert status != 0
    assert "no user 'pakcer' of the broker; users: dispatcher" in " ".join(output.split())


def test_work_consumers_are_those_of_the_configuration() -> None:
    assert work_of(loads(example(1), "signal")) == {
        "harness": ("harness-chat", "harness-tool"),
        "teacher": ("teacher-6-before-calculator",),
    }


def test_users_are_printed_by_their_public_keys(keys: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(example(1))
    status, output = run(
        "users", "--directory", str(keys), "--run", "mine", "--config", str(file), "--durable", "d"
    )
    assert status == 0
    assert "$JS.API.CONSUMER.RESET.RL_mine.sub-d" in output
    assert "$JS.ACK.RL_mine.teacher-6-before-calculator.>" in output
    for kind in KINDS:
        seed = (keys / "broker" / f"{kind}.nk").read_text().strip()
        assert public_key(seed) in output
        assert seed not in output
    (keys / "broker" / "hook.nk").write_text("SUAnothing")
    status, output = run("users", "--directory", str(keys))
    assert status != 0
    assert "holds no nkey seed" in " ".join(output.split())


def test_what_a_leaf_node_needs_is_made_once(keys: Path) -> None:
    assert run("leaf", "--directory", str(keys))[0] == 0
    made = {path.name: path.read_text() for path in (keys / "leaf").iterdir()}
    assert sorted(made) == ["leaf-key.conf", "leaf-seed.conf", "users.conf"]
    seed = made["leaf-seed.conf"].removeprefix("nkey: ").strip()
    assert made["leaf-key.conf"] == f"nkey: {public_key(seed)}\n"
    assert stat.S_IMODE((keys / "leaf").stat().st_mode) == 0o700
    assert '"$JS.hub.API.STREAM.INFO.*"' in made["users.conf"]
    assert '"$JS.API' not in made["users.conf"].replace('"$JS.API.>"', "")
    assert run("leaf", "--directory", str(keys), "--run", "mine")[0] == 0
    assert (keys / "leaf" / "leaf-seed.conf").read_text() == made["leaf-seed.conf"]
    assert "RL_mine" in (keys / "leaf" / "users.conf").read_text()


def test_a_leafs_key_is_completed_made_anew_and_never_guessed(keys: Path) -> None:
    assert run("leaf", "--directory", str(keys))[0] == 0
    at = keys / "leaf"
    before = {path.name: path.read_text() for path in at.iterdir()}
    (at / "leaf-key.conf").unlink()
    assert run("leaf", "--directory", str(keys))[0] == 0
    assert {path.name: path.read_text() for path in at.iterdir()} == before
    assert run("leaf", "--directory", str(keys), "--rotate")[0] == 0
    seed = (at / "leaf-seed.conf").read_text().removeprefix("nkey: ").strip()
    assert f"nkey: {seed}\n" != before["leaf-seed.conf"]
    assert (at / "leaf-key.conf").read_text() == f"nkey: {public_key(seed)}\n"
    (at / "leaf-seed.conf").chmod(0o600)
    (at / "leaf-seed.conf").write_text("nkey: SUsecretgarbage\n")
    status, output = run("leaf", "--directory", str(keys))
    assert status != 0
    assert "holds no nkey seed" in " ".join(output.split())
    assert "garbage" not in output


def test_a_leafs_users_may_what_the_deployments_may_and_its_directory_is_for_nobody_else(keys: Path) -> None:
    settings = Settings(runs=("mine",), work={"harness": ["harness-chat"]})
    (keys / "settings.json").write_text(json.dumps(asdict(settings)))
    assert run("leaf", "--directory", str(keys))[0] == 0
    users = (keys / "leaf" / "users.conf").read_text()
    assert "RL_mine.harness-chat" in users
    assert "RL_*" not in users
    keys.chmod(0o755)
    status, output = run("leaf", "--directory", str(keys))
    assert (status != 0, "others can enter" in " ".join(output.split())) == (True, True)
    keys.chmod(0o700)
    (keys / "broker" / "hook.nk").unlink()
    status, output = run("leaf", "--directory", str(keys))
    assert (status != 0, "`packtrain secrets` makes the keys" in " ".join(output.split())) == (True, True)
    status, output = run("leaf", "--directory", str(keys / "none"))
    assert (status != 0, "`packtrain secrets` makes it" in " ".join(output.split())) == (True, True)


def test_each_kind_needs_a_key_and_each_run_a_name() -> None:
    key = nkey_pair()[1]
    assert key in users_conf({"packer": key})
    with pytest.raises(ValueError, match=r"no user 'pakcer' of the broker; users: dispatcher"):
        users_conf({"pakcer": key})
    with pytest.raises(ValueError, match="the public key of packer"):
        users_conf({"packer": "U } } {"})
    with pytest.raises(BadName):
        permissions_for("packer", "a.b")
