"""A real nats-server process for tests: JetStream on files, token auth, a loopback port that stays the same over restarts."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from schemas.config import Broker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NatsServer:
    """Start, kill and restart one server on one directory."""

    def __init__(self, directory: Path, sync: str = "always") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.token = secrets.token_hex(16)
        self.directory = directory
        self._token_file = directory / "token"
        self._token_file.write_text(self.token)
        self._config = directory / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nauthorization {{ token: "{self.token}" }}\n'
            f'jetstream {{ store_dir: "{directory}/js", sync_interval: {sync} }}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def broker(self) -> Broker:
        return Broker(url=f"nats://127.0.0.1:{self.port}", token_file=str(self._token_file))

    def start(self) -> None:
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"nats-server did not start: {(self.directory / 'server.log').read_text()[-500:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)
