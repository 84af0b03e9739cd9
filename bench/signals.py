"""From finished sequences to advantages: how fast, from which bytes, in how much memory, and how late behind a slow grader.

    python bench/signals.py [--quick] [--json FILE]

A batch of 1,568 groups of 16 sequences (25,088), of lognormal lengths (see `signals_world`), of two sources. Of 24
sequences one runs at a time, and takes as long as it has tokens.

- core: the sampler's core alone, whose hooks are length_penalty and grpo. rate: sequences that it folds and decides on in a second
  of CPU, against those that are decoded in one; memory: what it has allocated (tracemalloc) for each sequence when all are
  finished and none is in a batch, against the columns of a sequence, which a driver that gathers trajectories holds; plan: CPU
  seconds of the decision that yields the batch, with the plan of it, against all decisions before;
- services: sampler, grader (`none`) and hook, a process each, before a real broker (`sync_interval: always`) and a store of files,
  whose payloads have 16 times fewer tokens. Their hooks name columns: `opd` of one source, of the other
  examples/hooks/likely_tokens.py after length_penalty and grpo. A group is shaped before the others. rate: sequences a second,
  from the first one of all at once until all groups but one are shaped, against a process that reads every object whole and
  runs the hooks on it, with no log and nothing written; read: bytes that the hook service read over those of the columns that its
  hooks name, against whole objects; resident: what the sampler's process has grown by for each sequence, against its objects;
  last: from the last sequence until the last group is shaped, where half as many finish in a second as `rate`, against all the
  time before; and where all finish at once; batch: from the last group shaped to `batch.yielded`;
- grader: what a grader that takes 30 s for a group (--quick: 2 s) and four groups at once delays a batch by, of which half of the
  groups are graded, against one that is asked in line, a group at a time, and (`wait.after`) one that is asked when all sequences
  have finished. `none` is the time from the last sequence to the batch without one. The last group of the batch is not graded, but
  in `wait.last`: there nothing hides the grader, and the delay is its latency. `lag`: policy lag, and how many groups were graded by
  then all the same.

`goal` is what a change must not rise above (or fall below), 0 where there is none. `--quick` takes less than a minute on two idle
cores, with 64 groups, and 196 before the core alone; the whole about ten minutes. Progress goes to standard error.

Not signal.py: Python looks in this directory first, and would take that for its own module of the name.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from log_server import Server
from report import Figure, tell
from signals_core import core
from signals_grader import graders
from signals_services import services


@dataclass(frozen=True, slots=True)
class Size:
    """Groups before the core alone, and before the services; the grader's latency."""

    core: int
    services: int
    grader_s: float


FULL = Size(1_568, 1_568, 30.0)
QUICK = Size(196, 64, 2.0)
LEAST = Size(4, 4, 0.2)


async def measure(size: Size) -> list[Figure]:
    figures = core(size.core)
    with tempfile.TemporaryDirectory(prefix="packtrain-bench") as name:
        directory = Path(name)
        with Server(directory / "broker", "always") as server:
            figures += await services(server, directory, size.services)
            return figures + await graders(server, directory, size.grader_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="From finished sequences to advantages.")
    parser.add_argument("--quick", action="store_true", help="fewer groups, a faster grader: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, as a JSON list")
    parser.add_argument("--least", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = LEAST if arguments.least else QUICK if arguments.quick else FULL
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tell(asyncio.run(measure(size)), arguments.json, 30, 3)


if __name__ == "__main__":
    main()
