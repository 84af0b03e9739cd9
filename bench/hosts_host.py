"""A harness host as it is deployed, with a port beside its work that says how late its loop is.

Reads a line of JSON: `config` (of the run), `pool`, `log` (a file for its log lines). Answers with {"pid", "control"} and
serves until its standard input is closed. GET of `control`: how late the loop ran what was due since the last time it was
asked, in seconds, sorted; resident bytes; CPU seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from lag import Lag, resident, telling

from schemas.config import RunConfig
from services import harness
from services.cli.service import label, loop_of
from services.process import run_service


async def main(given: dict[str, Any]) -> None:
    config, pool = RunConfig.model_validate(given["config"]), given["pool"]
    lag, stop = Lag(), asyncio.Event()

    def state() -> dict[str, Any]:
        return {"late": lag.taken(), "resident": resident(), "cpu_s": time.process_time()}

    watching = asyncio.create_task(lag.watch())
    name = label("harness", 0, pool)
    serving = asyncio.create_task(run_service(harness.serve, config, name, 0, pool, stop))
    async with telling(state) as control:
        print(json.dumps({"pid": os.getpid(), "control": control}), flush=True)
        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([closed, serving], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await serving
    watching.cancel()


if __name__ == "__main__":
    line = json.loads(sys.stdin.readline())
    log = os.open(line["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    with asyncio.Runner(loop_factory=loop_of("harness")) as runner:
        runner.run(main(line))
