"""Which windows a packer builds and which it drops. Pure.

Promises:
- the windows that exist never exceed the budget;
- a window that a rank waits for goes before any that is prefetched, and makes room by dropping those;
- what a rank holds or waits for is never dropped;
- what is prefetched is the next `prefetch` windows after the last one asked for, in order, none skipped for its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class WindowId(NamedTuple):
    """A micro-batch of this packer's coordinate, in the order in which it is trained."""

    step: int
    microbatch: int

    def after(self) -> WindowId:
        return WindowId(self.step, self.microbatch + 1)


@dataclass(frozen=True)
class Decision:
    build: tuple[WindowId, ...] = ()
    drop: tuple[WindowId, ...] = ()


def decide(
    *,
    known: Mapping[WindowId, int],
    standing: Mapping[WindowId, int],
    held: frozenset[WindowId],
    asked: Sequence[WindowId],
    cursor: WindowId,
    prefetch: int,
    budget: int,
) -> Decision:
    """What to build and drop now.

    `known`: bytes of every window that may be built; `standing`: bytes of those built or being built; `held`: by a
    rank; `asked`: waited for, oldest first; `cursor`: the first window that no rank has asked for yet.
    """
    ahead = [window for window in sorted(known) if window >= cursor][:prefetch]
    wanted = list(dict.fromkeys([*asked, *ahead]))
    kept = {window: size for window, size in standing.items() if window in held or window in wanted}
    drop = [window for window in standing if window not in kept]
    build: list[WindowId] = []
    for window in wanted:
        if window in kept or window not in known or known[window] > budget:
            continue
        if window in asked:
            spare = [
                other
                for other in reversed(ahead)
                if other in kept and other not in asked and other not in held
            ]
            while spare and sum(kept.values()) + known[window] > budget:
                drop.append(spare[0])
                del kept[spare.pop(0)]
        if sum(kept.values()) + known[window] > budget:
            break
        kept[window] = known[window]
        build.append(window)
    return Decision(tuple(build), tuple(drop))
