"""What a Ray cluster is asked to run, and what a host is given there: no cluster is needed to say so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Override, dumps, load, loads
from pipeline.secret_file import SecretUnreadable
from schemas.config import AgentLoop, Pool, RunConfig, Store
from services.cli import ray_actor
from services.cli.ray_actor import HostFailed, RolloutHost, host_task, journal_directory, placed
from services.cli.ray_hosts import actor_options
from services.cli.ray_reach import is_loopback, out_of_reach
from services.cli.runs import HostPlace, host_places

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
CONFIG = load(DEMO)


def with_section(config: RunConfig, section: str, **keys: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})


def test_eight_hosts_of_250_tenants_are_eight_actors() -> None:
    pools = tuple(pool.model_copy(update={"hosts": 2, "tenants": 250}) for pool in CONFIG.pools)
    loop = AgentLoop(hosts=4, tenants=250, resources={"CPU": 2})
    places = host_places(CONFIG.model_copy(update={"pools": pools, "agent_loop": loop}))
    assert [place.name for place in places] == [
        "agent-loop-0", "agent-loop-1", "agent-loop-2", "agent-loop-3",
        "harness-chat-0", "harness-chat-1", "harness-tool-0", "harness-tool-1",
    ]  # fmt: skip
    assert [(place.service, place.pool, place.index) for place in places[-2:]] == [
        ("harness", "tool", 0),
        ("harness", "tool", 1),
    ]
    assert places[0].resources == {"CPU": 2}


def test_a_host_budget_is_shared_out_and_reads_back_from_the_runs_record() -> None:
    pools = (Pool(name="chat", harness="chat", share=3), Pool(name="tool", harness="tool"))
    config = CONFIG.model_copy(update={"pools": pools, "host_budget": 7})
    again = loads(dumps(config), "record")
    assert again == config
    assert again.pool_hosts() == {"chat": 5, "tool": 2}
    assert sum(place.service == "harness" for place in host_places(again)) == 7


@pytest.mark.parametrize(
    ("resources", "options"),
    [
        ({}, {"num_cpus": 1.0, "num_gpus": 0.0, "resources": {}}),
        ({"CPU": 0.5, "memory": 2e9}, {"num_cpus": 0.5, "num_gpus": 0.0, "memory": 2_000_000_000, "resources": {}}),
        ({"GPU": 1, "sandbox": 4}, {"num_cpus": 0.0, "num_gpus": 1, "resources": {"sandbox": 4}}),
    ],
)  # fmt: skip
def test_a_host_takes_what_its_pool_says_or_one_cpu(
    resources: Mapping[str, float], options: dict[str, Any]
) -> None:
    assert actor_options(HostPlace("harness", 0, "chat", resources=resources)) == options
    own = actor_options(HostPlace("harness", 0, "chat", "/opt/pool/bin/python", resources))
    assert own == {**options, "runtime_env": {"py_executable": "/opt/pool/bin/python"}}


def test_all_that_another_machine_cannot_reach_is_told_at_once() -> None:
    found = out_of_reach(CONFIG)
    assert [fault.split()[0] for fault in found] == [
        "broker.url",
        "engine.url",
        "store.url",
        "agent_loop.bind",
    ]
    assert all("; " in fault for fault in found), "each has its remedy"
    config = with_section(CONFIG, "broker", url="nats://127.0.0.1:4222")
    config = with_section(config, "engine", url="http://[::1]:8000", replicas=("http://localhost:8001",))
    config = with_section(config, "agent_loop", bind="10.0.0.7", advertise="127.0.0.1")
    config = with_section(config, "store", url="file:///shared/objects")
    assert [fault.split()[0] for fault in out_of_reach(config)] == [
        "broker.url", "engine.url", "engine.replicas[0]", "agent_loop.advertise",
    ]  # fmt: skip
    config = with_section(config, "broker", url="nats://broker.internal:4222")
    config = with_section(config, "engine", url="http://10.0.0.5:8000", replicas=())
    config = with_section(config, "agent_loop", bind="0.0.0.0", advertise="")
    assert out_of_reach(config) == []


def test_loopback_is_an_address_of_this_machine_alone() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "localhost.example", "", None))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for name in ("token", "key", "credentials"):
        (tmp_path / name).write_text(f"{name}-0123456789abcdef\n")
    config = with_section(CONFIG, "broker", url="nats://h:1", token_file=str(tmp_path / "token"))
    config = with_section(config, "agent_loop", run_key_file=str(tmp_path / "key"), bind="0.0.0.0")
    return config.model_copy(
        update={"store": Store(url="s3://bucket", credentials_file=str(tmp_path / "credentials"))}
    )


def test_secrets_travel_by_themselves_and_are_in_memory_where_they_arrive(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    task = host_task(config, "harness", 0, "chat", "journal")
    assert "0123456789abcdef" not in task.config
    assert "0123456789abcdef" not in repr(task)
    for name in ("token", "key", "credentials"):
        (tmp_path / name).unlink()  # as on a node that never had them
    here = placed(RunConfig.model_validate_json(task.config), task, "10.1.2.3")
    paths = [here.broker.token_file, here.store.credentials_file, here.agent_loop.run_key_file]
    assert [Path(path).read_text() for path in paths] == [
        f"{name}-0123456789abcdef" for name in ("token", "credentials", "key")
    ]
    # Read twice, as a connection that is made anew reads it; and by no child.
    assert Path(paths[0]).read_text().startswith("token-")
    code = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in range(256)])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], close_fds=False, capture_output=True, text=True, check=True
    )
    assert "memfd:" not in done.stdout
    assert here.engine.token_file == ""
    assert here.agent_loop.advertise == "10.1.2.3"
    assert here.agent_loop.journal_dir == str(tmp_path / "packtrain-journal")


def test_what_is_configured_stays(config: RunConfig) -> None:
    config = with_section(config, "agent_loop", advertise="hosts.example", journal_dir="/somewhere")
    here = placed(config, host_task(config, "agent-loop", 0, "", ""), "10.1.2.3")
    assert (here.agent_loop.advertise, here.agent_loop.journal_dir) == ("hosts.example", "/somewhere")
    config = with_section(config, "agent_loop", advertise="", bind="10.0.0.9")
    assert placed(config, host_task(config, "agent-loop", 0, "", ""), "10.1.2.3").agent_loop.advertise == ""


def test_a_secret_that_cannot_be_read_is_named_by_its_key(config: RunConfig) -> None:
    Path(config.agent_loop.run_key_file).unlink()
    with pytest.raises(SecretUnreadable, match=r"agent_loop\.run_key_file"):
        host_task(config, "harness", 0, "chat", "")


def test_journals_of_somebody_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert journal_directory("mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "packtrain-open").mkdir(mode=0o755)
    (tmp_path / "packtrain-link").symlink_to(tmp_path / "packtrain-mine")
    for name in ("open", "link"):
        with pytest.raises(PermissionError, match="not a directory of this user alone"):
            journal_directory(name)
    RolloutHost().clean("mine")
    assert not (tmp_path / "packtrain-mine").exists()


class Service:
    """Stands for a service's module: waits to be stopped, or fails."""

    began = threading.Event()

    @staticmethod
    async def run(
        serve: Any, config: RunConfig, name: str, index: int, pool: str, stop: asyncio.Event
    ) -> None:
        assert (name, index, pool) == ("harness-chat-0", 0, "chat")
        if config.run == "bad":
            raise OSError("no such thing")
        Service.began.set()
        await stop.wait()


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> RolloutHost:
    monkeypatch.setattr(ray_actor, "run_service", Service.run)
    monkeypatch.setattr(ray_actor, "node_address", lambda: "10.1.2.3")
    Service.began.clear()
    return RolloutHost()


