"""Runs read from anywhere: by the address of their broker and a reader's credentials, with no configuration at hand."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pipeline.config import Override, dumps, load
from pipeline.hosts.report import HostReport, Reporter
from pipeline.log import Log
from schemas.config import RunConfig
from schemas.facts import SequenceDispatched
from services.cli.begin_run import begin_run
from services.cli.main import app
from tests.deployed import Made, SecureServer
from tests.secured import nkey_pair

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
SEQUENCE = "arithmetic-000000-0"


class Deployed:
    """A run that has begun on a broker with users, and how a person elsewhere reaches it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made = Made(directory)
        self.made.make()
        self.server = SecureServer(directory / "server", self.made.directory)
        self.server.start()
        self.config: RunConfig = load(
            DEMO, [Override("", ("store", "url"), (directory / "objects").as_uri())]
        ).model_copy(update={"run": f"t{secrets.token_hex(6)}", "broker": self.server.as_user("launcher")})

    def options(self, kind: str = "reader", run: bool = True) -> list[str]:
        broker = self.server.as_user(kind)
        options = [
            "--nats", broker.url, "--nats-credentials", broker.credentials_file, "--nats-ca", broker.ca_file,
        ]  # fmt: skip
        return [*options, "--run", self.config.run] if run else options

    def command(self, *arguments: str, kind: str = "reader", run: bool = True) -> Result:
        return CliRunner().invoke(app, [*arguments, *self.options(kind, run)])

    async def fill(self) -> None:
        log = await Log.connect(self.server.as_user("launcher"), self.config.run, "test", user="launcher")
        await log.publish(
            SequenceDispatched(
                source="arithmetic", pool="chat", sample="arithmetic-000000", sequence=SEQUENCE, member=0,
                group_size=4, task_index=0,
            )
        )  # fmt: skip
        report = {"host": "agent-loop-box", "service": "agent-loop", "time": "2026-12-01T00:00:00Z"}
        assert await Reporter(log).put(HostReport.model_validate(report), within_s=20)
        await log.js.publish(f"rl.{self.config.run}.sample.rejected.arithmetic.x", b"no event")
        await log.close()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    import asyncio

    found = Deployed(tmp_path_factory.mktemp("deployed"))
    try:
        begin_run(found.config, "", 30.0, print)
        asyncio.run(found.fill())
        yield found
    finally:
        found.server.stop()


def test_a_reader_reads_all_that_there_is(deployed: Deployed) -> None:
    listed = deployed.command("runs", "list", "--json", run=False)
    assert [json.loads(line)["run"] for line in listed.stdout.splitlines()] == [deployed.config.run]
    events = deployed.command("events", "list", "--json")
    assert events.exit_code == 0, events.output
    types = [json.loads(line)["type"] for line in events.stdout.splitlines()]
    assert types == ["run.started", "sequence.dispatched"]
    traced = deployed.command("trace", SEQUENCE)
    assert traced.exit_code == 0, traced.output
    assert SEQUENCE in traced.stdout
    replayed = deployed.command("replay")
    # It was decided again, which no mixer had done: what was recorded is a test's.
    assert f"run {deployed.config.run}, 2 events" in replayed.stdout
    letters = deployed.command("dlq", "list")
    assert letters.exit_code == 0, letters.output
    limits = deployed.command("limit")
    assert "pool chat: no limit" in limits.stdout


def test_status_tells_the_hosts_that_reported(deployed: Deployed) -> None:
    told = deployed.command("status", "--json")
    assert told.exit_code == 0, told.output
    *hosts, whole = map(json.loads, told.stdout.splitlines())
    assert [host["host"] for host in hosts] == ["agent-loop-box"]
    assert whole["run"] == deployed.config.run
    broker = deployed.options(run=False)
    assert CliRunner().invoke(app, ["status", deployed.config.run, *broker]).exit_code == 0


