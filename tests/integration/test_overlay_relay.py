"""The one address that a workspace reaches, through its relay: what HTTP clients and event streams need of a connection."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.harnesses.workspaces.base import Workspace
from pipeline.harnesses.workspaces.inside import PORT as INSIDE
from pipeline.harnesses.workspaces.inside import listen_inside
from pipeline.harnesses.workspaces.overlay import PORT, OverlayWorkspaces
from pipeline.harnesses.workspaces.relay import BACKLOG, MOST
from tests.workspace_parts import refusal, spec

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.asyncio(loop_scope="module"),
]

CLIENT = f"""
import hashlib, socket, sys, threading
def connected(what):
    s = socket.create_connection(('127.0.0.1', {PORT}), 20)
    s.sendall(what + b'\\n')
    return s
"""


@dataclass
class Peer:
    """An agent-loop host's place; the first line of a connection says what it is to do."""

    port: int = 0
    flooded: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what = (await reader.readline()).strip()
        if what == b"stream":
            # Each part is sent when the former was answered: what is held back would hold up both for ever.
            for part in (b"one", b"two", b"three"):
                writer.write(part)
                assert await reader.readexactly(len(part)) == part
        elif what == b"digest":
            data = await reader.read(-1)
            writer.write(hashlib.sha256(data).hexdigest().encode())
        elif what == b"flood":
            await self._flood(writer)
        elif what == b"hold":
            self.held.set()
            await reader.read(1)
            self.dropped.set()
        elif what == b"echo":
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _flood(self, writer: asyncio.StreamWriter) -> None:
        """Sends until nobody takes it, then the rest of 64 MiB."""
        whole = 64 << 20
        while self.sent < whole:
            writer.write(bytes(1 << 16))
            self.sent += 1 << 16
            try:
                await asyncio.wait_for(writer.drain(), None if self.flooded.is_set() else 0.5)
            except TimeoutError:
                self.flooded.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, backlog=512)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workspace(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workspace]:
    made = spec("relayed", tmp_path_factory.mktemp("none"), peer=("127.0.0.1", peer.port))
    async with OverlayWorkspaces().open(made) as opened:
        yield opened


async def answer(workspace: Workspace, code: str) -> bytes:
    ended = await workspace.run(["python3", "-c", CLIENT + code], timeout_s=60)
    assert ended.returncode == 0, ended.describe()
    return ended.stdout.strip()


async def test_a_url_is_rewritten_for_the_inside_and_no_other_is(workspace: Workspace, peer: Peer) -> None:
    assert (
        workspace.reach(f"http://127.0.0.1:{peer.port}/s/secret?x=1")
        == f"http://127.0.0.1:{PORT}/s/secret?x=1"
    )
    with pytest.raises(ValueError, match="not the address"):
        workspace.reach(f"http://127.0.0.1:{peer.port + 1}/s")


async def test_parts_of_a_stream_come_as_they_are_sent(workspace: Workspace) -> None:
    code = "s = connected(b'stream')\nfor n in (3, 3, 5):\n    d = s.recv(n, socket.MSG_WAITALL); print(d.decode()); s.sendall(d)\nprint(s.recv(1))"
    assert (await answer(workspace, code)).split() == [b"one", b"two", b"three", b"b''"]


async def test_an_end_of_stream_goes_on_while_the_other_way_stays_open(workspace: Workspace) -> None:
    code = "data = bytes(range(256)) * 40_000\ns = connected(b'digest'); s.sendall(data); s.shutdown(socket.SHUT_WR)\nprint(s.makefile('rb').read().decode())"
    assert (await answer(workspace, code)).decode() == hashlib.sha256(bytes(range(256)) * 40_000).hexdigest()


async def test_a_client_that_does_not_read_holds_the_sender_back(workspace: Workspace, peer: Peer) -> None:
    code = "s = connected(b'flood')\nsys.stdin.read()\nimport os, time\nwhile not os.path.exists('/tmp/read'): time.sleep(0.01)\nprint(sum(iter(lambda: len(s.recv(1 << 16)), 0)))"
    reading = asyncio.create_task(answer(workspace, code))
    await asyncio.wait_for(peer.flooded.wait(), 30)
    assert peer.sent < 24 << 20
    await workspace.write("/tmp/read", b"")
    assert int(await reading) == 64 << 20


async def test_many_connections_at_once(workspace: Workspace) -> None:
    code = "all = [connected(b'echo') for _ in range(200)]\nfor n, s in enumerate(all): s.sendall(b'%03d' % n)\nprint(all and [s.recv(3, socket.MSG_WAITALL) for s in all] == [b'%03d' % n for n in range(200)])"
    assert await answer(workspace, code) == b"True"


async def test_more_connections_than_it_may_have_are_broken_off(workspace: Workspace) -> None:
    """Each takes descriptors of the host's, which other tenants need too."""
    before = descriptors()
    code = """
some = []
try:
    for _ in range(700): some.append(connected(b'echo'))
except OSError: pass
alive = 0
for s in some:
    try:
        s.settimeout(5); s.sendall(b'x'); alive += s.recv(1) == b'x'
    except OSError: pass
print(alive)
"""
    counting = asyncio.create_task(answer(workspace, code))
    most = 0
    while not counting.done():
        most = max(most, descriptors() - before)
        await asyncio.sleep(0.02)
    assert int(await counting) <= MOST
    # Two of the relay and one of the peer, which is in this process too.
    assert most < 3 * MOST + 2 * BACKLOG + 50
    assert await answer(workspace, "s = connected(b'echo'); s.sendall(b'y'); print(s.recv(1))") == b"b'y'"


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_listening_in_another_network_leaves_the_callers_thread_in_its_own() -> None:
    """Threads for blocking calls are used again."""
    sleeper = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    try:
        there = Path(f"/proc/{sleeper.pid}/ns/net")
        here = Path("/proc/thread-self/ns/net").readlink()
        async with asyncio.timeout(20):
            while there.readlink() == here:
                await asyncio.sleep(0.01)

        def listen() -> tuple[int, Path]:
            with listen_inside(sleeper.pid, "") as listening:
                return listening.getsockname()[1], Path("/proc/thread-self/ns/net").readlink()

        assert await asyncio.to_thread(listen) == (INSIDE, here)
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", INSIDE), 5)
    finally:
        sleeper.kill()
        sleeper.wait()


async def test_a_peer_that_is_gone_shows_as_a_broken_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    async with OverlayWorkspaces().open(spec("peerless", tmp_path, peer=("127.0.0.1", port))) as workspace:
        code = "try:\n    print(connected(b'echo').recv(1))\nexcept ConnectionError: print('broken')"
        assert await answer(workspace, code) in (b"b''", b"broken")


async def test_closing_ends_the_connections(peer: Peer, tmp_path: Path) -> None:
    async with OverlayWorkspaces().open(
        spec("closing", tmp_path, peer=("127.0.0.1", peer.port))
    ) as workspace:
        running = asyncio.create_task(
            workspace.run(["python3", "-c", CLIENT + "connected(b'hold').recv(1)"], timeout_s=60)
        )
        await asyncio.wait_for(peer.held.wait(), 30)
    await asyncio.wait_for(peer.dropped.wait(), 10)
    await asyncio.gather(running, return_exceptions=True)
