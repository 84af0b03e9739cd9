"""`packtrain demo` as a person uses it: interrupted, refused, resumed, finished, started again. Real processes throughout."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import PACKTRAIN, packtrain

DEADLINE_S = 150.0


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.05)


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*PACKTRAIN, "demo", "--plain", "--steps", "2", "--directory", str(directory), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def refused(directory: Path, *arguments: str) -> str:
    done = packtrain(
        "demo", "--plain", "--steps", "2", "--directory", directory, *arguments, timeout_s=DEADLINE_S
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


def finish(process: subprocess.Popen[str], status: int) -> str:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, out + err
    return out


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
    done = packtrain("events", "list", "--json", "--directory", directory, "--run", run)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_secrets(directory: Path, pids: dict[str, int]) -> None:
    """Of a demo that runs: they are in private files and nowhere else."""
    files = sorted(path for path in (directory / "secrets").iterdir() if path.name != "nats.conf")
    assert [path.name for path in files] == ["broker-token", "engine-token-demo", "run-key-demo"]
    secrets = [path.read_text().strip() for path in files]
    assert len(set(secrets)) == 3
    for pid in pids.values():
        for place in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{place}").read_text(errors="replace")
            assert not any(secret in text for secret in secrets)


def check_files(directory: Path) -> None:
    """No file but the private ones has one of the secrets, and those are private."""
    kept = list((directory / "secrets").iterdir())
    secrets = [path.read_bytes().strip() for path in kept if path.name != "nats.conf"]
    assert secrets
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept)
    for path in directory.rglob("*"):
        if path.is_file() and path.parent.name != "secrets":
            assert not any(secret in path.read_bytes() for secret in secrets), path


@pytest.mark.timeout(600)
def test_a_run_is_interrupted_refused_resumed_and_finished_and_the_next_one_is_another(
    tmp_path: Path,
) -> None:
    process = start(tmp_path)
    until(lambda: len(record(tmp_path, "demo")["pids"]) == 12, "broker and services run")
    pids = record(tmp_path, "demo")["pids"]
    check_secrets(tmp_path, pids)

    second = refused(tmp_path)
    assert f"in use by packtrain process {process.pid}" in second

    assert process.stdout is not None
    lines = process.stdout
    until(lambda: "batch yielded" in lines.readline(), "the first batch")
    process.send_signal(signal.SIGINT)
    out = finish(process, 130)
    assert "stopping ..." in out.splitlines()
    assert "run demo is unfinished" in out
    assert running(pids) == []
    check_files(tmp_path)
    before = len(events(tmp_path, "demo"))

    said = refused(tmp_path, "--steps", "3")
    assert "run demo is unfinished and was started with other settings (steps)" in said

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