def test_a_configuration_of_containers_is_read_with_ones_own_credentials(deployed: Deployed) -> None:
    files = ("credentials_file", "ca_file", "cert_file", "key_file")
    theirs = {"url": "tls://nats:4222", **{key: f"/run/secrets/{key}" for key in files}}
    config = deployed.config.model_copy(update={"broker": deployed.config.broker.model_copy(update=theirs)})
    file = deployed.directory / "containers.toml"
    file.write_text(dumps(config))
    told = CliRunner().invoke(app, ["status", "--json", "--config", str(file), *deployed.options(run=False)])
    assert told.exit_code == 0, told.output
    assert len(told.stdout.splitlines()) > 2
    without = CliRunner().invoke(app, ["status", "--config", str(file)])
    assert without.exit_code == 1
    assert "/run/secrets/" in without.output
    other = CliRunner().invoke(app, ["status", "--config", str(file), "--run", "another"])
    assert other.exit_code == 2
    assert f"is of run {deployed.config.run}" in other.output


def test_a_reader_changes_nothing_and_a_launcher_does(deployed: Deployed) -> None:
    refused = deployed.command("limit", "8", "--pool", "chat")
    assert refused.exit_code == 1
    assert "broker" in refused.output
    assert refused.output.count("\n") == 1
    done = deployed.command("limit", "8", "--pool", "chat", kind="launcher")
    assert done.stdout == "pool chat: 8 at once\n"
    assert "pool chat: 8 at once" in deployed.command("limit").stdout
    unknown = deployed.command("limit", "8", "--pool", "nobody", kind="launcher")
    assert unknown.exit_code == 2
    assert "pools: chat, tool" in unknown.output


def test_what_the_log_does_not_tell_is_asked_for(deployed: Deployed, tmp_path: Path) -> None:
    key = f"runs/{deployed.config.run}/payloads/arithmetic/none.safetensors"
    payload = deployed.command("payload", "show", key)
    assert payload.exit_code == 2
    assert "give --store, or --config" in payload.output
    shown = deployed.command("payload", "show", key, "--store", deployed.config.store.url)
    assert shown.exit_code == 1
    assert f"no object {key} in {deployed.config.store.url}" in shown.output
    exported = deployed.command("export", str(tmp_path / "file.tar"))
    assert exported.exit_code == 2
    assert "give it with --config" in exported.output
    assert not (tmp_path / "file.tar").exists()
    kept = deployed.command("gc", "--store", deployed.config.store.url)
    assert kept.exit_code == 2
    assert "--rejected-steps" in kept.output
    collected = deployed.command("gc", "--store", deployed.config.store.url, "--rejected-steps", "3")
    # It has read the log, of which a message is none of an event.
    assert "message 3 of the log cannot be read" in collected.output
    policy = deployed.command("store", "policy", "reader", "--store", "s3://bucket/prefix")
    assert f"bucket/prefix/runs/{deployed.config.run}/" in policy.stdout


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (["--nats", "nats://127.0.0.1:1"], 2, "names no run: give --run"),
        (["--nats", "nats://127.0.0.1:1", "--run", "a.b"], 2, "a.b"),
        (["--nats", "http://127.0.0.1:1", "--run", "a"], 2, "--nats 'http://127.0.0.1:1' is not nats://"),
        (["--nats", "nats://user:word@127.0.0.1:1", "--run", "a"], 2, "may hold no credentials"),
        (
            ["--nats", "nats://h:1", "--nats-credentials", "/a", "--nats-token-file", "/b", "--run", "a"],
            2,
            "both given",
        ),
    ],
)
def test_options_that_name_no_run_are_refused(options: list[str], status: int, told: str) -> None:
    found = CliRunner().invoke(app, ["status", *options])
    assert found.exit_code == status
    assert told in found.output
    assert "word" not in found.output


