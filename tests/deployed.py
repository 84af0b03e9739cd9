"""What a deployment has, for tests: its keys, and a broker that knows their users alone and speaks TLS."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schemas.config import Broker
from services.cli.deploy_secrets import Given, make
from tests.backends import BACKEND
from tests.natsserver import NatsServer


class Made:
    """What the command made, and said."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.environment = directory / "se crets", directory / ".env"
        self.said: list[str] = []

    def make(self, **given) -> list[str]:
        self.said.clear()
        make(self.directory, Given(**given), self.environment, self.said.append)
        return self.said

    def content(self) -> dict[str, bytes]:
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in files}

    def changed(self, before: dict[str, bytes]) -> set[str]:
        after = self.content()
        return {name for name in {*before, *after} if before.get(name) != after.get(name)}


class SecureServer(NatsServer):
    """A server of these keys: TLS, and the users that there are."""

    def __init__(self, directory: Path, secrets: Path) -> None:
        if BACKEND != "binaries":
            pytest.skip("a server with keys of its own is a process of ours")
        super().__init__(directory)
        self.secrets = secrets
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{directory}/js" }}\n'
            f'tls {{ cert_file: "{secrets}/tls/server.pem", key_file: "{secrets}/tls/server-key.pem" }}\n'
            'include "users.conf"\n'
        )
        # An included file is looked for beside the one that includes it.
        shutil.copy(secrets / "broker" / "users.conf", directory)

    def as_user(self, kind: str, host: str = "127.0.0.1") -> Broker:
        return Broker(
            url=f"tls://{host}:{self.port}",
            credentials_file=str(self.secrets / "broker" / f"{kind}.nk"),
            ca_file=str(self.secrets / "tls" / "ca.pem"),
        )
