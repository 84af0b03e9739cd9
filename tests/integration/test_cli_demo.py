"""`packtrain demo` as a person uses it: interrupted, refused, resumed, finished, started again. Real processes throughout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PACKTRAIN = (sys.executable, "-P", "-m", "services.cli.main")
DEADLINE_S = 150.0


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.05)


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*PACKTRAIN, "demo", "--plain", "--steps", "2", "--directory", str(directory), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def finish(process: subprocess.Popen[str], status: int) -> str:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, out + err
    return err if status not in (0, 130) else out


def record(directory: Path, run: str) -> dict:
    try:
        return json.loads((directory / "runs" / run / "processes.json").read_text())
    except OSError:
        return {"pids": {}}


def running(pids: dict[str, int]) -> list[str]:
    return [name for name, pid in pids.items() if _command(pid)]


def _command(pid: int) -> bytes:
    """Empty for a process that is gone or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def events(directory: Path, run: str) -> list[dict]:
    command = [*PACKTRAIN, "events", "list", "--json", "--directory", str(directory), "--run", run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_a_run_is_interrupted_refused_resumed_and_finished_and_the_next_one_is_another(
    tmp_path: Path,
) -> None:
    process = start(tmp_path)
    until(lambda: len(record(tmp_path, "demo")["pids"]) == 12, "broker and services run")
    pids = record(tmp_path, "demo")["pids"]

    second = finish(start(tmp_path), 1)
    assert f"in use by packtrain process {process.pid}" in second

    assert process.stdout is not None
    lines = process.stdout
    until(lambda: "batch yielded" in lines.readline(), "the first batch")
    process.send_signal(signal.SIGINT)
    out = finish(process, 130)
    assert "stopping ..." in out.splitlines()
    assert "run demo is unfinished" in out
    assert running(pids) == []
    before = len(events(tmp_path, "demo"))

    refused = finish(start(tmp_path, "--steps", "3"), 1)
    assert "run demo is unfinished and was started with other settings (steps)" in refused

    out = finish(start(tmp_path), 0)
    assert "run demo is unfinished; it goes on where it stopped" in out
    assert "interruptions included" in next(
        line for line in out.splitlines() if line.startswith("2 steps in")
    )
    log = events(tmp_path, "demo")
    kinds = [event["type"] for event in log]
    assert len(log) > before
    assert kinds.count("run.started") == 1
    assert kinds.count("step.trained") == 2
    assert [event["data"]["reason"] for event in log if event["type"] == "run.stopped"] == ["completed"]

    following = start(tmp_path)
    until(lambda: len(record(tmp_path, "demo-2")["pids"]) == 12, "the next run")
    pids = record(tmp_path, "demo-2")["pids"]
    following.kill()  # the launcher itself, without a chance to clean up
    out, _ = following.communicate(timeout=DEADLINE_S)
    assert "run demo is complete; starting demo-2" in out
    until(lambda: not running(pids), "nothing is left")
    assert len(events(tmp_path, "demo")) == len(log)


@pytest.mark.timeout(300)
def test_secrets_are_in_private_files_and_nowhere_else(tmp_path: Path) -> None:
    process = start(tmp_path)
    until(lambda: len(record(tmp_path, "demo")["pids"]) == 12, "broker and services run")
    files = sorted(path for path in (tmp_path / "secrets").iterdir() if path.name != "nats.conf")
    assert [path.name for path in files] == ["broker-token", "engine-token-demo", "run-key-demo"]
    secrets = [path.read_text().strip() for path in files]
    assert len(set(secrets)) == 3
    for pid in record(tmp_path, "demo")["pids"].values():
        for place in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{place}").read_text(errors="replace")
            assert not any(secret in text for secret in secrets)
    process.send_signal(signal.SIGTERM)
    finish(process, 130)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "secrets").iterdir())
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.parent.name != "secrets":
            assert not any(secret.encode() in path.read_bytes() for secret in secrets), path
