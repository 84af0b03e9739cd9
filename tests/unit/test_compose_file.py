"""docker-compose.yml: every service, with its own credentials and no rights besides; nothing published beyond this machine."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from pipeline.config import load
from services.cli.deploy_secrets import Given, make
from services.cli.service import check_place
from services.process import SERVICES, drain_of

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ALL: dict[str, dict[str, Any]] = FILE["services"]
ONCE = {"volumes", "begin"}
SERVERS = {"nats", "object-store", "prometheus", "grafana"}
OURS = {name: each for name, each in ALL.items() if each.get("command", [""])[0] == "service"}
CONFIG = load(ROOT / "infra/compose/run.toml")
GRACE_S = re.compile(r"(\d+)s")


def option(service: dict[str, Any], name: str) -> str:
    command = service["command"]
    return command[command.index(name) + 1] if name in command else ""


def given(service: dict[str, Any]) -> dict[str, str]:
    """Its secrets: where they are in the container, by their names in the file."""
    named = [each if isinstance(each, dict) else {"source": each} for each in service.get("secrets", [])]
    return {each["source"]: each.get("target", each["source"]) for each in named}


def test_every_service_is_there() -> None:
    pools = {f"harness-{pool.name}" for pool in CONFIG.pools}
    assert set(OURS) == SERVICES.keys() - {"harness"} | pools
    assert ALL.keys() == OURS.keys() | SERVERS | ONCE


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_started_as_everywhere(name: str) -> None:
    service = OURS[name]
    kind = service["command"][1]
    assert service["command"][:2] == ["service", "harness" if name.startswith("harness-") else name]
    assert (
        f"${{PACKTRAIN_CONFIG:-./infra/compose/run.toml}}:{option(service, '--config')}:ro"
        in service["volumes"]
    )
    check_place(CONFIG, kind, None, option(service, "--pool"))


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_its_own_credentials_and_no_others(name: str) -> None:
    kind = OURS[name]["command"][1]
    of_sessions = {
        "engine": {"engine-token"},
        "agent-loop": {"engine-token", "run-key"},
        "harness": {"run-key"},
    }
    assert given(OURS[name]).keys() == {f"broker-{kind}", f"store-{kind}", "ca", *of_sessions.get(kind, ())}
    assert given(OURS[name])[f"broker-{kind}"] == "broker"
    assert given(OURS[name])[f"store-{kind}"] == "store"


def test_the_configuration_names_what_containers_are_given() -> None:
    named = {CONFIG.broker.credentials_file, CONFIG.broker.ca_file, CONFIG.store.credentials_file}
    assert named == {"/run/secrets/broker", "/run/secrets/ca", "/run/secrets/store"}
    assert {CONFIG.engine.token_file, CONFIG.agent_loop.run_key_file} == {
        "/run/secrets/engine-token",
        "/run/secrets/run-key",
    }


@pytest.mark.parametrize("name", ALL)
def test_a_container_may_do_nothing_that_it_need_not(name: str) -> None:
    service = ALL[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["CHOWN"] if name == "volumes" else [])
    assert "no-new-privileges=true" in service["security_opt"]
    assert "privileged" not in service
    # Only who gives volumes to their users is root, and he has no network.
    user = int(service["user"].split(":")[0])
    assert (user, service.get("network_mode")) == (0, "none") if name == "volumes" else user >= 100
    assert len(service["security_opt"]) == (3 if name == "harness-tool" else 1)


@pytest.mark.parametrize("name", ALL)
def test_a_container_is_watched_and_started_again(name: str) -> None:
    service = ALL[name]
    if name in ONCE:
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
    # A server stays; a service whose run is over has ended.
    policy = {"begin": "on-failure:5"}  # a configuration that is refused ends `up`, with its status
    assert service["restart"] == ("unless-stopped" if name in SERVERS else policy.get(name, "on-failure"))


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_published_beyond_this_machine(name: str) -> None:
    for port in ALL[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{PACKTRAIN_\w+_PORT:-\d+\}:\d+", port), port
        assert "outside" in ALL[name]["networks"]
    assert ALL[name].get("network_mode", "none") == "none"
    if name not in SERVERS:
        assert ALL[name].get("networks", ["inside"]) == ["inside"]
    assert FILE["networks"]["inside"] == {"internal": True}


@pytest.mark.parametrize("name", ALL)
def test_an_image_is_pinned(name: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    repository, _, tag = ALL[name]["image"].partition(":")
    if repository.startswith("packtrain/"):
        assert tag == version
        assert ALL[name]["pull_policy"] == "never"  # a registry may have one of that name that is not ours
    else:
        assert re.match(r"v?\d+\.\d+", tag)


def test_minio_in_place_of_the_store_is_pinned_by_what_it_holds() -> None:
    other = yaml.safe_load((ROOT / "docker-compose.minio.yml").read_text())["services"]
    assert other.keys() == {"object-store", "begin"}
    assert other["begin"] == {"restart": "on-failure"}  # until its user is made, which is done while it runs
    assert re.fullmatch(r"\S+:RELEASE\.\S+@sha256:[0-9a-f]{64}", other["object-store"]["image"])


def test_minio_writes_nothing_below_its_read_only_root() -> None:
    """It makes a directory for certificates when it starts, in its home where none is named, which is /."""
    ours = ALL["object-store"]
    other = yaml.safe_load((ROOT / "docker-compose.minio.yml").read_text())["services"]
    command = other["object-store"]["command"]
    assert ours["read_only"] is True
    writable = [*(each.partition(":")[0] for each in ours["tmpfs"]), "/data"]
    assert "objects:/data" in ours["volumes"]
    for place in (command[1], command[command.index("--certs-dir") + 1]):
        assert any(PurePosixPath(place).is_relative_to(each) for each in writable), place


def test_minios_administrator_has_the_keys_that_were_made_last(tmp_path: Path) -> None:
    def make_minio_root() -> subprocess.CompletedProcess[str]:
        argv = ["make", "-s", "-f", str(ROOT / "Makefile"), f"PYTHON={sys.executable}", "minio-root"]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    nothing = make_minio_root()
    assert nothing.returncode != 0
    assert "run make secrets first" in nothing.stderr
    store = tmp_path / ".secrets/store"
    store.mkdir(parents=True)
    for secret in ("first", "second"):
        (store / "admin.json").write_text(json.dumps({"access_key": "a", "secret_key": secret}))
        done = make_minio_root()
        assert done.returncode == 0, done.stderr
        said = (store / "minio.env").read_text()
        assert said == f"MINIO_ROOT_USER=a\nMINIO_ROOT_PASSWORD={secret}\n"
        assert stat.S_IMODE((store / "minio.env").stat().st_mode) == 0o444


def test_hosts_of_a_scaffold_are_in_its_image_and_are_given_what_a_harness_is(tmp_path: Path) -> None:
    text = (ROOT / "infra/compose/scaffold.yml").read_text()
    ((name, service),) = yaml.safe_load(text)["services"].items()
    # Its example, below the configuration that it says to copy.
    shown = "\n".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   "))
    mine = tmp_path / "mine.toml"
    mine.write_text((ROOT / "infra/compose/run.toml").read_text() + "\n" + shown[shown.index("[[pools]]") :])
    config = load(mine)
    pool = config.pools[-1]
    assert (name, option(service, "--pool")) == (f"harness-{pool.name}", pool.name)
    check_place(config, "harness", None, pool.name)
    assert service["image"] == OURS["harness-chat"]["image"].replace(
        "harness:", f"harness-{pool.options['agent']}:"
    )
    assert Path(pool.options["folder"]) == Path("/opt/scaffolds")
    dockerfile = (ROOT / "infra/images/Dockerfile").read_text()
    assert f"--folder {pool.options['folder']}" in dockerfile
    tasks = config.sources[-1].environment.options["tasks"]
    assert f"./examples/tasks:{tasks}:ro" in service["volumes"]
    for key in ("secrets", "restart", "stop_grace_period", "healthcheck", "depends_on", "logging", "read_only", "cap_drop", "pull_policy"):  # fmt: skip
        assert service[key] == OURS["harness-tool"][key], key
    assert {*OURS["harness-tool"]["security_opt"]} < {*service["security_opt"]}
    assert service["networks"] == ["inside"]
    assert drain_of(config, "harness", pool.name) + 10 <= int(service["stop_grace_period"][:-1])


def test_every_secret_is_one_that_packtrain_makes(tmp_path: Path) -> None:
    make(tmp_path / "secrets", Given(), tmp_path / ".env", lambda _: None)
    place = "${PACKTRAIN_SECRETS:?run make secrets}/"
    for name, secret in FILE["secrets"].items():
        assert secret["file"].startswith(place), name
        path = tmp_path / "secrets" / secret["file"].removeprefix(place)
        assert stat.S_IMODE(path.stat().st_mode) == 0o444, f"{path}: no container could read it"
    assert FILE["secrets"].keys() == {secret for each in ALL.values() for secret in given(each)}


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.minio.yml"])
def test_no_secret_is_in_the_environment_of_a_container(file: str) -> None:
    for service in yaml.safe_load((ROOT / file).read_text())["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|KEY|ROOT|ENV", name):
                assert name.endswith("_FILE")
                assert value.startswith("/run/secrets/")


@pytest.mark.parametrize("name", ["agent-loop", *(f"harness-{pool.name}" for pool in CONFIG.pools)])
def test_a_host_has_the_time_to_drain(name: str) -> None:
    told = GRACE_S.fullmatch(OURS[name]["stop_grace_period"])
    drain_s = drain_of(CONFIG, OURS[name]["command"][1], option(OURS[name], "--pool"))
    assert told is not None
    assert int(told[1]) >= drain_s + 10 > 10


def test_packers_and_ranks_share_the_sockets() -> None:
    for name in ("packer", "trainer"):
        assert f"sockets:{CONFIG.packer.socket_dir}" in OURS[name]["volumes"]
    assert f"journal:{CONFIG.agent_loop.journal_dir}" in OURS["agent-loop"]["volumes"]
    assert "container_name" not in OURS["packer"]  # or there could be only one


def test_what_tells_of_connections_is_for_the_health_check_of_its_own_container_alone() -> None:
    """nats-server's port of HTTP asks nobody for a key, and tells of users, subjects and streams."""
    assert ALL["nats"]["healthcheck"]["test"][-1] == "http://127.0.0.1:8222/healthz"
    for path in (ROOT / "infra/nats").rglob("*.conf"):
        for said in re.findall(r"^http.*$", path.read_text(), re.M):
            assert said == 'http: "127.0.0.1:8222"', path
