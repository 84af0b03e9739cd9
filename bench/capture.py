"""What capture costs: a call over the engine's own, long dialogues, many sessions; beside LiteLLM's proxy where it is.

    python bench/capture.py [--quick] [--json FILE]

Capture runs as a process of its own, as an agent-loop host runs it, before a double of an engine in another; the client
keeps its connections. Dialogues are small (0.3 KB) or large (37 KB: system text, 12 tools, 10 rounds of calls).

- call.PROTOCOL.SIZE: ms that a call takes longer than the engine's own call with the same token ids; a stream to its end,
  with a token each millisecond; `call.tiny`: with the tiny engine. Told only: `burst`, a stream whose tokens come all at
  once, and `first`, a session's first call, whose whole dialogue is new;
- litellm.SIZE: the same through LiteLLM's proxy before an endpoint that answers with text; with --quick only where it is
  installed already, else it is installed (650 MB);
- tokenize: the growth of a turn's tokenization over 128 turns, against that of rendering the whole dialogue anew;
- many: 1,000 sessions at once in one process (--quick: 100), whose turns take the engine 7.5 to 15 s (1.5 to 3 s); lag
  against that of the idle process, memory a session against the tokens that it holds; rate: calls/s of 32 callers who wait
  for nothing else, every other call a burst, against the engine alone;
- long: a dialogue of a million tokens (--quick: 100,000): a turn at its end, against rendering it anew, and the bytes that a
  new token adds there, against those at its beginning.

`value` and `against` are medians of rounds that take turns; `goal` is what a change must not rise above (or fall below), 0
where there is none. `--quick` takes less than a minute on two busy cores, the whole about five. Progress goes to
standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import capture_litellm
from capture_calls import overheads
from capture_length import long_dialogue, tokenizing
from capture_scale import Load, scale
from capture_world import say
from report import Figure, tell


@dataclass(frozen=True, slots=True)
class Size:
    """Rounds of calls, turns of the dialogue that is tokenized, the load, seconds of the rate, and (tokens, turns) of the
    long dialogue."""

    rounds: int
    turns: int
    load: Load
    rate_s: float
    long: tuple[int, int]


FULL = Size(60, 128, Load(1_000, 3, 7.5), 5.0, (1_000_000, 200))
QUICK = Size(6, 64, Load(100, 2, 1.5), 1.0, (100_000, 32))
LEAST = Size(2, 8, Load(8, 1, 0.1), 0.1, (5_000, 8))


async def measure(size: Size, with_litellm: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="packtrain-bench") as name:
        directory = Path(name)
        figures = tokenizing(size.turns, 200)
        figures += await overheads(directory, size.rounds, with_litellm)
        figures += await scale(directory, size.load, size.rate_s)
        return figures + await long_dialogue(*size.long)


def main() -> None:
    parser = argparse.ArgumentParser(description="What capture costs.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, sessions and tokens: under a minute"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, as a JSON list")
    parser.add_argument("--least", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = LEAST if arguments.least else QUICK if arguments.quick else FULL
    if size is FULL and not capture_litellm.installed():
        capture_litellm.install()
    with_litellm = capture_litellm.installed() and size is not LEAST
    if not with_litellm:
        say("litellm: left out; it is installed, and measured, without --quick")
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures = asyncio.run(measure(size, with_litellm))
    tell(figures, arguments.json, 36, 2)


if __name__ == "__main__":
    main()
