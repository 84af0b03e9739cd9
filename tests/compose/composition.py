"""A composition of its own: project, ports, secrets, configuration. Compose 2 where Docker's client has it, or the older program."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from services.cli.deploy_secrets import Given, make
from tests.backends import free_ports

ROOT = Path(__file__).parents[2]
SERVER_PORTS = ("NATS", "STORE", "PROMETHEUS", "GRAFANA")
WAIT_S = 600.0
"""A busy machine is slow: how long a condition may take."""


@functools.cache
def program() -> list[str]:
    two = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if two.returncode == 0 else ["docker-compose"]


def said(*argv: str, **options) -> str:
    """What a program prints; its errors are shown when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False, **options)
    assert done.returncode == 0, f"{' '.join(argv)} exited with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


class Composition:
    """`steps`: those of the configuration that the repository has, changed in this number only."""

    def __init__(self, directory: Path, project: str, steps: int = 5) -> None:
        self.project = project
        self.secrets = directory / "secrets"
        make(self.secrets, Given(), directory / ".env", lambda _: None)
        config = directory / "run.toml"
        text = (ROOT / "infra/compose/run.toml").read_text()
        assert text.count("steps = 5\n") == 1
        config.write_text(text.replace("steps = 5\n", f"steps = {steps}\n"))
        config.chmod(0o444)
        self.ports = dict(zip(SERVER_PORTS, free_ports(len(SERVER_PORTS)), strict=True))
        self._env = {
            **os.environ,
            "PACKTRAIN_SECRETS": str(self.secrets),
            "PACKTRAIN_CONFIG": str(config),
            **{f"PACKTRAIN_{name}_PORT": str(port) for name, port in self.ports.items()},
        }

    def __call__(self, *arguments: str) -> str:
        return said(*program(), "--project-name", self.project, *arguments, cwd=ROOT, env=self._env)

    def containers(self, service: str = "") -> dict[str, tuple[str, str]]:
        """Name and service by id, of those that run and those that have ended."""
        of = ("--filter", f"label=com.docker.compose.project={self.project}")
        if service:
            of += ("--filter", f"label=com.docker.compose.service={service}")
        form = '{{.ID}} {{.Names}} {{.Label "com.docker.compose.service"}}'
        listed = said("docker", "ps", "--all", "--no-trunc", *of, "--format", form)
        return {each: (name, of_) for each, name, of_ in map(str.split, listed.splitlines())}

    def state(self, container: str) -> dict:
        return json.loads(said("docker", "inspect", "--format", "{{json .State}}", container))

    def measured(self, expression: str) -> float | None:
        """What Prometheus says of an expression that has one value; None when it has none."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.ports['PROMETHEUS']}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def reading(self, *command: str) -> str:
        """A reading command on this machine, with a reader's credentials."""
        given = (
            *("--nats", f"tls://127.0.0.1:{self.ports['NATS']}"),
            *("--nats-credentials", str(self.secrets / "broker/reader.nk")),
            *("--nats-ca", str(self.secrets / "tls/ca.pem")),
            *("--run", "demo"),
        )
        return said(sys.executable, "-m", "services.cli.main", *command, *given, cwd=ROOT)

    def facts(self, fact: str) -> list[dict]:
        listed = self.reading("events", "list", "--json", "--type", fact)
        return [json.loads(line) for line in listed.splitlines()]

    def trained(self) -> list[int]:
        return [each["data"]["step"] for each in self.facts("step.trained")]

    def logs(self, container: str) -> str:
        done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def ended(self) -> bool:
        """Whether the run is over, and all of its services with it."""
        states = {name: self.state(name) for name in self.containers("trainer")}
        return bool(states) and all(each["Status"] == "exited" for each in states.values())

    def left(self) -> list[str]:
        """Everything of the engine that is this project's."""
        of = ("--filter", f"label=com.docker.compose.project={self.project}", "--quiet")
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [each for kind in kinds for each in said("docker", *kind, *of).split()]


def until(condition: Callable[[], object], what: str, every_s: float = 1.0) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:.0f} s"
        time.sleep(every_s)
