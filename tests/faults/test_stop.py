"""A service that is told to stop while it waits for the broker stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import SMALL
from tests.natsserver import NatsServer, free_port

pytestmark = pytest.mark.timeout(60)


def test_sigterm_while_the_broker_is_not_there(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    config = tmp_path / "run.toml"
    config.write_text(f'{SMALL}\n[broker]\nurl = "{url}"\n[store]\nurl = "file://{tmp_path}/objects"\n')
    service = subprocess.Popen(
        [sys.executable, "-P", "-m", "services.cli.main", "service", "sampler", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert service.stderr is not None
    try:
        # It says what it waits for, and from then on hears its signals.
        assert url in service.stderr.readline()
        service.send_signal(signal.SIGTERM)
        assert service.wait(10) == 0
        assert service.stderr.read() == ""
    finally:
        service.kill()
        service.wait()
        service.stderr.close()


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
    service = subprocess.Popen(
        [sys.executable, "-P", "-m", "services.cli.main", "service", "grader", "--config", str(run)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert service.stderr is not None
    try:
        while "does not serve JetStream" not in service.stderr.readline():
            assert service.poll() is None
        service.send_signal(signal.SIGTERM)
        assert service.wait(20) == 0
        assert "Traceback" not in service.stderr.read()
    finally:
        service.kill()
        service.wait()
        service.stderr.close()
        server.stop()
