"""The dashboard service as a process, for tests: its configuration, its answers, and a recorded run to tell of."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from pipeline.config import dumps
from pipeline.log import Log
from schemas.config import RunConfig
from tests.natsserver import NatsServer
from tests.recorded import Recorded

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]


def configured(tmp_path: Path, server: NatsServer, port: int) -> RunConfig:
    sources = [
        {"name": name, "pool": pool, "groups": 4, "environment": {"kind": name}}
        for name, pool in (("arithmetic", "chat"), ("calculator", "tool"))
    ]
    return RunConfig.model_validate(
        {
            "run": "demo",
            "directory": str(tmp_path),
            "broker": server.broker.model_dump(),
            "store": {"url": f"file://{tmp_path}/objects"},
            "metrics": {"bind": f"127.0.0.1:{port}"},
            "pools": [{"name": name, "harness": name} for name in ("chat", "tool")],
            "sources": sources,
        }
    )


class Dashboard:
    """The service's process, and what it answers."""

    def __init__(self, tmp_path: Path, config: RunConfig, http: aiohttp.ClientSession) -> None:
        self._file = tmp_path / "run.toml"
        self._file.write_text(dumps(config))
        self._url = f"http://{config.metrics.bind}"
        self._http = http
        self._stderr = tmp_path / "dashboard.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [
            sys.executable,
            "-m",
            "services.cli.main",
            "service",
            "dashboard",
            "--config",
            str(self._file),
        ]
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(argv, stderr=stderr)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int | None:
        if self._process is None:
            return None
        self._process.send_signal(how)
        status, self._process = self._process.wait(30), None
        return status

    def said(self) -> str:
        return self._stderr.read_text()

    async def get(self, path: str) -> tuple[int, str]:
        try:
            async with self._http.get(self._url + path) as answer:
                return answer.status, (await answer.text()).strip()
        except aiohttp.ClientError:
            assert self._process is not None
            assert self._process.poll() is None, self.said()
            return 0, ""

    async def numbers(self) -> Numbers:
        _, text = await self.get("/metrics")
        return {
            (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "run")): sample.value
            for family in parsed(text)
            for sample in family.samples
            if sample.labels.get("run") == "demo"
        }

    async def until(self, holds: Callable[[Numbers], bool]) -> Numbers:
        found: Numbers = {}
        try:
            async with asyncio.timeout(45):
                while not (found and holds(found)):
                    await asyncio.sleep(0.05)
                    found = await self.numbers()
        except TimeoutError:
            pytest.fail(f"never so: {found}\n{self.said()}")
        return found

    async def says(self, status: int, begins: str) -> None:
        found = (0, "")
        try:
            async with asyncio.timeout(45):
                while found[0] != status or not found[1].startswith(begins):
                    await asyncio.sleep(0.05)
                    found = await self.get("/readyz")
        except TimeoutError:
            pytest.fail(f"never {status} {begins!r}: {found}\n{self.said()}")


@asynccontextmanager
async def dashboard(tmp_path: Path, config: RunConfig) -> AsyncIterator[Dashboard]:
    async with aiohttp.ClientSession() as http:
        made = Dashboard(tmp_path, config, http)
        try:
            yield made
        finally:
            made.end(signal.SIGKILL)


async def store(log: Log, messages: Sequence[Recorded]) -> None:
    for at in range(0, len(messages), 200):
        burst = messages[at : at + 200]
        await asyncio.gather(*(log.js.publish(m.subject, m.body, headers=m.headers) for m in burst))
