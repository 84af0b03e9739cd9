"""Overlay workspaces do what a trial needs: programs, files, users, definitions, one address. All for real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.harnesses.workspaces.base import Ended, Mount, Workspace, WorkspaceFailed
from pipeline.harnesses.workspaces.outputs import Tail
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces
from tests.workspace_parts import groups, mounts, processes, refusal, spec

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workspace(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workspace]:
    """Of no definition, shared: tests leave each other's names alone."""
    async with OverlayWorkspaces().open(spec("shared", tmp_path_factory.mktemp("none"))) as opened:
        yield opened


async def shell(workspace: Workspace, command: str, **more: object) -> Ended:
    return await workspace.run(["/bin/bash", "-c", command], timeout_s=30, **more)  # type: ignore[arg-type]


async def test_input_outputs_environment_and_exit_status_come_through(workspace: Workspace) -> None:
    ended = await workspace.run(
        ["bash", "-c", 'tr a-z A-Z; echo "$MARK" >&2; pwd; exit 3'],
        timeout_s=30,
        stdin=b"abc\n",
        env={"MARK": "given"},
        cwd="/tmp",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"ABC\n/tmp\n", b"given\n")
    assert (ended.stopped, ended.oom) == ("", False)


@pytest.mark.parametrize(
    ("argv", "status"),
    [(["no-such-program"], 127), (["/etc/passwd"], 126), (["bash", "-c", "kill -TERM $$"], 143)],
)
async def test_exit_status_is_as_a_shell_shows_it(workspace: Workspace, argv: list[str], status: int) -> None:
    assert (await workspace.run(argv, timeout_s=30)).returncode == status


async def test_there_is_a_python_whatever_the_host_has(workspace: Workspace) -> None:
    ended = await shell(workspace, f"{sys.base_prefix}/bin/python3 -c 'import json; print(6 * 7)'")
    assert ended.stdout == b"42\n", ended.describe()
    assert (await shell(workspace, "command -v python3")).returncode == 0


async def test_a_big_input_that_is_not_read_does_not_hang(workspace: Workspace) -> None:
    assert (await workspace.run(["echo", "done"], timeout_s=30, stdin=b"x" * (8 << 20))).stdout == b"done\n"


async def test_the_end_of_a_long_output_is_kept(workspace: Workspace) -> None:
    ended = await shell(workspace, "seq 200000; seq 3 >&2", output_bytes=100)
    assert len(ended.stdout) == 100
    assert ended.stdout.endswith(b"\n199999\n200000\n")
    assert ended.stderr == b"1\n2\n3\n"


async def test_a_limit_ends_all_that_a_run_started(workspace: Workspace) -> None:
    mark = "overlay-mark-timeout"
    deaf = f"trap '' TERM HUP INT; setsid bash -c 'exec -a {mark} sleep 600' & (setsid bash -c 'trap \"\" TERM; exec -a {mark} sleep 600' &) ; exec -a {mark} sleep 600"
    ended = await workspace.run(["bash", "-c", deaf], timeout_s=0.6)
    assert (ended.returncode, ended.stopped) == (137, "time")
    assert processes(mark) == []


