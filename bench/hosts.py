"""What hosts cost: tenants of one process, sandboxes, trials, and how evenly hosts are filled.

    python bench/hosts.py [--quick] [--json FILE]

Hosts are processes as they are deployed, before a real broker (`sync_interval: always`).

- tenants.N: N rollouts of three model calls and two tool calls in one harness host, before a server in another process whose
  answers are written. `lag`: how late the host's loop is, in ms, while N tenants make 200 calls a second or less, against the
  idle host; `memory`: MiB of the host at that, divided by N; `rate` and `cpu`: calls a second, and ms of CPU for one, of a host
  with N slots whose model answers at once. The last three against one new process for each rollout, N at once, 50 at most: what
  N processes would be for a larger N is not known, as they do not fit;
- sandbox.N: start and end of an overlay workspace of a shipped task, N at once, against bare namespaces (`unshare`), which
  hold no file system, no limits, and no way in;
- trials.N: trials a minute of the agent `oracle` on the ten tasks of examples/tasks, N at once, through a host, against
  Harbor's own runner with the same tasks, the same agent, and the same overlay workspaces as a custom environment of its. Only
  where Harbor is installed (`make scaffolds`);
- balance: in-flight counts of four hosts: `spread`, the largest less the smallest; `ratio`, the largest over the mean; `late`:
  in the two seconds after one of them has come late; `steady`: in the three after that; `burst`: of as many that came at once.
  Against hosts that are served in turn.

`goal` is what a change must not rise above (or fall below), 0 where there is none. `--quick` takes less than a minute on two idle
cores, the whole about four. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hosts_balance import Arrivals, balance
from hosts_sandbox import sandboxes
from hosts_tenants import Load, tenants
from hosts_trials import trials
from log_server import Server
from report import Figure, tell


@dataclass(frozen=True, slots=True)
class Size:
    """The tenants; sandboxes at once, and how many in all; trials at once, how often every task in a round, and rounds."""

    load: Load
    at_once: tuple[int, ...]
    sandboxes: int
    trials: tuple[tuple[int, ...], int, int]
    arrivals: Arrivals


FULL = Size(
    Load((1, 10, 100, 1_000), (1, 10, 50), 1.0, 200),
    (1, 16),
    96,
    ((1, 4, 16), 2, 2),
    Arrivals(4, 200.0, 2.0, 3.0, 2.0, 3.0, 2.0),
)
QUICK = Size(
    Load((1, 100), (1, 4), 0.5, 50),
    (1, 16),
    16,
    ((4, 16), 1, 1),
    Arrivals(4, 100.0, 1.0, 0.5, 1.0, 1.5, 1.0),
)
LEAST = Size(Load((4,), (1,), 0.1, 8), (1, 2), 2, ((), 1, 1), Arrivals(2, 50.0, 0.4, 0.1, 0.3, 0.3, 1.0))


async def measure(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="packtrain-bench") as name:
        directory = Path(name)
        with Server(directory / "broker", "always") as server:
            figures = await tenants(server.broker, directory, size.load)
            figures += await sandboxes(size.at_once, size.sandboxes)
            figures += await trials(server.broker, directory, *size.trials)
            return figures + await balance(server.broker, size.arrivals)


def main() -> None:
    parser = argparse.ArgumentParser(description="What hosts cost.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer tenants, sandboxes and trials: under a minute"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, as a JSON list")
    parser.add_argument("--least", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = LEAST if arguments.least else QUICK if arguments.quick else FULL
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tell(asyncio.run(measure(size)), arguments.json, 32, 2)


if __name__ == "__main__":
    main()
