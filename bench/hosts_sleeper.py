"""A host whose tenants only live, and which remembers how many it had when: `task_index` of a tenant is its milliseconds.

Reads a line of JSON: `broker`, `run`, `name`, `capacity`, `priorities` (whether it says how full it is). Answers with
{"control", "began"} and serves until its standard input is closed. GET of `control`: {"tenants": [(when, how many from then on),
...]}. Times are of the system's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from lag import telling

from pipeline.hosts.host import Host, Place
from pipeline.hosts.metrics import Measures
from pipeline.log import Delivery, Log
from pipeline.log import pull as pulls
from pipeline.log import work as works
from schemas.config import Broker
from schemas.facts import SequenceOpened

WORK = "bench"


async def main(given: dict[str, Any]) -> None:
    log = await Log.connect(Broker.model_validate(given["broker"]), given["run"], given["name"])
    work = await log.work(WORK, SequenceOpened.type, ack_wait_s=5.0)
    host = Host(log, Place(given["name"], "harness"), given["capacity"], Measures())
    known: list[tuple[float, int]] = [(0.0, 0)]
    stop = asyncio.Event()

    async def live(delivery: Delivery) -> None:
        fact = delivery.event.fact
        assert isinstance(fact, SequenceOpened)
        known.append((time.monotonic(), host.tenants))
        await asyncio.sleep(fact.task_index / 1000)
        await delivery.ack()
        known.append((time.monotonic(), host.tenants - 1))

    serving = asyncio.create_task(host.serve(work, live, stop))
    async with telling(lambda: {"tenants": known}) as control:
        print(json.dumps({"control": control, "began": time.monotonic()}), flush=True)
        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([closed, serving], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await serving
    await log.close()


if __name__ == "__main__":
    line = json.loads(sys.stdin.readline())
    if not line["priorities"]:
        # As before an older broker: hosts are then served in turn.
        works.has_priorities = pulls.has_priorities = lambda client: False
    asyncio.run(main(line))
