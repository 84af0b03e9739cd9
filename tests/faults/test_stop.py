"""A service that is told to stop while it waits for the broker stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.launched import SMALL
from tests.natsserver import NatsServer, free_port

pytestmark = pytest.mark.timeout(60)


@contextmanager
def serving(name: str, config: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A service as a process, and what it says."""
    service = subprocess.Popen(
        [sys.executable, "-P", "-m", "services.cli.main", "service", name, "--config", str(config)],
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
