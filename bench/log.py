"""Rates, state and start of the event log, against nats-py alone on the same server in the same minutes.

    python bench/log.py [--quick] [--json FILE]

- publish: with compare-and-set, one writer, against `js.publish` of nats-py with the two headers that this needs and a
  body of the same size: 256 in flight, in atomic batches of 100, one at a time; and against the very message that ours
  sends, with its CloudEvents headers;
- work and ack through `serve_work`, against a pull consumer of nats-py; ordered reading, decoded, against the faster of
  its ordered push consumer and a pull consumer without acknowledgements, undecoded;
- `sync_interval: always` against JetStream's default of two minutes;
- a whole run of 1,000,000 events (--quick: 20,000), written by `Log.publish_all` at the default sync: folded by the
  sampler's and the mixer's cores; bytes of state for a sequence in flight; the state at the end against that at a tenth;
- a start from a snapshot with a tail of 100 events, in that run against in one of 10,000 events (--quick: 2,000), and
  against folding it anew. The connection is there already.

`value` and `against` are medians of rounds that take turns; `goal` is what a change must not fall below (or rise above),
0 where there is none. `--quick` takes less than a minute on two busy cores, the whole about eight. Progress goes to
standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from log_rates import publishing, reading, syncing
from log_run import whole_run
from log_server import DEFAULT_SYNC, Server
from report import Figure, tell


async def measure(rounds: int, each: int, events: int, early: int, groups: int) -> list[Figure]:
    """`each`: events of a round of rates; `events`, `early`: of the long and of the short run."""
    with (
        tempfile.TemporaryDirectory(prefix="packtrain-bench") as directory,
        Server(Path(directory) / "default", DEFAULT_SYNC) as server,
    ):
        figures = [*await publishing(server, each, rounds), *await reading(server, 2 * each, rounds)]
        with Server(Path(directory) / "always", "always") as always:
            figures += await syncing(server, always, each, rounds)
        return figures + await whole_run(server, events, early, groups)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates, state and start of the event log.")
    parser.add_argument("--quick", action="store_true", help="20,000 events: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, as a JSON list")
    parser.add_argument("--events", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.events:
        events = arguments.events
        work = measure(1, max(events // 4, 10), events, max(events // 4, 200), 1)
    elif arguments.quick:
        work = measure(3, 2_000, 20_000, 2_000, 16)
    else:
        work = measure(5, 10_000, 1_000_000, 10_000, 16)
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures = asyncio.run(work)
    tell(figures, arguments.json, 24, 1)


if __name__ == "__main__":
    main()
