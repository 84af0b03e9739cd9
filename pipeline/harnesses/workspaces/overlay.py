"""Workspaces of Linux namespaces, an overlay of the host's programs, control groups, and no network but one address.

Promises, beside those of `base`:
- nothing of the host is seen but its programs (/usr and the interpreter's prefix), the mounts that the spec names, and
  what `overlay_root` lists of /etc; no process, no socket, no device, no key of it;
- memory, processes, disk and, where given, cores are limited by the kernel for all programs of a workspace together;
- every run is followed by a control group of its own, so that a limit ends all that it started, also what made a session of
  its own; what a program left when it ended by itself lives on until `close`, its outputs discarded;
- when the host is killed the kernel ends its workspaces; `sweep` of any other host removes their control groups.

Linux >= 5.12; >= 5.19 for a /usr that can be written to. Root, or an ordinary user in a delegated control group, who has one
user inside (its own, shown as root) and a /usr that is read-only. Inside Docker the default seccomp profile refuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pipeline.harnesses.blocking import on_thread
from pipeline.harnesses.workspaces import cgroups, dockerfile, overlay_files
from pipeline.harnesses.workspaces.base import Ended, Spec, Stopped, Workspace, WorkspaceFailed
from pipeline.harnesses.workspaces.outputs import Tail
from pipeline.harnesses.workspaces.overlay_process import RootProgram, memfd
from pipeline.harnesses.workspaces.relay import Relay

PORT = 28_080
"""Where `Spec.peer` listens inside: neither a port that tasks like nor one that the kernel gives to clients."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KILL_S = 10.0
_FILES_S = 600.0


class OverlayWorkspaces:
    """Stateless; one a host."""

    @asynccontextmanager
    async def open(self, spec: Spec) -> AsyncGenerator[Workspace]:
        try:
            definition = dockerfile.read(spec.definition)
        except ValueError as error:
            raise WorkspaceFailed(str(error)) from error
        workspace = OverlayWorkspace(spec, definition)
        try:
            try:
                async with asyncio.timeout(spec.start_s):
                    await workspace.start()
            except TimeoutError:
                raise WorkspaceFailed(
                    f"workspace {spec.name} was not started within {spec.start_s} s"
                ) from None
            yield workspace
        finally:
            await _to_its_end(workspace.close())

    async def sweep(self) -> int:
        def clear() -> int:
            groups = cgroups.abandoned(cgroups.find())
            return sum(cgroups.clear(group, _KILL_S) for group in groups)

        return await on_thread(clear)


