"""A service that is told to stop while it waits for the broker stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import SMALL
from tests.natsserver import free_port

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
