"""Real nats-server processes for tests: JetStream on files, token auth, loopback ports that stay the same over restarts."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from schemas.config import Broker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NatsServer:
    """Start, kill and restart one server on one directory. `jetstream` and `extra` are lines for its configuration;
    `wrap` goes before its command line (a namespace to run it in)."""

    def __init__(
        self,
        directory: Path,
        sync: str = "always",
        *,
        token: str = "",
        jetstream: str = "",
        extra: str = "",
        wrap: Sequence[str] = (),
        store: Path | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.token = token or secrets.token_hex(16)
        self.directory = directory
        self._wrap = list(wrap)
        self._token_file = directory / "token"
        self._token_file.write_text(self.token)
        self._config = directory / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nauthorization {{ token: "{self.token}" }}\n'
            f'jetstream {{ store_dir: "{store or directory / "js"}", sync_interval: {sync}, {jetstream} }}\n{extra}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def broker(self) -> Broker:
        return Broker(url=f"nats://127.0.0.1:{self.port}", token_file=str(self._token_file))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def told(self) -> str:
        return (self.directory / "server.log").read_text()

    def start(self, wait: bool = True) -> None:
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
        with (self.directory / "server.log").open("ab") as log:
            argv = [*self._wrap, binary, "-c", str(self._config)]
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the port answers."""
        assert self._process is not None
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"nats-server did not start: {self.told()[-500:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)


class NatsCluster:
    """Three servers that replicate each other's streams."""

    def __init__(self, directory: Path) -> None:
        routes = [free_port() for _ in range(3)]
        token = secrets.token_hex(16)
        urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = [
            NatsServer(
                directory / f"n{i}",
                token=token,
                extra=f'server_name: n{i}\ncluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{urls}] }}',
            )
            for i, port in enumerate(routes)
        ]

    def start(self) -> None:
        for server in self.servers:
            server.start(wait=False)
        for server in self.servers:
            server.wait()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def broker(self, node: int) -> Broker:
        """By way of one node; the client learns the others from it."""
        return self.servers[node].broker.model_copy(update={"replicas": 3})

    def leader(self, name: str | None) -> NatsServer:
        """The server of that name (`n0`), as JetStream names a stream's leader."""
        return self.servers[int((name or "")[1:])]