@pytest.mark.parametrize("first", [True, False], ids=["asked before it runs", "asked while it runs"])
def test_a_host_that_is_asked_to_stop_ends(actor: RolloutHost, first: bool) -> None:
    if first:
        actor.stop()
    running = threading.Thread(target=actor.run, args=(host_task(CONFIG, "harness", 0, "chat", ""),))
    running.start()
    assert Service.began.wait(20)
    actor.stop()
    running.join(20)
    assert not running.is_alive()
    actor.stop()  # late is no fault
    with pytest.raises(HostFailed, match="has run in this process before"):
        actor.run(host_task(CONFIG, "harness", 0, "chat", ""))
    assert actor.where() == ("10.1.2.3", os.getpid())


@pytest.mark.usefixtures("actor")
def test_how_a_host_failed_is_one_line() -> None:
    bad = load(DEMO, [Override("", ("run",), "bad")])
    with pytest.raises(HostFailed, match=r"^OSError: no such thing$"):
        RolloutHost().run(host_task(bad, "harness", 0, "chat", ""))
    task = host_task(CONFIG, "harness", 0, "chat", "")
    with pytest.raises(HostFailed, match=r"packtrain .* is installed on this node, the launcher has 9\.9"):
        RolloutHost().run(ray_actor.HostTask(**{**task.__dict__, "version": "9.9"}))
    with pytest.raises(HostFailed, match="index 7 is out of range"):
        RolloutHost().run(host_task(CONFIG, "harness", 7, "chat", ""))


def test_a_user_of_the_broker_travels_with_the_authority_that_it_trusts(
    config: RunConfig, tmp_path: Path
) -> None:
    files = {key: str(tmp_path / key) for key in ("credentials_file", "ca_file", "cert_file", "key_file")}
    for key, path in files.items():
        Path(path).write_text(f"{key} of the launcher")
    user = with_section(config, "broker", token_file="", **files)
    task = host_task(user, "harness", 0, "chat", "")
    for path in files.values():
        Path(path).unlink()
    here = placed(RunConfig.model_validate_json(task.config), task, "10.1.2.3").broker
    for key in files:
        assert Path(getattr(here, key)).read_text() == f"{key} of the launcher"
