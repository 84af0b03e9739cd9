"""A run that cannot start: one clear line, an exit status that is not 0, nothing left running. Each fault is real."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipeline.engines.policies import TINY, policy_dir
from schemas.config import Broker
from services.cli.embedded import DirectoryLock
from tests.commands import PACKTRAIN, packtrain
from tests.launched import CHAT_ONLY

ROOT = Path(__file__).parents[2]
DEMO = (ROOT / "examples" / "demo.toml").read_text()
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1
_LIBC = ctypes.CDLL(None)


def obey_permissions() -> None:
    """In a child of root, before exec: file permissions count for it as they do for anybody."""
    if os.geteuid() == 0:
        _LIBC.prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)


def left_running(directory: Path) -> list[str]:
    """Command lines of processes that name the directory."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


def refused(directory: Path, *arguments: str, status: int = 1, obeying: bool = False) -> str:
    """Runs packtrain, which must fail with this status and one line; the line. `obeying`: with no more rights than its
    files give it."""
    if obeying:
        command = [*PACKTRAIN, *arguments, "--directory", str(directory)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, cwd="/", preexec_fn=obey_permissions
        )
    else:
        done = packtrain(*arguments, "--directory", directory, timeout_s=90)
    assert done.returncode == status, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("packtrain: ")
    deadline = time.monotonic() + 10
    while left_running(directory):
        assert time.monotonic() < deadline, left_running(directory)
        time.sleep(0.05)
    return lines[0]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy directory that is complete to look at: these runs fail before anyone reads it."""
    directory = tmp_path / "policy"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def with_section(tmp_path: Path, old: str, new: str) -> str:
    assert old in DEMO
    path = tmp_path / "run.toml"
    path.write_text(DEMO.replace(old, new))
    return str(path)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused(tmp_path / "file" / "inside", "demo", obeying=True)
    assert "cannot be written: Not a directory; name another with --directory" in line


def test_a_directory_without_permission(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    line = refused(locked / "run", "demo", obeying=True)
    assert "cannot be written: Permission denied" in line


def test_a_directory_that_another_launcher_uses(tmp_path: Path, policy: Path) -> None:
    with DirectoryLock(tmp_path):
        line = refused(tmp_path, "demo", "--policy", str(policy))
    assert f"is in use by packtrain process {os.getpid()}" in line


def test_a_taken_rendezvous_port(tmp_path: Path, policy: Path, taken_port: int) -> None:
    file = with_section(tmp_path, "lr = 1e-4", f'lr = 1e-4\nrendezvous = "127.0.0.1:{taken_port}"')
    line = refused(tmp_path / "run", "run", file, "--policy", str(policy))
    assert f"trainer.rendezvous 127.0.0.1:{taken_port} cannot be listened on: it is taken" in line


def test_a_wrong_token(tmp_path: Path, policy: Path, broker: Broker) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("not-the-token")
    line = refused(
        tmp_path / "run",
        "demo",
        "--policy",
        str(policy),
        "--nats",
        broker.url,
        "--nats-token-file",
        str(wrong),
    )
    assert f"broker {broker.url} refused the token" in line
    assert "not-the-token" not in line


def test_a_token_in_the_url(tmp_path: Path, policy: Path) -> None:
    line = refused(
        tmp_path / "run",
        "demo",
        "--policy",
        str(policy),
        "--nats",
        "nats://s3cret@127.0.0.1:4222",
        status=2,
    )
    assert "--nats: broker.url: a URL may hold no credentials" in line
    assert "s3cret" not in line


@pytest.mark.parametrize("url", ["nats://", "nats://127.0.0.1:99999", "127.0.0.1:4222"])
def test_what_is_no_address_of_a_broker(tmp_path: Path, policy: Path, url: str) -> None:
    line = refused(tmp_path / "run", "demo", "--policy", str(policy), "--nats", url, status=2)
    assert f"--nats: broker.url {url!r} is not nats://host:port" in line


def test_replicas_that_the_broker_does_not_have(
    tmp_path: Path, policy: Path, broker: Broker, run_name: str
) -> None:
    given = f'[broker]\nurl = "{broker.url}"\ntoken_file = "{broker.token_file}"\nreplicas = 3\n\n[engine]'
    file = with_section(tmp_path, "[engine]", given)
    line = refused(tmp_path / "run", "run", file, "--policy", str(policy), "--run", run_name)
    assert f"cannot hold the stream of run {run_name} with replicas = 3" in line
    assert "set broker.replicas" in line


def test_a_broker_that_is_not_there(tmp_path: Path, policy: Path, closed_port: int) -> None:
    line = refused(
        tmp_path / "run", "demo", "--policy", str(policy), "--nats", f"nats://127.0.0.1:{closed_port}"
    )
    assert f"broker nats://127.0.0.1:{closed_port} is not reachable" in line


def test_a_missing_policy(tmp_path: Path, policy: Path) -> None:
    (policy / "model.safetensors").unlink()
    line = refused(tmp_path / "run", "demo", "--policy", str(policy), status=2)
    assert f"--policy: policy {str(policy)!r}: {policy} has no model.safetensors" in line
    assert "is not a directory; name tiny" in refused(
        tmp_path / "run", "demo", "--policy", str(tmp_path / "absent"), status=2
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "arithmetic"', 'kind = "chess"', "environment.kind 'chess' is neither one of"),
        ('harness = "tool"', 'harness = "no_such:Thing"', "harness 'no_such:Thing' cannot be imported"),
    ],
)
def test_what_is_named_but_not_there(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Refused before the directory is touched."""
    file = with_section(tmp_path, old, new)
    number = next(i for i, line in enumerate(Path(file).read_text().splitlines(), 1) if line == new)
    assert f"{file}:{number}: {said}" in refused(tmp_path / "run", "run", file, status=2)
    assert not (tmp_path / "run").exists()