async def test_cancelling_the_caller_ends_all_that_a_run_started(workspace: Workspace) -> None:
    mark = "overlay-mark-cancel"
    running = asyncio.create_task(
        shell(workspace, f"(setsid bash -c 'exec -a {mark} sleep 600' &); exec -a {mark} sleep 600")
    )
    await until(lambda: len(processes(mark)) >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes(mark) == []


async def test_what_a_program_left_lives_on_and_may_go_on_writing(workspace: Workspace) -> None:
    ended = await shell(
        workspace,
        "(setsid bash -c 'while [ ! -e /tmp/stop ]; do echo noise; sleep 0.01; done; touch /tmp/stopped' &) ; echo here",
    )
    assert ended.stdout.startswith((b"here\n", b"noise\n"))
    assert (
        await shell(workspace, "touch /tmp/stop; until [ -e /tmp/stopped ]; do sleep 0.01; done")
    ).returncode == 0


async def test_who_writes_on_without_end_is_held_back() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    output = Tail(reading, 10)
    output.stop()
    written, until = 0, time.monotonic() + 0.3
    while time.monotonic() < until:
        try:
            written += os.write(writing, bytes(1 << 16))
        except BlockingIOError:
            await asyncio.sleep(0)
    assert 1 << 16 < written < 4 << 20, "it goes on, and takes no more than a little of the event loop's time"
    output.close()
    os.close(writing)


async def test_no_signal_ends_a_workspace_but_its_own_end(tmp_path: Path) -> None:
    """Neither one from inside to pid 1, nor SIGTERM to all processes of a host, which ends its trials first."""
    async with OverlayWorkspaces().open(spec("signalled", tmp_path)) as workspace:
        running = asyncio.create_task(shell(workspace, "touch /tmp/here; read -t 600 <> <(:)"))
        await workspace.run(
            ["bash", "-c", "until [ -e /tmp/here ]; do read -t 0.01 <> <(:); done"], timeout_s=30
        )
        await shell(workspace, "kill -INT 1; kill -TERM 1; kill -HUP 1; true")
        own = [pid for pid in children(os.getpid()) if "overlay_init" in command(pid)]
        own = [*own, *(pid for each in own for pid in children(each))]
        assert len(own) >= 2
        assert all(os.getpgid(pid) != os.getpgid(0) for pid in own)
        for pid in own:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        assert (await shell(workspace, "kill -TERM $$")).returncode == 143
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def children(pid: int) -> list[int]:
    """Of a process whose threads started them."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_programs_run_at_the_same_time(workspace: Workspace) -> None:
    first = shell(workspace, "mkfifo /tmp/pair; echo one > /tmp/pair")
    second = shell(workspace, "until [ -p /tmp/pair ]; do sleep 0.01; done; cat /tmp/pair")
    assert [ended.stdout for ended in await asyncio.gather(first, second)] == [b"", b"one\n"]


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("", b"0 0 /root"),
        ("agent", b"1000 1000 /home/agent"),
        ("1000", b"1000 1000 /home/agent"),
        ("nobody:tty", b"65534 5 /nonexistent"),
        ("4321:99", b"4321 99 /"),
    ],
)
async def test_users_are_the_workspaces_own(workspace: Workspace, user: str, said: bytes) -> None:
    ended = await shell(workspace, 'echo "$(id -u) $(id -g) $HOME"', user=user)
    assert ended.stdout.strip() == said


async def test_an_unknown_user_is_told(workspace: Workspace) -> None:
    ended = await shell(workspace, "true", user="somebody")
    assert ended.returncode == 126
    assert b"no user 'somebody'" in ended.stderr


async def test_a_user_added_inside_runs_programs(workspace: Workspace) -> None:
    assert (await shell(workspace, "echo 'late:x:1001:1001::/tmp:/bin/sh' >> /etc/passwd")).returncode == 0
    assert (await workspace.run(["id", "-u"], timeout_s=30, user="late")).stdout == b"1001\n"


async def test_files_go_in_and_out(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "sub" / "run.sh").chmod(0o750)
    (tmp_path / "link").symlink_to("sub/run.sh")
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4096)
    await workspace.put(tmp_path, "/data/deep/here")
    await workspace.put(tmp_path / "big", "/data/one")
    await workspace.write("/data/written", b"w" * 70_000, 0o600)
    assert (
        await shell(workspace, "/data/deep/here/link; stat -c %a /data/deep/here/sub/run.sh /data/written")
    ).stdout == b"ran\n750\n600\n"
    assert await workspace.get("/data/deep/here/big", 1 << 20) == (tmp_path / "big").read_bytes()
    assert await workspace.get("/data/one", 1 << 20) == (tmp_path / "big").read_bytes()
    assert await workspace.get("/data/written", 70_000) == b"w" * 70_000


async def test_a_planted_link_is_replaced_not_followed(workspace: Workspace) -> None:
    assert (
        await shell(
            workspace, "echo kept > /tmp/kept; ln -s /tmp/kept /tmp/planted; ln -s /no/where /tmp/dangling"
        )
    ).returncode == 0
    await workspace.write("/tmp/planted", b"new")
    await workspace.write("/tmp/dangling/file", b"new")
    assert await workspace.get("/tmp/kept", 10) == b"kept\n"
    assert await workspace.get("/tmp/planted", 10) == b"new"
    assert await workspace.get("/tmp/dangling/file", 10) == b"new"


async def test_what_cannot_be_got_is_told(workspace: Workspace) -> None:
    await workspace.write("/tmp/eleven", b"x" * 11)
    assert (await shell(workspace, "mkfifo /tmp/fifo")).returncode == 0
    for path in ("/tmp/none", "/tmp", "/tmp/fifo", "/dev/zero", "/tmp/eleven/below"):
        with pytest.raises(FileNotFoundError):
            await workspace.get(path, 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        await workspace.get("/tmp/eleven", 10)
    with pytest.raises(ValueError, match="absolute path"):
        await workspace.get("../etc/passwd", 10)


async def test_what_is_not_there_cannot_be_put(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await workspace.put(tmp_path / "none", "/tmp/x")
    with pytest.raises(WorkspaceFailed, match="Is a directory"):
        await workspace.write("/tmp", b"")


async def test_peak_memory_is_measured(workspace: Workspace) -> None:
    assert (await shell(workspace, "head -c 40M /dev/zero | tail -n 1 | wc -c")).returncode == 0
    assert 30 << 20 < await workspace.peak_bytes() <= 256 << 20


async def test_a_definition_is_carried_out_and_mounts_are_read_only(tmp_path: Path) -> None:
    definition, shown = tmp_path / "definition", tmp_path / "shown"
    for folder in (definition, definition / "src", shown):
        folder.mkdir()
    (definition / "src" / "a.txt").write_text("a")
    (definition / "b.txt").write_text("b")
    (definition / "Dockerfile").write_text(
        "FROM debian:bookworm-slim\nENV GREETING=hello\nWORKDIR /work/here\nCOPY --chown=agent src/ ./\nCOPY b.txt /work/here\n"
        "RUN echo $GREETING > made && useradd -m -u 1234 dev && chmod 600 made\nUSER agent\n"
    )
    (shown / "private").write_text("shown")
    (shown / "private").chmod(0o600)
    mounts = [Mount(shown, "/opt/shown"), Mount(shown / "private", "/usr/local/bin/private")]
    async with OverlayWorkspaces().open(spec("definition", definition, mounts=mounts)) as workspace:
        assert workspace.workdir == "/work/here"
        ended = await shell(workspace, 'echo "$(id -un) $PWD $GREETING $(stat -c %U a.txt made)"')
        assert ended.stdout == b"agent /work/here hello agent\nroot\n"
        assert await workspace.get("/work/here/b.txt", 9) == b"b", (
            "into a folder that is there, as Docker does"
        )
        assert (await workspace.run(["id", "-u"], timeout_s=30, user="dev")).stdout == b"1234\n"
        ended = await shell(
            workspace, "cat /opt/shown/private /usr/local/bin/private; echo x > /opt/shown/new", user="root"
        )
        assert ended.stdout == b"shownshown"
        assert b"Read-only file system" in ended.stderr


@pytest.mark.parametrize(
    ("text", "start_s", "said"),
    [
        ("FROM x\nRUN echo why >&2; exit 5\n", 30, "line 2.*exited with 5.*why"),
        ("FROM x\nRUN exec sleep 631\n", 1.5, "not started within 1.5 s"),
        ("FROM x\nSHELL bash\n", 30, "line 2: SHELL is not known"),
    ],
)
async def test_a_start_that_fails_leaves_nothing(
    tmp_path: Path, text: str, start_s: float, said: str
) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(WorkspaceFailed, match=said):
        async with OverlayWorkspaces().open(spec("failing", tmp_path, start_s=start_s)):
            pass
    assert processes("sleep 631") == []
    assert groups("failing") == []


async def test_fifty_at_once_start_and_leave_nothing(tmp_path: Path) -> None:
    everybody = asyncio.Barrier(50)

    async def one(number: int) -> bytes:
        async with OverlayWorkspaces().open(spec(f"fifty{number}", tmp_path)) as workspace:
            await everybody.wait()
            assert (
                await shell(
                    workspace,
                    f"(setsid bash -c 'exec -a overlay-mark-fifty sleep 600' &); echo {number} > /tmp/own",
                )
            ).returncode == 0
            return await workspace.get("/tmp/own", 10)

    got = await asyncio.gather(*(one(number) for number in range(50)))
    assert got == [b"%d\n" % number for number in range(50)]
    assert processes("overlay-mark-fifty") == []
    assert mounts() == [MOUNT_POINT]
    assert [group for number in range(50) for group in groups(f"fifty{number}")] == []


async def until(holds: object, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)
