"""`packtrain ...` as a process that starts at once: forked from one that has imported the command line, and run no command.

Each command is a process of its own: arguments, streams, environment, directory and exit status are those of a shell, and
`services.cli.main.main` is all that it does. What only a fresh interpreter shows, as that a command imports what it needs,
is for one: `fresh`, which tests of each group of commands ask for once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import orjson

PACKTRAIN = (sys.executable, "-P", "-m", "services.cli.main")
ROOT = Path(__file__).parents[1]
_REQUEST = 1 << 20


def packtrain(
    *arguments: str | Path,
    cwd: str | Path = "/",
    stdin: str = "",
    timeout_s: float = 60.0,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """The command's status and what it printed. Raises subprocess.TimeoutExpired, having killed it."""
    argv = [str(argument) for argument in arguments]
    if fresh:
        return subprocess.run(
            [*PACKTRAIN, *argv], capture_output=True, text=True, timeout=timeout_s, cwd=cwd, input=stdin
        )
    return _forks().run(argv, str(cwd), stdin, timeout_s)


class _Forks:
    """The process that is forked, and who asks it: one command at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        # Streams of its own, none of them a terminal's: those of its forks are others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.commands import serve; serve()"],
            stdin=theirs.fileno(), stdout=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        theirs.close()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def run(
        self, argv: list[str], cwd: str, stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        with (
            self._asking,
            tempfile.TemporaryFile("w+", encoding="utf-8") as given,
            tempfile.TemporaryFile("w+", encoding="utf-8") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        ):
            given.write(stdin)
            given.seek(0)
            request = orjson.dumps({"argv": argv, "cwd": cwd, "environment": dict(os.environ)})
            socket.send_fds(self._socket, [request], [given.fileno(), out.fileno(), err.fileno()])
            pid = self._told(None)
            try:
                status = self._told(timeout_s)
            except BaseException as error:
                # A test's own timeout, too: what is told next is to be of the next command.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._told(None)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(argv, timeout_s) from None
                raise
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(argv, status, out.read(), err.read())

    def _told(self, timeout_s: float | None) -> int:
        self._socket.settimeout(timeout_s)
        told = self._socket.recv(64)
        assert told, "the process that is forked has died"
        return int(told)


@functools.cache
def _forks() -> _Forks:
    forks = _Forks()
    atexit.register(forks.close)
    return forks


def serve() -> None:
    """In the process that is forked; returns in none but a fork whose command returned."""
    import services.cli

    for module in pkgutil.iter_modules(services.cli.__path__, "services.cli."):
        importlib.import_module(module.name)
    from services.cli.main import main

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
    gc.freeze()  # a fork that collected what it shares would copy it
    with socket.socket(fileno=os.dup(0)) as asked:
        while True:
            request, streams, _, _ = socket.recv_fds(asked, _REQUEST, 3)
            if not request:
                return
            if (pid := os.fork()) == 0:
                break
            for stream in streams:
                os.close(stream)
            asked.send(b"%d" % pid)
            asked.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    given = orjson.loads(request)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["cwd"])
    sys.argv = ["packtrain", *given["argv"]]
    main()
