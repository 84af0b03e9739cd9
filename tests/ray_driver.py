"""A launcher of rollout hosts alone, in a process of its own: `python -m tests.ray_driver CONFIG ADDRESS LOGS`.

Prints its hosts' places whenever they change, as JSON; stops them when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pipeline.config import load
from services.cli.ray_hosts import RayHosts
from services.cli.runs import host_places
from services.cli.supervise import Supervisor


async def main(file: Path, address: str, logs: Path) -> None:
    config = load(file)
    supervisor = Supervisor()

    def changed() -> None:
        print(json.dumps({"places": hosts.places, "restarts": supervisor.restarts}), flush=True)

    def say(line: str) -> None:
        print(json.dumps({"said": line}), flush=True)

    hosts = RayHosts(supervisor, say, changed)
    await hosts.connect(address)
    await hosts.check(config)
    for place in host_places(config):
        hosts.keep(config, place, f"test-{config.run}", logs / f"{place.name}.log")
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({told, supervisor.gave_up}, return_when=asyncio.FIRST_COMPLETED)
    supervisor.ending.set()
    await hosts.stop(10.0, journal=f"test-{config.run}")
    if supervisor.gave_up.done():
        supervisor.gave_up.result()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
