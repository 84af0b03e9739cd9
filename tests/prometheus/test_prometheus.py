"""The real Prometheus with our configuration, rules and board, at real services. Its binaries are those of PACKTRAIN_PROMETHEUS, a
folder, or of PATH; on Debian, `apt-get download prometheus && dpkg -x prometheus_*.deb prometheus` has them in `prometheus/usr/bin`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from pipeline.config import dumps
from pipeline.log import Log
from schemas.config import Metrics
from tests.dashboard_parts import configured, dashboard, store
from tests.natsserver import NatsServer, free_port
from tests.recorded import demo_messages

INFRA = Path(__file__).parents[2] / "infra"
FOLDER = os.environ.get("PACKTRAIN_PROMETHEUS") or None
_SEARCH = f"{FOLDER}:{os.environ['PATH']}" if FOLDER else None
PROMETHEUS, PROMTOOL = (shutil.which(name, path=_SEARCH) for name in ("prometheus", "promtool"))
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not (PROMETHEUS and PROMTOOL),
        reason="no prometheus and promtool on PATH or in PACKTRAIN_PROMETHEUS: see this file",
    ),
]


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=INFRA / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_and_rules_are_as_prometheus_wants_them() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "rules.yml")


def test_rules_fire_when_they_should() -> None:
    promtool("test", "rules", "tests.yml")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "server", sync="2m")
    server.start()
    yield server
    server.stop()


def panels() -> Iterator[tuple[str, str, str]]:
    """(row, panel, PromQL) with what Grafana fills in."""
    row = ""
    for panel in json.loads((INFRA / "grafana/boards/packtrain.json").read_text())["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", ()):
            yield (
                row,
                panel["title"],
                target["expr"].replace("$run", "demo").replace("$__rate_interval", "20s"),
            )


async def test_board_and_rules_are_answered_from_real_services(tmp_path: Path, server: NatsServer) -> None:
    log = await Log.connect(server.broker, "demo", "test")
    await log.create()
    await store(log, demo_messages()[:-1])
    config, port, other = configured(tmp_path, server, free_port()), free_port(), free_port()
    grader_file = tmp_path / "grader.toml"
    at = f"127.0.0.1:{other}"
    grader_file.write_text(dumps(config.model_copy(update={"metrics": Metrics(bind=at)})))
    whole: dict[str, Any] = yaml.safe_load((INFRA / "prometheus/prometheus.yml").read_text())
    targets = {"dashboard": config.metrics.bind, "grader": at}
    whole["scrape_configs"] = [
        {"job_name": name, "static_configs": [{"targets": [where]}]} for name, where in targets.items()
    ]
    whole["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    whole["rule_files"] = [str(INFRA / "prometheus/rules.yml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(whole))
    assert PROMETHEUS is not None
    argv = [
        PROMETHEUS,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    grader_argv = [
        sys.executable,
        "-m",
        "services.cli.main",
        "service",
        "grader",
        "--config",
        str(grader_file),
    ]
    told = (tmp_path / "prometheus.log").open("wb")
    running: list[subprocess.Popen[bytes]] = []
    try:
        async with dashboard(tmp_path, config) as board, aiohttp.ClientSession() as http:
            board.start()
            running.append(subprocess.Popen(grader_argv, stderr=subprocess.DEVNULL))
            running.append(subprocess.Popen(argv, stderr=told, stdout=told))

            async def ask(path: str, **query: str) -> Any:
                async with http.get(f"http://127.0.0.1:{port}/api/v1/{path}", params=query) as answer:
                    said = await answer.json()
                    assert said["status"] == "success", (query, said)
                    return said["data"]

            async def holds(query: str) -> None:
                found: Any = None
                async with asyncio.timeout(90):
                    while not found:
                        await asyncio.sleep(0.2)
                        try:
                            found = (await ask("query", query=query))["result"]
                        except aiohttp.ClientError:
                            found = None

            await holds("count(up == 1) == 2")
            await holds("count_over_time(packtrain_run_step[1m]) > 3")
            await holds('packtrain_work_declared{consumer="grader"} == 1')
            rules = (await ask("rules"))["groups"]
            health = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
            assert len(health) == 12
            await holds('ALERTS{alertname="PacktrainNoStep"}')
            rules = (await ask("rules"))["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
            empty = []
            for row, panel, text in panels():
                if not (await ask("query", query=text))["result"]:
                    empty.append((row, panel))
            # The recorded run evaluated nothing, and had no failed attempts.
            assert [panel for row, panel in empty if row == "Run"] == ["Evaluation"]
            assert {panel for row, panel in empty if row == "Sources"} <= {
                "Groups decided a minute", "Failed attempts a minute",
            }  # fmt: skip
            assert [panel for row, panel in empty if row.startswith("Resources")] == []
    finally:
        for process in running:
            process.terminate()
            process.wait(20)
        told.close()
        await log.close()
