"""What the other tests of this folder stand on: the stage has no network but our socket, and leaves no process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from aiohttp import web

from tests.scaffolds.stage import refusal, staged

pytestmark = pytest.mark.skipif(refusal() != "", reason=refusal())

LOOK = """
import json, os, socket, sys, urllib.request
def reach(address):
    try:
        socket.create_connection(address, 2).close()
    except OSError as error:
        return type(error).__name__ + ": " + os.strerror(error.errno)
    return "reached"
print(json.dumps({
    "interfaces": [name for _, name in socket.if_nameindex()],
    "routes": open("/proc/net/route").read().count("\\n") - 1,
    "outside": reach(("192.0.2.1", 80)),
    "host": reach(("127.0.0.1", int(sys.argv[1]))),
    "ours": urllib.request.urlopen(sys.argv[2]).read().decode(),
    "pids": [int(p) for p in os.listdir("/proc") if p.isdigit()],
    "environment": dict(os.environ),
}))
"""


async def test_the_stage_has_no_network_but_our_socket(tmp_path: Path) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="from outside the namespace")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as host:
        async with staged(tmp_path) as stage:
            await web.SockSite(runner, stage.listening).start()
            argv = [sys.executable, "-I", "-c", LOOK, str(host.getsockname()[1]), stage.url]
            ended = await stage.run(argv, {"ONLY": "this"}, within=30)
    await runner.cleanup()
    assert ended.status == 0, ended
    seen = json.loads(ended.stdout)
    assert seen["interfaces"] == ["lo"]
    assert seen["routes"] == 0
    assert "unreachable" in seen["outside"]
    assert "refused" in seen["host"]
    assert seen["ours"] == "from outside the namespace"
    assert set(seen["pids"]) == {1, 2}
    assert seen["environment"].get("ONLY") == "this"
    assert not set(seen["environment"]) - {"ONLY", "LC_CTYPE"}


async def test_leaving_the_stage_ends_what_it_started(tmp_path: Path) -> None:
    script = "import os, sys, time; os.fork(); os.fork(); print(os.getpid(), flush=True); time.sleep(600)"
    async with staged(tmp_path) as stage:
        run = asyncio.create_task(stage.run([sys.executable, "-c", script, tmp_path.name], {}, within=60))
        async with asyncio.timeout(30):
            while _running(tmp_path.name) < 4:
                await asyncio.sleep(0.01)
    await asyncio.gather(run, return_exceptions=True)
    # The kernel kills the namespace's processes with its first one, and they take a moment to go.
    async with asyncio.timeout(30):
        while _running(tmp_path.name):
            await asyncio.sleep(0.01)


def _running(mark: str) -> int:
    """Processes of the machine with the mark among their arguments."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += mark.encode() in arguments
    return found
