"""A container of Harbor's docker environment as a workspace: every promise of it, seen for real."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.harnesses.workspaces.base import EndsProcesses, Limits, Mount, Spec, WorkspaceFailed
from pipeline.harnesses.workspaces.choose import workspaces
from pipeline.harnesses.workspaces.harbor_environments import HarborEnvironments
from pipeline.harnesses.workspaces.owners import orphaned
from tests.docker.conftest import definition, left

OWNER = """
import asyncio, sys
from pathlib import Path
from pipeline.harnesses.workspaces.base import Spec
from pipeline.harnesses.workspaces.choose import workspaces

async def main():
    async with workspaces("harbor:docker", {"network": "open"}).open(Spec("owner", Path(sys.argv[1]))) as made:
        print("ready", flush=True)
        await made.run(["sleep", "1000"], timeout_s=1000)

asyncio.run(main())
"""


async def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.05)


def alive(word: str) -> list[str]:
    """Command lines of this machine, a container's among them, that have the word as an argument."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if word in words:
            found.append(" ".join(words))
    return found


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, int]]:
    """An agent-loop host, as far as a workspace sees it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + asked)
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", 0)
    async with server:
        yield "127.0.0.1", server.sockets[0].getsockname()[1]


async def test_a_program_runs_as_it_would_at_home(
    docker: HarborEnvironments, spec: Spec, tmp_path: Path
) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "file").write_text("from the host")
    mounts = (Mount(tmp_path / "shown", "/opt/$shown"),)
    async with docker.open(replace(spec, env={"A": "$B 'c"}, mounts=mounts)) as made:
        assert made.workdir == "/app"
        ended = await made.run(
            ["sh", "-c", 'echo "$A|$B|$WHERE|$(pwd)|$(id -un)"; cat; echo no >&2; exit 3'],
            timeout_s=20,
            cwd="/tmp",
            env={"B": 'it\'s "b"\n'},
            user="agent",
            stdin=b"\x00\xff\n",
        )
        assert (ended.returncode, ended.stopped, ended.oom) == (3, "", False)
        assert ended.stdout == b"$B 'c|it's \"b\"\n|image|/tmp|agent\n\x00\xff\n"
        assert ended.stderr == b"no\n"

        shown = await made.run(
            ["sh", "-c", "cat '/opt/$shown/file'; echo > '/opt/$shown/file'"], timeout_s=20
        )
        assert shown.stdout == b"from the host"
        assert b"Read-only" in shown.stderr

        long = await made.run(["sh", "-c", "seq 100000; kill -9 $$"], timeout_s=20, output_bytes=11)
        assert (long.returncode, long.stdout) == (137, b"999\n100000\n")
        lost = await made.run(["/no/such"], timeout_s=20)
        assert (lost.returncode, b"No such file" in lost.stderr) == (127, True)


async def test_files_go_in_and_come_out(docker: HarborEnvironments, spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "folder" / "below" / "x").write_bytes(b"\x00x")
    async with docker.open(spec) as made:
        await made.write("/deep/er/run.sh", b"#!/bin/sh\necho ran\n", 0o755)
        await made.put(tmp_path / "folder", "/deep/copy")
        await made.put(tmp_path / "folder" / "below" / "x", "/deep/single")
        assert (await made.run(["/deep/er/run.sh"], timeout_s=20)).stdout == b"ran\n"
        assert await made.get("/deep/copy/below/x", 2) == await made.get("/deep/single", 2) == b"\x00x"
        with pytest.raises(ValueError, match="over 1 bytes"):
            await made.get("/deep/single", 1)
        for none in ("/deep", "/deep/none"):
            with pytest.raises(FileNotFoundError):
                await made.get(none, 10)


async def test_what_is_over_its_time_or_cancelled_dies_with_all_it_started(
    docker: HarborEnvironments, spec: Spec
) -> None:
    many = "trap '' TERM; setsid sleep 4321 & (sleep 4321 &) ; echo began; sleep 4321"
    async with docker.open(spec) as made:
        ended = await made.run(["sh", "-c", many], timeout_s=1, user="agent")
        assert (ended.stopped, ended.returncode, ended.stdout) == ("time", 137, b"began\n")
        assert alive("4321") == []

        running = asyncio.ensure_future(made.run(["sh", "-c", many], timeout_s=100))
        await until(lambda: len([line for line in alive("4321") if line.startswith("sleep")]) == 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert alive("4321") == []

        assert isinstance(made, EndsProcesses)
        await made.run(["sh", "-c", "trap '' TERM; sleep 4321 & setsid sleep 4321 &"], timeout_s=20)
        assert len(alive("4321")) == 2
        await made.end_processes(0.2)
        assert alive("4321") == []
        assert (await made.run(["true"], timeout_s=20)).returncode == 0


async def test_limits_hold_and_the_workspace_lives_on(docker: HarborEnvironments, spec: Spec) -> None:
    limits = Limits(memory_bytes=256 << 20, processes=64)
    async with docker.open(replace(spec, limits=limits)) as made:
        hog = await made.run(["python3", "-c", "x = bytearray(1 << 30)"], timeout_s=20)
        assert (hog.returncode, hog.oom) == (137, True)
        bomb = await made.run(["bash", "-c", ":(){ :|:& };:; sleep 100"], timeout_s=2)
        assert bomb.stopped == "time"
        assert b"fork" in bomb.stderr
        assert (await made.run(["echo", "well"], timeout_s=20)).stdout == b"well\n"
        assert 200 << 20 < await made.peak_bytes() <= 256 << 20


async def test_it_reaches_the_session_and_nothing_else(docker: HarborEnvironments, spec: Spec) -> None:
    ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    async with served() as peer, docker.open(replace(spec, peer=peer)) as made:
        url = made.reach(f"http://{peer[0]}:{peer[1]}/s/secret/v1?a=b")
        answered = await made.run(["python3", "-c", ask, url], timeout_s=20)
        assert answered.stdout.startswith(b"GET /s/secret/v1?a=b")

        # The same server by every address that this machine has, a container's gateway among them, and the internet.
        said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
        hosts = {*said.split(), "172.17.0.1", "127.0.0.1", "1.1.1.1", "deb.debian.org"}
        assert len(hosts) >= 5
        for host in hosts:
            refused = await made.run(["python3", "-c", ask, f"http://{host}:{peer[1]}/"], timeout_s=20)
            assert refused.returncode == 1, (host, refused)


async def test_no_secret_is_on_a_command_line_of_the_host(docker: HarborEnvironments, spec: Spec) -> None:
    async with docker.open(replace(spec, peer=("127.0.0.1", 9), env={"S": "s3cret-spec"})) as made:
        url = made.reach("http://127.0.0.1:9/s/s3cret-url")
        argv = ["python3", "-c", "import time; time.sleep(4322)", "4322"]
        env = {"TOKEN": "s3cret-env", "URL": url}
        running = asyncio.ensure_future(made.run(argv, timeout_s=100, env=env, stdin=b"s3cret-in"))
        await until(lambda: bool(alive("4322")))
        assert [
            line for path in Path("/proc").glob("[0-9]*/cmdline") if "s3cret" in (line := path.read_text())
        ] == []
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # In the arguments themselves it is seen, of the program alone.
        running = asyncio.ensure_future(made.run([*argv, url], timeout_s=100))
        await until(lambda: bool(alive("4322")))
        assert [line.split()[0] for line in alive(url)] == ["python3"]
        running.cancel()
        await asyncio.wait([running])


async def test_one_that_does_not_start_in_time_or_at_all_leaves_nothing(
    docker: HarborEnvironments, tmp_path: Path
) -> None:
    for name, line, within, said in (
        ("slow", "RUN sleep 4323", 3.0, "not started within 3 s"),
        ("broken", "RUN echo it is broken; exit 3", 60.0, "it is broken"),
    ):
        with pytest.raises(WorkspaceFailed, match=said):
            async with docker.open(Spec(name, definition(tmp_path / name, line), start_s=within)):
                pytest.fail("it started")
    where = definition(tmp_path / "many")
    (where / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(WorkspaceFailed, match="services of its own"):
        async with docker.open(Spec("many", where)):
            pytest.fail("it started")
    assert left() == set()
    assert alive("4323") == []


async def test_a_cancelled_start_leaves_nothing(docker: HarborEnvironments, spec: Spec) -> None:
    async def live() -> None:
        async with docker.open(spec):
            await asyncio.Event().wait()

    # Cancelled while it is built, and while its container is made.
    for seen in ("build", "up"):
        living = asyncio.ensure_future(live())
        await until(lambda word=seen: any("packtrain-" in line for line in alive(word)))
        living.cancel()
        with pytest.raises(asyncio.CancelledError):
            await living
        assert left() == set()
        assert [line for line in alive("compose") if "packtrain-" in line] == []


async def test_what_a_killed_host_left_is_swept_and_nothing_of_a_living_one(
    docker: HarborEnvironments, spec: Spec
) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(spec.definition), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    async with docker.open(spec) as made:
        assert await owner.stdout.readline() == b"ready\n"
        assert await docker.sweep() == 0
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
        orphans = {name for name in left() if orphaned(name)}
        assert len(orphans) >= 3, "a container, a network, an image"
        assert await docker.sweep() == 1
        assert not [name for name in left() if orphaned(name)]
        assert (await made.run(["echo", "lives"], timeout_s=20)).stdout == b"lives\n"
    assert left() == set()


async def test_ten_at_once(docker: HarborEnvironments, tmp_path: Path) -> None:
    where = definition(tmp_path)

    async def one(index: int) -> bytes:
        async with docker.open(Spec(f"many-{index}", where, start_s=100)) as made:
            return (await made.run(["sh", "-c", f"echo {index} > mine; cat mine"], timeout_s=60)).stdout

    assert await asyncio.gather(*map(one, range(10))) == [f"{i}\n".encode() for i in range(10)]
    assert left() == set()


async def test_an_open_network_reaches_a_session_by_its_name(spec: Spec) -> None:
    opened = workspaces("harbor:docker", {"network": "open", "session_host": "172.17.0.1"})
    ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    async with served() as peer, opened.open(replace(spec, peer=peer)) as made:
        url = made.reach(f"http://{peer[0]}:{peer[1]}/x")
        assert url == f"http://172.17.0.1:{peer[1]}/x"
        assert (await made.run(["python3", "-c", ask, url], timeout_s=20)).stdout.startswith(b"GET /x")
    with pytest.raises(WorkspaceFailed, match="session_host"):
        async with workspaces("harbor:docker", {"network": "open"}).open(
            replace(spec, peer=("127.0.0.1", 9))
        ):
            pytest.fail("it started")


def test_names_and_settings_are_checked_when_it_is_made() -> None:
    for kind, options, said in (
        ("harbor:nowhere", {}, "Harbor has no environment 'nowhere'; it has .*docker"),
        ("harbor:docker", {"net": 1}, "net"),
        ("harbor:docker", {"settings": {"keep": True}}, "Unknown option 'keep'"),
    ):
        with pytest.raises(ValueError, match=said):
            workspaces(kind, options)


def test_a_container_of_another_machine_is_not_entered() -> None:
    from pipeline.harnesses.workspaces.inside import listen_inside

    with pytest.raises(WorkspaceFailed, match="not seen from here"):
        listen_inside(1, "0" * 64)
