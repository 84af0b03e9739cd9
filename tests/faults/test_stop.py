"""Services that are told to stop: each kind in a run, and one that waits for its broker. All that they say is one format."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import orjson
import pytest

from pipeline.log import Log
from schemas.config import Broker
from services.process import SERVICES
from tests.launched import SMALL
from tests.natsserver import NatsServer, free_port

pytestmark = pytest.mark.timeout(180)


@contextmanager
def serving(name: str, config: Path, *given: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A service as a process, and what it says."""
    service = subprocess.Popen(
        [sys.executable, "-P", "-m", "services.cli.main", "service", name, "--config", str(config), *given],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert service.stderr is not None
    try:
        yield service, service.stderr
    finally:
        service.kill()
        service.wait()
        service.stderr.close()


def test_sigterm_while_the_broker_is_not_there(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    config = tmp_path / "run.toml"
    config.write_text(f'{SMALL}\n[broker]\nurl = "{url}"\n[store]\nurl = "file://{tmp_path}/objects"\n')
    with serving("sampler", config) as (service, told):
        # It says what it waits for, and from then on hears its signals.
        assert url in told.readline()
        service.send_signal(signal.SIGTERM)
        assert service.wait(10) == 0
        assert told.read() == ""


def test_sigterm_while_the_broker_does_not_serve_jetstream(tmp_path: Path) -> None:
    """A service that waits, as it will for however long that lasts, stops all the same."""
    server = NatsServer(tmp_path / "server")
    config = tmp_path / "server" / "nats.conf"
    lines = config.read_text().splitlines()
    config.write_text("".join(f"{line}\n" for line in lines if "jetstream" not in line))
    server.start()
    broker = f'url = "{server.broker.url}"\ntoken_file = "{server.broker.token_file}"'
    run = tmp_path / "run.toml"
    run.write_text(f'{SMALL}\n[broker]\n{broker}\n[store]\nurl = "file://{tmp_path}/objects"\n')
    try:
        with serving("grader", run) as (service, told):
            while "does not serve JetStream" not in told.readline():
                assert service.poll() is None
            service.send_signal(signal.SIGTERM)
            assert service.wait(20) == 0
            assert "Traceback" not in told.read()
    finally:
        server.stop()


async def test_each_service_says_that_it_is_ready_and_ends_well_when_it_is_told_to(
    tmp_path: Path, log: Log, broker: Broker
) -> None:
    """In a run that has no more than its stream: also those that have nothing to do in it."""
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    engine, where = f"http://127.0.0.1:{free_port()}", {name: f"127.0.0.1:{free_port()}" for name in SERVICES}
    sections = f"""
[broker]
url = "{broker.url}"
token_file = "{broker.token_file}"
[store]
url = "file://{tmp_path}/objects"
[engine]
url = "{engine}"
token_file = "{key}"
[trainer]
rendezvous = "127.0.0.1:{free_port()}"
"""
    text = SMALL.replace('run = "small"', f'run = "{log.run}"').replace("dp = 2", "dp = 1")
    text = text.replace("[agent_loop]", f'[agent_loop]\nrun_key_file = "{key}"')
    config = tmp_path / "run.toml"
    with tempfile.TemporaryDirectory(prefix="pt") as sockets, ExitStack() as stack:
        config.write_text(f'{text}\n{sections}[packer]\nsocket_dir = "{sockets}"\n')
        processes = {}
        for name, address in where.items():
            given = ("--metrics-bind", address, *(("--pool", "chat") if name == "harness" else ()))
            if name in ("agent-loop", "harness", "packer", "trainer"):
                given = (*given, "--index", "0")
            processes[name] = stack.enter_context(serving(name, config, *given))
        for name, (process, told) in processes.items():
            deadline = time.monotonic() + 120
            while (said := _ready(where[name])) != "ok":
                assert process.poll() is None, f"{name}: {told.read()}"
                assert time.monotonic() < deadline, f"{name}: {said}"
                time.sleep(0.05)
        for process, _ in processes.values():
            process.send_signal(signal.SIGTERM)
        ends = {name: process.wait(60) for name, (process, _) in processes.items()}
        lines = [line for _, told in processes.values() for line in told.read().splitlines()]
    assert ends == dict.fromkeys(processes, 0), "\n".join(lines)
    said = [orjson.loads(line) for line in lines]
    assert {line["run"] for line in said} == {log.run}
    assert sum(line["message"] == "stopped" for line in said) == len(processes)
    idle = {line["service"] for line in said if line["message"].startswith("nothing to do")}
    assert idle == {"teacher", "hook"}


def _ready(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=5) as answer:  # our own
            return answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.read().decode().strip()
    except OSError as error:
        return str(error)


def test_the_last_words_of_a_service_are_a_line_of_its_log(tmp_path: Path, broker: Broker) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("no token")
    config = tmp_path / "run.toml"
    given = f'[broker]\nurl = "{broker.url}"\ntoken_file = "{wrong}"\n[store]\nurl = "file://{tmp_path}/objects"\n'
    config.write_text(f"{SMALL}\n{given}")
    with serving("sampler", config) as (service, told):
        assert service.wait(20) == 1
        last = [orjson.loads(line) for line in told.read().splitlines()][-1]
    assert last["level"] == "error"
    assert "refused" in last["message"]
    assert "error" not in last