def test_an_engine_that_is_down(tmp_path: Path, policy: Path, closed_port: int) -> None:
    file = with_section(tmp_path, "[engine]", f'[engine]\nurl = "http://127.0.0.1:{closed_port}"')
    line = refused(tmp_path / "run", "run", file, "--policy", str(policy))
    assert f"engine http://127.0.0.1:{closed_port} does not answer" in line


def test_an_engine_whose_port_is_none(tmp_path: Path, policy: Path) -> None:
    file = with_section(tmp_path, "[engine]", '[engine]\nurl = "http://127.0.0.1:99999"')
    line = refused(tmp_path / "run", "run", file, "--policy", str(policy), status=2)
    assert "engine.url 'http://127.0.0.1:99999' is not http://host:port" in line


def test_an_engine_that_is_not_healthy(tmp_path: Path, policy: Path) -> None:
    class Sick(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Sick) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = with_section(tmp_path, "[engine]", f'[engine]\nurl = "http://127.0.0.1:{server.server_port}"')
        line = refused(tmp_path / "run", "run", file, "--policy", str(policy))
        server.shutdown()
    assert "is not healthy: GET /health gave 500" in line


def test_a_store_that_cannot_be_used(tmp_path: Path, policy: Path) -> None:
    line = refused(tmp_path / "run", "demo", "--policy", str(policy), "--store", "ftp://host/path", status=2)
    assert "neither file:///path nor s3://bucket/prefix" in line


@pytest.mark.parametrize("command", [("service", "grader"), ("payload", "show", "a/b")])
def test_a_command_without_a_store(tmp_path: Path, broker: Broker, command: tuple[str, ...]) -> None:
    given = f'[broker]\nurl = "{broker.url}"\ntoken_file = "{broker.token_file}"\n\n[engine]'
    file = with_section(tmp_path, "[engine]", given)
    done = packtrain(*command, "--config", file)
    assert done.returncode == 2
    assert "store.url '' is neither file:///path nor s3://bucket/prefix" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_process_that_cannot_load_its_policy_is_given_up_with_the_log_that_says_why(tmp_path: Path) -> None:
    # Only agent-loop hosts read the tokenizer: what else has started stays, and does not start five times.
    policy = Path(shutil.copytree(policy_dir(TINY), tmp_path / "policy"))
    (policy / "tokenizer.json").write_text("{}")
    directory, file = tmp_path / "run", tmp_path / "small.toml"
    file.write_text(CHAT_ONLY)
    line = refused(directory, "run", str(file), "--plain", "--policy", str(policy))
    assert "agent-loop-0 died 5 times within 30 s" in line
    assert line.endswith(f"see {directory / 'runs' / 'small' / 'logs' / 'agent-loop-0.log'}")


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    assert "--steps: steps = 0" in refused(tmp_path / "run", "demo", "--steps", "0", status=2)
