"""The path from payloads to tensors: put and get, bytes of context-parallel reads, packers, plans, routing and images.

    python bench/porter.py [--quick] [--json FILE] [--peer]

Stores are files and a SeaweedFS, both in one temporary directory. `against` is of the same run: TransferQueue's SimpleStorage, which
keeps no durable copy (queue; `--peer` installs it first, into .venv-transferqueue: 1.5 GB), reading whole rows (reads, routing), whole
objects beside the window (packer.memory), a copy of as many bytes (packer.build into a new memfd, packer.pack into memory that is
there), obstore alone and mmap (payload, window), fetching the first window's objects whole (packer.first), verl's and slime's rules (plan), requests with all their images, and
images in turn (images). `goal` is what a change must not rise above (or fall below), 0 where there is none. `--quick` takes less than
50 s on two idle cores; the whole some minutes. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
import porter_peer
from log_server import Server
from porter_images import images
from porter_packer import Windows, first, packing, routing
from porter_payload import steps
from porter_plan import plans
from porter_reads import reads
from porter_world import stores
from report import Figure, tell

from pipeline.store import ObjectStore


@dataclass(frozen=True, slots=True)
class Size:
    """queue: sequences, rounds; reads: lengths of rows with routing and of narrow ones; windows; plan: contexts, dp; images: ranks and
    their number."""

    queue: tuple[int, int]
    routed: tuple[int, ...]
    narrow: tuple[int, ...]
    windows: Windows
    plan: tuple[int, int]
    images: tuple[int, int]


FULL = Size(
    (1024, 5), (70_000, 200_000), (65_537, 131_072, 1 << 20), Windows(48, 16_384, 3, 1 << 19), (25_088, 32), (64, 2048)
)  # fmt: skip
QUICK = Size((256, 1), (70_000,), (65_537, 262_144), Windows(32, 16_384, 1, 131_072), (3_136, 8), (64, 2048))
LEAST = Size((8, 1), (66_000,), (65_537,), Windows(2, 2_048, 1, 70_000), (320, 4), (4, 64))


async def measure(size: Size) -> list[Figure]:
    against = await porter_peer.peer(*size.queue)
    with tempfile.TemporaryDirectory(prefix="packtrain-bench") as name:
        directory = Path(name)
        async with stores(directory) as both:
            figures = await porter_peer.queue(both, *size.queue, against)
            for store, config in both.items():
                figures += await reads(ObjectStore.open(config), store, size.routed, True)
                figures += await reads(ObjectStore.open(config), store, size.narrow, False)
                figures += await packing(directory, store, config, size.windows)
            figures += await routing(directory, both["files"], size.windows)
            figures += await steps(directory / "objects", both["files"], 20 * size.windows.rounds)
            with Server(directory / "broker", "always") as server:
                for store, config in both.items():
                    figures += await first(directory, server, store, config, size.windows)
    return figures + plans(*size.plan) + await images(*size.images)


def main() -> None:
    parser = argparse.ArgumentParser(description="From payloads to tensors.")
    parser.add_argument("--quick", action="store_true", help="less of all: under 50 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, as a JSON list")
    parser.add_argument("--peer", action="store_true", help="install TransferQueue first, beside the project")
    parser.add_argument("--least", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        porter_peer.install()
    size = LEAST if arguments.least else QUICK if arguments.quick else FULL
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tell(asyncio.run(measure(size)), arguments.json, 32, 3)


if __name__ == "__main__":
    main()
