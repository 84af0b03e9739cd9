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
import sys
import time
from typing import Any

import uvloop
from aiohttp import web
from lag import Lag, resident, telling

from pipeline.capture.journal import HostJournal
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.server import Capture
from pipeline.engines.client import EngineClient
from pipeline.engines.policies import TINY, policy_dir
from schemas.config import Behaviour


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

    def state() -> dict[str, Any]:
        late = lag.taken()
        gc.collect()
        return {"resident": resident(), "cpu_s": time.process_time(), "late": late}

    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    tasks = [asyncio.create_task(lag.watch()), *(asyncio.create_task(each.commit()) for each in journals)]
    urls = [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    async with telling(state) as control:
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
