"""One window in a process of its own: how much memory it takes beside the window, and how long.

    python porter_build.py SPEC

SPEC is JSON: the store's configuration, the plan, rounds, and `how`: "packer" builds the window of rank 0 of micro-batch 0 as the packer
service does; "whole" fetches each row's object whole and cuts the rank's rows out of its routing, as those do that have no ranges.
Prints JSON: bytes of the window, bytes fetched, the process's memory before and at most beside it, seconds by round.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.batch.layouts import local_rows, pack_bounds
from pipeline.feed.gate import Gate
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Store as StoreConfig
from schemas.parallel import Coordinate
from schemas.plan import Plan
from services.packer.building import IN_FLIGHT, build, give_back_memory
from services.packer.steps import Revision, planned


def memory(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes. A memfd that is written and not mapped is in neither."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


async def packer(plan: Plan, store: ObjectStore) -> tuple[int, int]:
    """Bytes of the window, and bytes fetched."""
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(pp=1, pp_layers=()), packer=SimpleNamespace(columns=("routed_experts",))
    )
    event: Any = None
    context: Any = SimpleNamespace(store=store, logger=logging.getLogger("bench"))
    window = planned(plan, {}, config, Coordinate(0, 0, 0), 0, event, Revision())
    built = await build(context, window, Gate(IN_FLIGHT), lambda _: None)
    os.close(built.fd)
    return built.fact.bytes, built.fact.fetched


async def whole(plan: Plan, store: ObjectStore) -> tuple[int, int]:
    parts: list[np.ndarray[Any, Any]] = []
    scope = store.scope()
    for sequence in plan.sequences:
        names = [column.name for column in sequence.payload.columns if column.name.startswith("routed")]
        columns = await read_columns(scope, sequence.payload, names)
        tokens = sequence.contexts[0].tokens
        rows = local_rows(plan.layout, pack_bounds(plan.layout, [tokens], plan.cp, 1), plan.cp, 0)
        parts += [columns[name][rows[rows < tokens]] for name in names]
    return sum(part.nbytes for part in parts), scope.counters.bytes_read


async def main(spec: dict[str, Any]) -> None:
    plan = Plan.model_validate(spec["plan"])
    store = ObjectStore.open(StoreConfig.model_validate(spec["store"]))
    work = {"packer": packer, "whole": whole}[spec["how"]]
    give_back_memory()
    taken: list[float] = []
    before = memory("VmRSS")
    size = fetched = 0
    for _ in range(spec["rounds"]):
        began = time.perf_counter()
        size, fetched = await work(plan, store)
        taken.append(time.perf_counter() - began)
    beside = max(0, memory("VmHWM") - before)
    print(json.dumps({"bytes": size, "fetched": fetched, "beside": beside, "seconds": taken}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
