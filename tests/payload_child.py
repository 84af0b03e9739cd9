"""Processes of the store's tests: what one payload costs in memory, and a writer that dies in the middle. Run with `python -m`.

`measure CONFIG...` prints, for each store, the bytes that were resident at most beyond the columns while it wrote them.
`write CONFIG`: writes the same columns. `die CONFIG`: the kernel kills it once 10 MB of a file are written.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path

import numpy as np

from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload
from schemas.config import Store
from schemas.payload import BLOCK_TOKENS

KEY = "runs/r/payloads/s/x-a1.safetensors"
ROWS = 2 * BLOCK_TOKENS
WIDTH = 128
"""Bytes of a row of each wide column."""
DIES_AT = 10_000_000


def columns(rows: int = ROWS) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    wide = {f"routed.L{at}": rng.integers(0, 256, (rows, WIDTH), np.uint8) for at in range(2)}
    zeros = np.zeros(rows, np.int32)
    return {
        "tokens": [zeros],
        "loss_mask": [np.zeros(rows, np.uint8)],
        "logprobs": [np.zeros(rows, np.float32)],
        "policy_version": [zeros],
        "segments": [np.zeros((1, 5), np.int32)],
        **{name: np.array_split(column, 7) for name, column in wide.items()},
    }


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


async def measure(configs: list[str]) -> list[int]:
    found: list[int] = []
    payload = columns()
    for config in configs:
        store = ObjectStore.open(Store.model_validate_json(config))
        # First what is loaded and started once a process.
        await write_payload(store, f"{KEY}-small", {name: [of[0][:9]] for name, of in payload.items()})
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        await write_payload(store, KEY, payload)
        found.append(resident("VmHWM") - before)
    return found


def main(what: str, *configs: str) -> None:
    if what == "measure":
        print(json.dumps(asyncio.run(measure(list(configs)))))
        return
    if what == "die":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (DIES_AT, DIES_AT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    store = ObjectStore.open(Store.model_validate_json(configs[0]), patience_s=1)
    asyncio.run(write_payload(store, KEY, columns()))


if __name__ == "__main__":
    main(*sys.argv[1:])
