"""A service as it is deployed, for the benchmark of the signal.

Reads a line of JSON: `config` (of the run), `service`, `log` (a file for its log lines). Answers with {"pid"} and serves until its
standard input is closed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

from schemas.config import RunConfig
from services.process import SERVICES, run_service


async def main(given: dict[str, Any]) -> None:
    config, name, stop = RunConfig.model_validate(given["config"]), given["service"], asyncio.Event()
    serve = importlib.import_module(SERVICES[name]).serve
    serving = asyncio.create_task(run_service(serve, config, name, stop=stop))
    print(json.dumps({"pid": os.getpid()}), flush=True)
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([closed, serving], return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await serving


if __name__ == "__main__":
    line = json.loads(sys.stdin.readline())
    log = os.open(line["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    asyncio.run(main(line))
