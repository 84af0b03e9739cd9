"""Real nats-server processes for tests: JetStream on files, token auth, loopback ports that stay the same over restarts."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.config import Broker
from tests.backends import BACKEND, CONTAINERS, INSIDE, Running, given, launch, own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NatsServer:
    """Start, kill and restart one server on one directory. `jetstream` and `extra` are lines for its configuration;
    `wrap` goes before its command line (a namespace to run it in); `network` is a container's."""

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
        network: Any = None,
    ) -> None:
        own("a broker")
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.token = token or secrets.token_hex(16)
        self.directory = directory
        self._wrap, self._network = list(wrap), network
        token_file = directory / "token"
        token_file.write_text(self.token)
        self.broker = Broker(url=f"nats://127.0.0.1:{self.port}", token_file=str(token_file))
        self._config = directory / "nats.conf"
        self._config.write_text(
            f'listen: "{INSIDE}:{self.port}"\nclient_advertise: "127.0.0.1:{self.port}"\nauthorization {{ token: "{self.token}" }}\n'
            f'jetstream {{ store_dir: "{store or directory / "js"}", sync_interval: {sync}, {jetstream} }}\n{extra}\n'
        )
        self._running: Running | None = None

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def told(self) -> str:
        return (self.directory / "server.log").read_text()

    def start(self, wait: bool = True) -> None:
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
        self._running = launch(
            "nats",
            [binary, "-c", str(self._config)],
            log=self.directory / "server.log",
            directory=self.directory,
            ports=[self.port],
            wrap=self._wrap,
            network=self._network,
        )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the server greets."""
        assert self._running is not None
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self._greets():
                return
            if not self._running.alive():
                break
            time.sleep(0.02)
        self.stop()
        raise RuntimeError(f"nats-server did not start: {self.told()[-500:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._running is not None:
            self._running.end(how)
            self._running = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def _greets(self) -> bool:
        """A container's port is open before its server listens."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False


class GivenBroker(NatsServer):
    """A broker that is there, for the tests that share one."""

    def __init__(self) -> None:
        token_file = given("NATS_TOKEN_FILE")
        self.token = Path(token_file).read_text().strip()
        self.broker = Broker(url=given("NATS_URL"), token_file=token_file)

    def start(self, wait: bool = True) -> None: ...

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None: ...


def shared_broker(directory: Path) -> NatsServer:
    """The broker that tests share. None of them ends the machine, which is what syncing is for."""
    return GivenBroker() if BACKEND == "urls" else NatsServer(directory, sync="2m")


class NatsCluster:
    """Three servers that replicate each other's streams."""

    def __init__(self, directory: Path) -> None:
        own("a cluster of brokers")
        routes = [free_port() for _ in range(3)]
        token = secrets.token_hex(16)
        self._network = _network() if CONTAINERS else None
        hosts = [f"n{i}" if CONTAINERS else "127.0.0.1" for i in range(3)]
        urls = ", ".join(f'"nats://{host}:{port}"' for host, port in zip(hosts, routes, strict=True))
        self.servers = [
            NatsServer(
                directory / f"n{i}",
                token=token,
                extra=f'server_name: n{i}\ncluster {{ name: test, listen: "{INSIDE}:{port}", routes: [{urls}] }}',
                network=self._network,
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
        if self._network is not None:
            self._network.remove()

    def broker(self, node: int) -> Broker:
        """By way of one node; the client learns the others from it."""
        return self.servers[node].broker.model_copy(update={"replicas": 3})

    def leader(self, name: str | None) -> NatsServer:
        """The server of that name (`n0`), as JetStream names a stream's leader."""
        return self.servers[int((name or "")[1:])]


def _network() -> Any:
    from testcontainers.core.network import Network

    return Network().create()