def test_what_is_wrong_with_an_option_is_told_by_its_name(deployed: Deployed, tmp_path: Path) -> None:
    broker = deployed.server.as_user("reader")
    stranger = tmp_path / "stranger.nk"
    stranger.write_text(nkey_pair()[0])
    files = {"--nats-credentials": broker.credentials_file, "--nats-ca": broker.ca_file}
    wrong = {
        "--nats-credentials": [
            str(tmp_path / "none"),
            str(stranger),
            deployed.server.as_user("grader").credentials_file,
            "",
        ],
        "--nats-ca": [str(tmp_path / "none"), ""],
    }
    for option, values in wrong.items():
        for value in values:
            given = [word for pair in {**files, option: value}.items() if pair[1] for word in pair]
            for command in (["status", "--run", deployed.config.run], ["runs", "list"]):
                told = CliRunner().invoke(app, [*command, "--nats", broker.url, *given])
                assert (told.exit_code, told.output.count("\n")) == (1, 1), told.output
                assert "broker." not in told.output
                # Of a user that is known the broker says which right it lacks.
                assert option in told.output or "does not let user 'reader' publish" in told.output
                assert "does not serve JetStream" not in told.output
    file = deployed.directory / "away.toml"
    file.write_text(dumps(deployed.config).replace(deployed.config.broker.ca_file, "/none"))
    assert "broker.ca_file '/none'" in CliRunner().invoke(app, ["status", "--config", str(file)]).output
    store = ["--store", "s3://b/p", "--store-endpoint", "http://127.0.0.1:1", "--store-credentials", "/none"]
    told = deployed.command("payload", "show", "runs/a/payloads/b/c.safetensors", *store)
    assert "cannot read --store-credentials /none" in told.output


def test_a_store_that_is_not_here_is_not_made(deployed: Deployed, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    told = deployed.command("payload", "show", "runs/a/payloads/b/c.safetensors", "--store", nowhere.as_uri())
    assert (told.exit_code, told.output.count("\n")) == (2, 1)
    assert "is no directory of this machine" in told.output
    assert not nowhere.exists()
    for url in ("s3://b*/p", "s3://b/${aws:username}", "s3://b?x=1", "s3://b/p?x"):
        policy = deployed.command("store", "policy", "reader", "--store", url)
        assert (policy.exit_code, policy.stdout) == (2, "")
        assert "is not plain" in policy.output


def test_who_is_held_to_a_run_sees_of_others_that_there_are_some(deployed: Deployed, tmp_path: Path) -> None:
    """The users are made anew, as `packtrain secrets --run` does; the broker and its streams stay."""
    keys, users = deployed.made.directory, deployed.server.directory / "users.conf"
    another = deployed.config.model_copy(update={"run": f"{deployed.config.run}2"})
    begin_run(another, "", 30.0, print)
    before, kept = users.read_bytes(), (keys / "settings.json").read_bytes()
    try:
        deployed.server.stop()
        deployed.made.make(runs=(another.run,))
        shutil.copy(keys / "broker" / "users.conf", users)
        deployed.server.start()
        listed = deployed.command("runs", "list", "--json", run=False)
        assert listed.exit_code == 0, listed.output
        states = {row["run"]: row["state"] for row in map(json.loads, listed.stdout.splitlines())}
        assert states == {another.run: "unfinished", deployed.config.run: "not allowed"}
    finally:
        deployed.server.stop()
        users.write_bytes(before)
        (keys / "settings.json").write_bytes(kept)
        deployed.server.start()


def test_a_run_that_there_is_not_is_told(deployed: Deployed) -> None:
    found = CliRunner().invoke(app, ["status", "--run", "another", *deployed.options(run=False)])
    assert found.exit_code == 1
    assert "has no run 'another'; `packtrain runs list` tells" in found.output
    file = deployed.directory / "another.toml"
    file.write_text(dumps(deployed.config.model_copy(update={"run": "another"})))
    for command in (
        ["events", "list", "--config", str(file)],
        ["runs", "stop", "another", "--cancel", *deployed.options("launcher", run=False)],
    ):
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 1
        assert "has no run 'another'; `packtrain runs list` tells" in found.output


@pytest.mark.parametrize("arguments", [["config", "show", str(DEMO)], ["config", "schema"], ["runs", "list"]])
def test_output_that_nobody_reads_ends_the_command_quietly(arguments: list[str], tmp_path: Path) -> None:
    record = tmp_path / ".packtrain" / "runs" / "demo" / "config.toml"
    record.parent.mkdir(parents=True)
    record.write_text("no configuration")
    read, write = os.pipe()
    os.close(read)
    command = [str(Path(sys.executable).with_name("packtrain")), *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
