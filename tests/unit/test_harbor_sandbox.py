"""What a sandbox makes of an environment of Harbor's interface; this one runs the bash of this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.harnesses.workspaces import harbor_sandbox
from pipeline.harnesses.workspaces.base import WorkspaceFailed
from pipeline.harnesses.workspaces.harbor_sandbox import Loop, Sandbox

THERE = Loop()
NAPS = str(100_000 + secrets.randbelow(1_000_000))
"""Seconds that only this run sleeps."""


@dataclass
class Local:
    """As a provider that mounts nothing; `commands` is what an engine would have on its command line."""

    commands: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    broken: str = ""
    capabilities: Any = field(default_factory=lambda: SimpleNamespace(mounted=False))

    async def exec(self, command: str, timeout_sec: int, user: str | None) -> Any:
        self.commands.append(command)
        if self.broken == "hangs":
            await asyncio.Event().wait()
        if self.broken:
            raise RuntimeError(f"its client said:\n{self.broken}")
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        return SimpleNamespace(stdout=out.decode(errors="replace"))

    async def upload_file(self, source: Path, target: str) -> None:
        self.uploads.append(target)
        shutil.copyfile(source, target)

    async def upload_dir(self, source: Path, target: str) -> None:
        shutil.copytree(source, target, dirs_exist_ok=True)


async def made(host: str = "", port: int = 0) -> tuple[Sandbox, Local]:
    local = Local()
    sandbox = Sandbox(THERE, local, "local", host, port)
    await sandbox.begin()
    return sandbox, local


async def test_a_short_program_is_a_command_and_one_with_secrets_a_file() -> None:
    sandbox, local = await made("127.0.0.1", 28080)
    assert sandbox.workdir == str(Path.cwd())
    ended = await sandbox.run(["sh", "-c", "cat; echo $0"], timeout_s=20)
    assert (ended.stdout, local.uploads) == (b"sh\n", [])

    url = sandbox.reach("http://10.0.0.1:900/s/s3cret/v1")
    assert url == "http://127.0.0.1:28080/s/s3cret/v1"
    for program in (
        sandbox.run(["sh", "-c", "echo $K"], timeout_s=20, env={"K": "s3cret"}),
        sandbox.run(["cat"], timeout_s=20, stdin=b"s3cret"),
        sandbox.run(["echo", f"at {url}"], timeout_s=20),
        sandbox.run(["sh", "-c", "echo s3cret ${#0}", "x" * 100_000], timeout_s=20, env={"A": "b"}),
    ):
        assert b"s3cret" in (await program).stdout
    assert not [command for command in local.commands if "s3cret" in command]
    assert len(local.uploads) == 4
    assert not [file for file in local.uploads if Path(file).exists()]


def test_an_address_is_written_as_a_program_inside_writes_it() -> None:
    for host, port, given, seen in (
        ("", 0, "http://10.1.1.1:80/x?y", "http://10.1.1.1:80/x?y"),
        ("gateway", 0, "http://10.1.1.1:80/x", "http://gateway:80/x"),
        ("fd00::1", 0, "https://h/x", "https://[fd00::1]/x"),
    ):
        assert Sandbox(THERE, Local(), "local", host, port).reach(given) == seen


async def test_one_that_is_cancelled_is_killed() -> None:
    sandbox, _ = await made()
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", f"sleep {NAPS} & sleep {NAPS}"], timeout_s=100))
    async with asyncio.timeout(20):
        while len(sleeping()) < 2:
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sleeping() == []


def sleeping() -> list[str]:
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [path.parent.name for path in found if _words(path) == [b"sleep", NAPS.encode()]]


def _words(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")[:2]
    except OSError:
        return []


async def test_files_keep_their_bytes_and_mode(tmp_path: Path) -> None:
    sandbox, _ = await made()
    await sandbox.write(str(tmp_path / "it's" / "run"), b"\x00\xff", 0o750)
    assert (tmp_path / "it's" / "run").stat().st_mode & 0o777 == 0o750
    assert await sandbox.get(str(tmp_path / "it's" / "run"), 2) == b"\x00\xff"
    await sandbox.put(tmp_path / "it's", str(tmp_path / "copy"))
    assert await sandbox.get(str(tmp_path / "copy" / "run"), 2) == b"\x00\xff"
    with pytest.raises(FileNotFoundError):
        await sandbox.get(str(tmp_path / "none"), 2)
    with pytest.raises(ValueError, match="over 1 bytes"):
        await sandbox.get(str(tmp_path / "copy" / "run"), 1)


async def test_a_sandbox_that_is_gone_is_no_programs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, local = await made()
    local.broken = "no such container"
    with pytest.raises(WorkspaceFailed, match="harbor:local: its client said: no such container"):
        await sandbox.run(["true"], timeout_s=20)
    local.broken = "hangs"
    monkeypatch.setattr(harbor_sandbox, "GRACE_S", 0.1)
    with pytest.raises(WorkspaceFailed, match="did not answer within"):
        await sandbox.run(["true"], timeout_s=0.1)


async def test_a_signal_to_the_hosts_group_does_not_reach_an_engines_clients() -> None:
    async def client() -> int:
        process = await asyncio.create_subprocess_exec("sleep", NAPS)
        found = os.getpgid(process.pid)
        process.kill()
        await process.wait()
        return found

    assert await THERE.do(client()) != os.getpgid(0)
