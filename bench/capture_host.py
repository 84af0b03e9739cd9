"""The capture server as a process, as an agent-loop host runs it, with a second port that says how it is doing.

Reads a line of JSON: `key` (hexadecimal), `max_context`, `journal` (a directory), and `captures`, an object for each server
of this process: `engine` (its URL), `sessions` (how many to open, named s0, s1, ...), `behaviour`. Answers with a line:
their `urls`, and `control`. GET of that: resident bytes, CPU seconds, and how late the loop ran what was due since the last
time it was asked, in seconds, sorted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path

import orjson
import uvloop
from aiohttp import web

from pipeline.capture.journal import HostJournal
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.server import Capture
from pipeline.engines.client import EngineClient
from pipeline.engines.policies import TINY, policy_dir
from schemas.config import Behaviour

_DUE_S = 0.005
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Lag:
    """How late the loop is with what was due."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _DUE_S
            await asyncio.sleep(_DUE_S)
            self.late.append(loop.time() - due)

    def taken(self) -> list[float]:
        late, self.late = sorted(self.late), []
        return late


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


async def main() -> None:
    given = json.loads(sys.stdin.readline())
    renderer = load_renderer(policy_dir(TINY))
    runners: list[web.AppRunner] = []
    engines: list[EngineClient] = []
    journals: list[HostJournal] = []
    for number, each in enumerate(given["captures"]):
        engines.append(EngineClient(each["engine"]))
        journals.append(HostJournal(given["journal"], f"bench{number}"))
        capture = Capture(bytes.fromhex(given["key"]), renderer, engines[-1], given["max_context"])
        behaviour = Behaviour(**each["behaviour"])
        for session in range(each["sessions"]):
            capture.open(f"s{session}", behaviour, journal=journals[-1])
        runners.append(capture.runner(1))
    lag = Lag()

    async def state(request: web.Request) -> web.Response:
        late = lag.taken()
        gc.collect()
        told = {"resident": resident(), "cpu_s": time.process_time(), "late": late}
        return web.Response(body=orjson.dumps(told), content_type="application/json")

    beside = web.Application()
    beside.router.add_get("/", state)
    runners.append(web.AppRunner(beside, access_log=None))
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    tasks = [asyncio.create_task(lag.watch()), *(asyncio.create_task(each.commit()) for each in journals)]
    *urls, control = (f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)
    print(json.dumps({"urls": urls, "control": control}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    for runner in runners:
        await runner.cleanup()
    for engine in engines:
        await engine.close()
    for journal in journals:
        journal.close()


if __name__ == "__main__":
    uvloop.run(main())
