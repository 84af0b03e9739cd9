"""A program as a grader: it is given the group's workspace as files, and prints the answer as JSON.

Its working directory, which is removed after it, holds
    task.json                         source, sample, task_index, environment
    group.json                        as `sample.completed`; and `left_out`, artefacts that are over `max_artefact_bytes`
    transcripts/<sequence>.json       reward, termination, generated, contexts of turns of role, text, tokens
    artefacts/<sequence>/<name>       what its trial left: a verifier's output, an agent's log

Promises:
- it runs in a process group of its own, with PATH, HOME, TMPDIR and LANG as its environment and nothing on stdin; the group is killed
  as a whole when the program ends or its time is over, so that what it started goes with it;
- its output is a file, so it waits for no reader; of it at most `MAX_ANSWER` bytes are read, more is unusable;
- what a killed service left of it, directories and programs at work in them, is ended by the next one on the machine;
- an exit status that is not 0 is a failed try, with the end of what it wrote to stderr.

It is the operator's program, and runs as the service's user: no sandbox. What it reads is hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, field_validator

from pipeline.graders.base import GraderFailed, Material, Need
from pipeline.harnesses.workspaces.owners import orphaned, owned
from pipeline.signal.grading import MAX_ANSWER, Graded, Unusable, graded, line, parse
from schemas.section import Section

_TAIL = 2000
_OURS = "grader"


class Options(Section):
    argv: tuple[str, ...] = Field(
        min_length=1,
        description="the program and its arguments; a relative path is one of the service's directory",
    )
    max_artefact_bytes: int = Field(
        default=16 << 20, ge=0, description="artefacts that are longer are left out, and named in group.json"
    )

    @field_validator("argv")
    @classmethod
    def _there(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        found = shutil.which(argv[0])
        if found is None:
            raise ValueError(
                f"{argv[0]!r} is no program that can be run: give its path, and make it executable"
            )
        # Its working directory is another.
        return (str(Path(found).absolute()), *argv[1:])


class Command:
    """The kind `command`."""

    needs: frozenset[Need] = frozenset({"transcripts", "artefacts"})

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = Options.model_validate(dict(options))
        self._cleared = False

    async def judge(self, group: Material) -> tuple[Graded, float]:
        if not self._cleared:
            self._cleared = True
            await asyncio.to_thread(clear, Path(tempfile.gettempdir()))
        root = Path(tempfile.mkdtemp(prefix=f"{owned(_OURS)}-"))
        try:
            workspace = root / "group"
            workspace.mkdir()
            await self._write(group, workspace)
            status = await _run(self._options.argv, workspace, root / "out", root / "err")
            if status:
                end = _read(root / "err", -_TAIL)
                raise GraderFailed(
                    f"{Path(self._options.argv[0]).name} ended with status {status}: {line(end[-400:])}"
                )
            try:
                return graded(group.completed, parse((root / "out").open("rb").read(MAX_ANSWER + 1))), 0.0
            except Unusable as error:
                raise GraderFailed(f"its output is not usable: {error}") from None
        finally:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    async def close(self) -> None:
        """Holds nothing."""

    async def _write(self, group: Material, workspace: Path) -> None:
        """What is long is written on threads: groups of other sources are on the same loop."""
        assert group.fetch is not None
        left_out: list[str] = []
        for sequence, artefacts in (group.artefacts or {}).items():
            for artefact in artefacts:
                if artefact.ref.bytes > self._options.max_artefact_bytes:
                    left_out.append(f"{sequence}/{artefact.name}")
                    continue
                place = workspace / "artefacts" / sequence
                place.mkdir(parents=True, exist_ok=True)
                await _whole((place / artefact.name).write_bytes, await group.fetch(artefact))
        await _whole(_describe, group, workspace, left_out)


async def _whole(write: Callable[..., object], *given: object) -> None:
    """On a thread, and to its end also when it is cancelled: what it writes is removed after it."""
    writing = asyncio.ensure_future(asyncio.to_thread(write, *given))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait({writing})


def _describe(group: Material, workspace: Path, left_out: list[str]) -> None:
    (workspace / "transcripts").mkdir()
    for said in group.transcripts:
        (workspace / "transcripts" / f"{said.sequence}.json").write_bytes(orjson.dumps(said.as_json()))
    (workspace / "task.json").write_bytes(orjson.dumps(group.task))
    told = {**group.completed.model_dump(mode="json"), "left_out": left_out}
    (workspace / "group.json").write_bytes(orjson.dumps(told))


async def _run(argv: tuple[str, ...], cwd: Path, out: Path, err: Path) -> int:
    """The exit status, negative for a signal. Nothing of the process group is left afterwards, however this ends."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath), "HOME": str(cwd), "TMPDIR": str(cwd), "LANG": "C.UTF-8",
    }  # fmt: skip
    try:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(  # noqa: ASYNC220  # it waits for the fork alone; the end is awaited below
                argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise GraderFailed(f"{argv[0]} does not start: {error}") from error
    # By its descriptor, and reaped only after the group is killed: until then its number is nobody else's.
    ended, watch, loop = asyncio.Event(), os.pidfd_open(process.pid), asyncio.get_running_loop()
    loop.add_reader(watch, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watch)
        os.close(watch)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return status


def clear(within: Path) -> None:
    """Ends the programs of services that are no more, and removes their directories."""
    left = [each for each in within.glob("packtrain-*") if _is_left(each)]
    for process in Path("/proc").glob("[0-9]*") if left else ():
        # It may end meanwhile, or be somebody else's.
        with contextlib.suppress(OSError):
            cwd = (process / "cwd").readlink()
            if any(cwd.is_relative_to(each) for each in left):
                os.kill(int(process.name), signal.SIGKILL)
    for each in left:
        shutil.rmtree(each, ignore_errors=True)


def _is_left(path: Path) -> bool:
    if f"-{_OURS}-" not in path.name or not orphaned(path.name):
        return False
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
    return False


def _read(path: Path, last: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size + last))
        return file.read(-last).decode(errors="replace")
