"""Runs a program with no network, no files but the system's, no secrets and hard limits.

Promises:
- namespaces of its own: no network interface, not even the host's loopback; no other process in sight; a read-only
  root that holds only the interpreter and the system's libraries; an empty working directory in memory;
- an empty environment, no inherited descriptor, no privilege, limits on time, memory, processes, files and output;
- when `run` returns or raises, every process that the program started is dead and nothing it wrote remains;
- it fails closed: a kernel that refuses any of this raises `SandboxUnavailable`, and the program does not run.

`run` blocks (about 50 ms for a Python program): call it on a thread. Linux >= 5.12 on x86_64 or aarch64; root, or an
ordinary user where user namespaces are allowed. Inside Docker the default seccomp profile refuses the namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.harnesses.kernel import program

_PYTHON = os.path.realpath(sys.executable)
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null")
_CHUNK = 65_536
_ARGUMENT = 131_072
"""Linux's limit on one argument of a program, with the zero byte that ends it."""

Stopped = Literal["", "wall_time", "output"]


class SandboxUnavailable(Exception):
    """The kernel refuses the isolation; the message names the step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program. `output_bytes` is for stdout and stderr together; `memory_bytes` of address space each
    process; `disk_bytes` for the working directory, which lives in memory."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 256 << 20
    output_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20
    processes: int = 16
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended. `returncode` is 128 + n when signal n killed it; `stopped` is the limit for which the
    sandbox killed it (the program's own CPU and memory limits show in its return code)."""

    returncode: int
    stdout: bytes
    stderr: bytes
    stopped: Stopped
    wall_s: float

    def describe(self) -> str:
        """One line for an error message."""
        how = f"was stopped at its {self.stopped} limit" if self.stopped else f"exited with {self.returncode}"
        return f"{how} after {self.wall_s:.2f} s; stderr ends: {self.stderr[-200:]!r}"


class Sandbox:
    """Stateless; safe to share between threads."""

    def run_python(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> Done:
        """Run Python source (standard library only) as a program; see `run`."""
        return self.run([_PYTHON, "-I", "-S", "-c", source], stdin, limits)

    def run(self, argv: Sequence[str], stdin: bytes = b"", limits: Limits | None = None) -> Done:
        """Run `argv` (argv[0] an absolute path under /usr, /bin, /lib or the interpreter's prefix) to its end.

        Raises `SandboxUnavailable` when the isolation cannot be had or argv[0] cannot be executed, ValueError for an
        `argv` that is longer, as JSON, than the kernel lets one argument be (128 KiB).
        """
        if not argv or not Path(argv[0]).is_absolute():
            raise ValueError(f"argv[0] must be an absolute path, not {list(argv)[:1]!r}")
        limits = limits or Limits()
        report, report_w = os.pipe()
        try:
            process = _spawn(argv, limits, report_w)
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(report_w)
        try:
            return _finish(process, stdin, limits, report)
        finally:
            os.close(report)
            _kill(process)


def _spawn(argv: Sequence[str], limits: Limits, report: int) -> subprocess.Popen[bytes]:
    spec = {
        "argv": list(argv),
        "binds": _binds(),
        "disk_bytes": limits.disk_bytes,
        "report": report,
        "parent": os.getpid(),
        "limits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s,
            "NPROC": limits.processes,
            "FSIZE": limits.disk_bytes,
            "NOFILE": limits.open_files,
        },
    }
    text = json.dumps(spec, ensure_ascii=False).encode()
    if len(text) >= _ARGUMENT:
        raise ValueError(
            f"the program and its arguments take {len(text)} bytes as JSON, the limit is {_ARGUMENT - 1}; pass data on stdin"
        )
    return subprocess.Popen(
        [*program("pipeline.harnesses.sandbox_launcher"), text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        pass_fds=(report,),
        start_new_session=True,
    )


def _binds() -> list[str]:
    """Paths shown inside: the system's, and the interpreter's prefix where that is elsewhere."""
    paths = [path for path in _SYSTEM if Path(path).exists()]
    prefix = os.path.realpath(sys.base_prefix)
    return paths if prefix == "/usr" or prefix.startswith("/usr/") else [*paths, prefix]


def _finish(process: subprocess.Popen[bytes], stdin: bytes, limits: Limits, report: int) -> Done:
    began = time.monotonic()
    deadline = began + limits.wall_s
    stopped, out, err, trouble = _pump(process, stdin, limits, report, deadline)
    if not stopped:
        try:
            # A program may close its outputs and run on.
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = "wall_time"
    if stopped:
        _kill(process)
    returncode = process.wait()
    if trouble:
        raise SandboxUnavailable(
            f"the sandbox could not start the program: {trouble.decode(errors='replace')}. It needs Linux >= 5.12 with "
            "namespaces: run as root, or allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in Docker, a seccomp "
            "profile that lets unshare and mount through)"
        )
    return Done(
        returncode if returncode >= 0 else 128 - returncode, out, err, stopped, time.monotonic() - began
    )


def _pump(
    process: subprocess.Popen[bytes], stdin: bytes, limits: Limits, report: int, deadline: float
) -> tuple[Stopped, bytes, bytes, bytes]:
    """Feed stdin and gather the outputs until all are closed, the deadline passes or there is too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
        report: bytearray(),
    }
    out, err, trouble = streams.values()
    stopped: Stopped = ""
    left = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for fd in streams:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map() and not stopped:
            left_s = deadline - time.monotonic()
            ready = selector.select(max(0.0, left_s))
            # Also when something is ready: a program that never stops writing a little is not given more time.
            if not ready or left_s <= 0:
                stopped = "wall_time"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    # A program need not read its input: a closed pipe ends the feeding, not the run.
                    with contextlib.suppress(BrokenPipeError):
                        left = left[os.write(key.fd, left[:_CHUNK]) :] if left else left
                        if left:
                            continue
                    selector.unregister(process.stdin)
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fd)
                streams[key.fd] += chunk
                if len(out) + len(err) > limits.output_bytes:
                    stopped = "output"
    return stopped, bytes(out), bytes(err), bytes(trouble)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher; pid 1 of the namespace dies with it, and with pid 1 everything inside."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