class OverlayWorkspace:
    """One workspace; see `base.Workspace`."""

    def __init__(self, spec: Spec, definition: dockerfile.Definition) -> None:
        self._spec = spec
        self._definition = definition
        self._program = RootProgram()
        self._relay: Relay | None = None
        self._group: cgroups.Group | None = None
        self._outputs: set[Tail] = set()
        prefix = os.path.realpath(sys.base_prefix)
        self._prefix = "" if PurePosixPath(prefix).is_relative_to("/usr") else prefix
        path = f"{PATH}:{prefix}/bin" if self._prefix else PATH
        self._env = {"PATH": path, "LANG": "C.UTF-8", **definition.env, **spec.env}

    @property
    def workdir(self) -> str:
        return self._definition.workdir

    @property
    def writable(self) -> bool:
        """Whether programs may write to /usr."""
        return self._program.writable

    async def start(self) -> None:
        """Makes it and carries out its definition. Raises `WorkspaceFailed`."""
        spec = self._spec

        def make_groups() -> None:
            self._group = cgroups.make(cgroups.find(), spec.name, spec.limits)

        # To its end, so that `close` finds what was made.
        await _to_its_end(on_thread(make_groups))
        assert self._group is not None
        binds = [(str(mount.source.resolve()), _absolute(mount.target)) for mount in spec.mounts]
        if self._prefix:
            binds.insert(0, (self._prefix, self._prefix))
        settings = {
            "disk_bytes": spec.limits.disk_bytes,
            "binds": binds,
            "port": PORT if spec.peer else 0,
        }
        groups = self._group.procs()
        try:
            await self._program.start(settings, groups)
        finally:
            for fd in groups:
                os.close(fd)
        if spec.peer and self._program.listening:
            self._relay = Relay(spec.peer)
            await self._relay.start(self._program.listening)
        for step in self._definition.steps:
            await self._carry_out(step)

    async def _carry_out(self, step: dockerfile.Copy | dockerfile.Folder | dockerfile.Command) -> None:
        if isinstance(step, dockerfile.Folder):
            await self._act({"do": "put"}, _packed(overlay_files.pack_folder, step.path), step.path)
        elif isinstance(step, dockerfile.Copy):
            for source in step.sources:
                is_file_below = step.target.endswith("/") and not source.is_dir()
                target = step.target + source.name if is_file_below else step.target.rstrip("/") or "/"
                await self._put(source, target, step.owner)
        else:
            env = {**step.env, **self._spec.env}
            ended = await self.run(
                step.argv, timeout_s=self._spec.start_s, cwd=step.cwd, env=env, user=step.user or "root"
            )
            if ended.returncode:
                where = f"{self._spec.definition / 'Dockerfile'}, line {step.line}"
                raise WorkspaceFailed(f"{where}: {step.argv[-1][:200]!r} {ended.describe()}")

    async def close(self) -> None:
        """Ends all that runs in it and removes it. Raises `WorkspaceFailed` when something stays."""
        try:
            if self._relay is not None:
                await self._relay.close()
            await self._program.end()
        finally:
            for output in self._outputs:
                output.close()
            group = self._group
            if group is not None and not await on_thread(cgroups.clear, group, _KILL_S):
                raise WorkspaceFailed(f"control groups {group.name} cannot be removed: {group.followed}")

    def reach(self, url: str) -> str:
        parts = urlsplit(url)
        if (parts.hostname, parts.port) != self._spec.peer:
            raise ValueError(
                f"{parts.hostname}:{parts.port} is not the address that programs may reach: {self._spec.peer}"
            )
        return urlunsplit(parts._replace(netloc=f"127.0.0.1:{PORT}"))

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> Ended:
        if not argv:
            raise ValueError("there is no program in an empty argv")
        what = {
            "do": "run",
            "argv": list(argv),
            "env": {**self._env, **(env or {})},
            "cwd": cwd or self.workdir,
            "user": user or self._definition.user or "root",
        }
        source = memfd(stdin) if stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        return await self._ended(what, source, timeout_s, output_bytes)

    async def put(self, source: Path, target: str) -> None:
        await self._put(source, target, "")

    async def write(self, target: str, data: bytes, mode: int = 0o644) -> None:
        await self._act(
            {"do": "put"}, _packed(overlay_files.pack_bytes, _absolute(target), mode, data), target
        )

    async def get(self, source: str, most: int) -> bytes:
        what = {"do": "get", "path": _absolute(source), "most": most}
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        ended = await self._ended(what, null, _FILES_S, most + 1)
        if ended.returncode in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise FileNotFoundError(f"{source} is no file in the workspace")
        if ended.returncode:
            raise WorkspaceFailed(f"get {source}: {ended.describe()}")
        if len(ended.stdout) > most:
            raise ValueError(f"{source} has more than {most} bytes")
        return ended.stdout

    async def peak_bytes(self) -> int:
        return self._group.peak_bytes() if self._group else 0

    async def _put(self, source: Path, target: str, owner: str) -> None:
        pack = _packed(overlay_files.pack, str(source), _absolute(target))
        await self._act({"do": "put", "owner": owner}, pack, target)

    async def _act(self, what: dict[str, Any], writing: Callable[[int], None], target: str) -> None:
        """Unpacks inside what `writing` writes to a descriptor, on a thread."""
        reading, into = os.pipe2(os.O_CLOEXEC)
        sent = asyncio.ensure_future(on_thread(writing, into))
        try:
            ended = await self._ended(what, reading, _FILES_S, 1 << 12)
        finally:
            # With the program dead the pipe has no reader: the thread ends at once.
            failed = (await asyncio.gather(sent, return_exceptions=True))[0]
        # A pipe that broke says no more than what is told inside.
        if failed is not None and not isinstance(failed, BrokenPipeError):
            raise failed
        if ended.returncode:
            raise WorkspaceFailed(
                f"put {target}: {ended.stderr.decode(errors='replace') or ended.describe()}"
            )

    async def _ended(self, what: dict[str, Any], stdin: int, timeout_s: float, output_bytes: int) -> Ended:
        """Runs a program to its end or its limit; takes `stdin` over."""
        fds = [stdin]
        outputs: list[Tail] = []
        try:
            if self._group is None:
                raise WorkspaceFailed("the workspace is not started")
            for _ in range(2):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                fds.append(theirs)
                outputs.append(Tail(ours, output_bytes))
            self._outputs.update(outputs)
            ooms, began = self._group.ooms(), time.monotonic()
            run = self._group.run()
            fds.append(run.procs())
            ended = await self._program.run(what, fds)
        except BaseException:
            for output in outputs:
                output.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        stopped: Stopped = ""
        try:
            async with asyncio.timeout(timeout_s):
                status = await asyncio.shield(ended)
        except TimeoutError:
            stopped = "time"
            await _to_its_end(_killed(run))
            status = await ended
        except asyncio.CancelledError:
            await _to_its_end(_killed(run))
            raise
        finally:
            for output in outputs:
                # What lives on may go on writing: nobody wants it, but it is not killed by a closed pipe.
                output.stop()
            self._outputs = {output for output in self._outputs if not output.closed}
            run.remove()
        seconds = time.monotonic() - began
        out, err = (bytes(output.kept) for output in outputs)
        return Ended(status, out, err, stopped, seconds, self._group.ooms() > ooms)


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} is not an absolute path without ..")
    return str(PurePosixPath(path))


def _packed(pack: Callable[..., None], *arguments: Any) -> Callable[[int], None]:
    def write(fd: int) -> None:
        with open(fd, "wb") as into:
            pack(*arguments, into)

    return write


async def _killed(run: cgroups.Run) -> None:
    deadline = time.monotonic() + _KILL_S
    while not run.kill():
        if time.monotonic() > deadline:
            raise WorkspaceFailed(f"processes in {run.folder} do not end within {_KILL_S} s of SIGKILL")
        await asyncio.sleep(0.002)


async def _to_its_end(work: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
    """Awaits `work` also when the caller is cancelled meanwhile; the cancellation goes on after it."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
    if cancelled:
        raise asyncio.CancelledError
