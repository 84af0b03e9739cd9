"""A Ray cluster of one node for tests, as `ray start` makes one: real processes, ended with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.natsserver import free_port

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that are started in case somebody needs one cost seconds of CPU each.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RayCluster:
    def __init__(self, cpus: int = 8) -> None:
        # Ray's Unix sockets are below it, and their paths have 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        self._output = self.directory / "output.txt"
        argv = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats",
            "--port", self.address.partition(":")[2], "--node-ip-address", "127.0.0.1", "--num-cpus", str(cpus),
            "--include-dashboard", "false", "--object-store-memory", "100000000", "--temp-dir", str(self.directory),
        ]  # fmt: skip
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                argv, stdout=output, stderr=output, env=self.environment(), start_new_session=True
            )

    @staticmethod
    def environment() -> dict[str, str]:
        return {**os.environ, **ENVIRONMENT}

    def wait(self) -> None:
        """Until drivers can connect."""
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in self._output.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no Ray cluster: {self._output.read_text()[-1000:]}")
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Command lines of the cluster's processes, by number."""
        found: dict[int, str] = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(place.name)
                if os.getsid(pid) == self._process.pid:
                    found[pid] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def hosts(self) -> list[int]:
        """Processes of rollout hosts."""
        return [pid for pid, line in self.processes().items() if line.startswith("ray::RolloutHost")]

    def actors(self) -> list[str]:
        """Named actors of all namespaces, as another driver sees them."""
        code = "import json, sys, ray; ray.init(sys.argv[1], logging_level='ERROR'); print(json.dumps(ray.util.list_named_actors(True)))"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, self.address],
            env=self.environment(), stdout=subprocess.PIPE, check=True, timeout=60,
        )  # fmt: skip
        return sorted(actor["name"] for actor in json.loads(done.stdout.splitlines()[-1]))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        deadline = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < deadline, f"left of the cluster: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.05)
        subprocess.run(["rm", "-rf", str(self.directory)], check=True)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.stop()
