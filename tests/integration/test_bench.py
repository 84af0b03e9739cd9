"""The benchmarks run, and say what they measured in the form that is compared from change to change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


STORES = ("files", "s3")
PORTER_FIGURES = {
    *(
        f"porter.reads.{kind}.cp{cp}.{store}"
        for kind in ("routing", "narrow")
        for cp in ("1", "2", "4", "8", "16", "16.worst", "16.leader")
        for store in STORES
    ),
    *(f"porter.packer.{what}.{store}" for what in ("memory", "build", "first") for store in STORES),
    "porter.packer.pack",
    *(f"porter.routing.{what}" for what in ("bytes", "memory")),
    *(f"porter.payload.{what}" for what in ("write", "read", "range")),
    "porter.window.map",
    *(f"porter.plan.{what}" for what in ("bins", "body")),
    *(f"porter.images.{what}" for what in ("uploads", "encoders")),
}
PORTER_PEERS = {
    # Where TransferQueue is installed, and where the wheel of verl is.
    *(f"porter.queue.{what}.{store}" for what in ("put", "get", "column", "window") for store in STORES),
    *(
        f"porter.plan.{peer}.{what}"
        for peer in ("verl", "slime")
        for what in ("seconds", "microbatches", "ranks", "steps")
    ),
}


def test_the_benchmark_of_the_porter_measures_all_that_it_names_on_the_least_data(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "porter.py"), "--least", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=True)
    figures = {row["name"]: row for row in json.loads(file.read_text())}
    assert figures.keys() - PORTER_PEERS == PORTER_FIGURES
    for row in figures.values():
        assert set(row) == {"name", "value", "unit", "goal", "better", "against"}
        assert row["better"] in ("higher", "lower")
        assert row["value"] > 0
        assert row["against"] > 0
        assert row["goal"] >= 0
        assert row["name"] in done.stdout
    # However busy the machine is: these are bytes and places, not seconds.
    for name in ("reads.routing.cp16.files", "reads.narrow.cp16.s3", "images.uploads", "images.encoders"):
        assert figures[f"porter.{name}"]["value"] <= figures[f"porter.{name}"]["goal"]
    assert figures["porter.routing.bytes"]["value"] < figures["porter.routing.bytes"]["against"] / 50


LOG_FIGURES = {
    "log.publish.in_flight",
    "log.publish.same_message",
    "log.publish.bursts",
    "log.publish.single",
    "log.work",
    "log.read",
    "log.always.in_flight",
    "log.always.bursts",
    "log.always.single",
    "log.write.events",
    "log.fold.events",
    "log.fold.seconds",
    "log.fold.deciding",
    "log.state.memory",
    "log.state.json",
    "log.state.growth",
    "log.state.resident",
    "log.start.snapshot",
    "log.start.refold",
}


def test_the_log_benchmark_measures_all_that_it_names_on_a_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "log.py"), "--events", "400", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT, check=True)
    figures = {row["name"]: row for row in json.loads(file.read_text())}
    assert set(figures) == LOG_FIGURES
    for row in figures.values():
        assert set(row) == {"name", "value", "unit", "goal", "better", "against"}
        assert row["better"] in ("higher", "lower")
        assert row["value"] > 0
        assert row["against"] > 0
        assert row["goal"] >= 0
        assert row["name"] in done.stdout
    # These two do not depend on how busy the machine is.
    assert figures["log.state.json"]["value"] <= figures["log.state.json"]["goal"]
    assert figures["log.state.growth"]["value"] <= figures["log.state.growth"]["goal"]


CALLS = [
    f"{protocol}.{size}" for protocol in ("chat", "messages", "responses") for size in ("small", "large")
]
CAPTURE_FIGURES = {
    *(f"capture.call.{call}{way}" for call in CALLS for way in ("", ".stream")),
    "capture.call.chat.small.burst",
    "capture.call.chat.large.first",
    "capture.call.tiny",
    "capture.call.tiny.stream",
    "capture.tokenize.growth",
    "capture.tokenize.last",
    "capture.many.lag",
    "capture.many.memory",
    "capture.many.cpu",
    "capture.rate",
    "capture.long.turn",
    "capture.long.memory",
    "capture.long.tokens",
}


def test_the_capture_benchmark_measures_all_that_it_names_with_the_least_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "capture.py"), "--least", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=True)
    figures = {row["name"]: row for row in json.loads(file.read_text())}
    # LiteLLM's rows are for who has it installed, and take its start.
    assert set(figures) == CAPTURE_FIGURES
    for row in figures.values():
        assert set(row) == {"name", "value", "unit", "goal", "better", "against"}
        assert row["better"] in ("higher", "lower")
        assert row["against"] > 0
        assert row["goal"] >= 0
        assert row["name"] in done.stdout
    # These two do not depend on how busy the machine is.
    assert figures["capture.long.memory"]["value"] <= figures["capture.long.memory"]["goal"]
    assert figures["capture.long.tokens"]["value"] >= 5_000


HOSTS_FIGURES = {
    *(f"hosts.tenants.4.{what}" for what in ("lag.p50", "lag.p99", "memory", "rate", "cpu")),
    *(f"hosts.sandbox.{n}.{what}.{q}" for n in (1, 2) for what in ("start", "stop") for q in ("p50", "p99")),
    *(f"hosts.balance.{when}.{what}" for when in ("late", "steady", "burst") for what in ("spread", "ratio")),
}


def test_the_benchmark_of_hosts_measures_all_that_it_names_with_the_least_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "hosts.py"), "--least", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=True)
    figures = {row["name"]: row for row in json.loads(file.read_text())}
    # The trials' rows are for who has Harbor installed.
    assert set(figures) == HOSTS_FIGURES
    for row in figures.values():
        assert set(row) == {"name", "value", "unit", "goal", "better", "against"}
        assert row["better"] in ("higher", "lower")
        assert row["value"] >= 0
        assert row["against"] > 0
        assert row["goal"] >= 0
        assert row["name"] in done.stdout
    # However busy the machine is: a host makes more calls than processes, in less memory, and all counts were counted.
    assert figures["hosts.tenants.4.rate"]["value"] > figures["hosts.tenants.4.rate"]["against"]
    assert figures["hosts.tenants.4.cpu"]["value"] < figures["hosts.tenants.4.cpu"]["against"] / 2
    assert figures["hosts.tenants.4.memory"]["value"] < figures["hosts.tenants.4.memory"]["against"]
    assert 1 <= figures["hosts.balance.burst.ratio"]["value"] <= 2


SIGNAL_FIGURES = {
    *(f"signal.core.{what}" for what in ("rate", "memory", "plan")),
    *(f"signal.services.{what}" for what in ("rate", "read", "resident", "last", "last.at_once", "batch")),
    *(f"signal.grader.{what}" for what in ("none", "wait", "wait.after", "wait.last", "lag", "lag.graded")),
}


def test_the_benchmark_of_the_signal_measures_all_that_it_names_with_the_least_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "signals.py"), "--least", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=True)
    figures = {row["name"]: row for row in json.loads(file.read_text())}
    assert set(figures) == SIGNAL_FIGURES
    for row in figures.values():
        assert set(row) == {"name", "value", "unit", "goal", "better", "against"}
        assert row["better"] in ("higher", "lower")
        assert row["against"] > 0
        assert row["goal"] >= 0
        assert row["name"] in done.stdout
    # However busy the machine is: the named columns are read once, and nothing else.
    assert figures["signal.services.read"]["value"] == 1.0
    assert figures["signal.core.memory"]["value"] <= figures["signal.core.memory"]["goal"]
