"""How many groups of each source are in play, and which source is next: dispatch by demand. Pure; folds hold the numbers.

B: groups that a source gives to a batch; A: its accepted groups that wait for one; r: its acceptance rate, the share of its
groups that end in a batch; t: mean seconds of a group from its dispatch until all its sequences have ended.
Formulas: MiMo's mixer. Demand m = B / r; oversampling p = clip(c t - 1, low, high) with one c for all sources, so that
sum(m p) / sum(m) is the configured mean; in play are ceil(m (1 + p)) groups; the order is smooth weighted round-robin by
w = alpha B / r + (1 - alpha) max(B - A, 0) / r.

Promises:
- r is never 0: it begins at 1/2, as if `_PRIOR` groups had been judged, and is at least `LEAST_RATE`, so that no more than
  B / LEAST_RATE (1 + high) groups of a source are ever in play; what was judged long ago fades;
- the configured mean of p is met, whatever the times are, as it lies between low and high;
- while the same n sources may be dispatched, of weight W together, each has a turn among any (n + 1) W / w, and is never n turns
  before or behind its share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from schemas.config import Mixer, Source

LEAST_RATE = 0.05
_PRIOR = 8.0
"""Judged groups that the first rate is worth."""
_RECENT = 256.0
"""Judged or timed groups after which an older one counts for a third: a policy that learns changes both."""
_LEAST_S = 1e-3


@dataclass(slots=True)
class Record:
    """What a run has shown of a source.

    granted: groups that were ever decided to be dispatched. waiting: accepted ones that are in no batch. used, judged: of the
    recent ones, those that were (or may still be) put into a batch, and all. seconds: mean of the recent ones, 0 while `timed`
    is. credit: its place in the order of dispatch, in turns.
    """

    granted: int = 0
    waiting: int = 0
    used: float = 0.0
    judged: float = 0.0
    seconds: float = 0.0
    timed: float = 0.0
    credit: float = 0.0

    def accept(self) -> None:
        self.waiting += 1
        self._judge(1.0)

    def reject(self) -> None:
        self._judge(0.0)

    def spoil(self) -> None:
        """An accepted group has become too old for any batch."""
        self.waiting -= 1
        self.used = max(0.0, self.used - 1.0)

    def time(self, seconds: float) -> None:
        """A group took so long. Clocks of two machines may differ: no less than nothing."""
        self.timed = min(self.timed + 1.0, _RECENT)
        self.seconds += (max(0.0, seconds) - self.seconds) / self.timed

    def rate(self) -> float:
        """r, from LEAST_RATE to 1."""
        return max(LEAST_RATE, (self.used + _PRIOR / 2) / (self.judged + _PRIOR))

    def _judge(self, used: float) -> None:
        keep = 1.0 - 1.0 / _RECENT
        self.used, self.judged = self.used * keep + used, self.judged * keep + 1.0

    def dump(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def targets(sources: Sequence[Source], records: Mapping[str, Record], mixer: Mixer) -> list[int]:
    """Groups of each source that are to be in play."""
    if mixer.dispatch == "fixed":
        return [math.ceil(source.groups * source.oversample) for source in sources]
    found = [records[source.name] for source in sources]
    demands = [source.groups / record.rate() for source, record in zip(sources, found, strict=True)]
    known = [record.seconds for record in found if record.timed]
    usual = sum(known) / len(known) if known else 1.0
    times = [record.seconds if record.timed else usual for record in found]
    parts = oversampling(demands, times, mixer.oversample, mixer.oversample_min, mixer.oversample_max)
    # What is whole but for rounding is no group more.
    return [math.ceil(m * (1.0 + p) - 1e-9) for m, p in zip(demands, parts, strict=True)]


def oversampling(
    demands: Sequence[float], times: Sequence[float], mean: float, low: float, high: float
) -> list[float]:
    """p of each source: clip(c t - 1, low, high), c such that the mean weighted by demand is `mean`, within [low, high].

    `demands` are positive, `times` in any one unit; one under a millisecond counts as that.
    """
    times = [max(t, _LEAST_S) for t in times]
    # The mean grows with c along a line that bends where some source leaves `low` or reaches `high`.
    bends = [((1.0 + low) / t, m * t) for m, t in zip(demands, times, strict=True)]
    bends += [((1.0 + high) / t, -m * t) for m, t in zip(demands, times, strict=True)]
    missing, slope, c = (mean - low) * sum(demands), 0.0, 0.0
    for bend, change in sorted(bends):
        if slope > 0.0 and slope * (bend - c) >= missing:
            c += missing / slope
            break
        missing -= slope * (bend - c)
        slope, c = slope + change, bend
    return [min(max(c * t - 1.0, low), high) for t in times]


def weights(sources: Sequence[Source], records: Mapping[str, Record], alpha: float) -> dict[str, float]:
    """w of each source, by name. 0 only with alpha 0, of one that has a whole batch waiting."""
    out: dict[str, float] = {}
    for source in sources:
        record = records[source.name]
        lacking = max(source.groups - record.waiting, 0)
        out[source.name] = (alpha * source.groups + (1.0 - alpha) * lacking) / record.rate()
    return out


def turn(
    credits_: Mapping[str, float], weights_: Mapping[str, float], names: Collection[str]
) -> dict[str, float]:
    """Smooth weighted round-robin: the credits of `names` once each has got its share of a turn. The one with the most,
    the first of equals, is next, and pays 1 for it."""
    total = sum(weights_[name] for name in names)
    share = {name: weights_[name] / total if total else 1.0 / len(names) for name in names}
    return {name: credits_[name] + share[name] for name in names}


def order(
    sources: Sequence[Source],
    records: Mapping[str, Record],
    weights_: Mapping[str, float],
    short: Mapping[str, int],
    free: int,
) -> list[str]:
    """Names of the sources whose groups are dispatched now, one a group, in order; pays for their turns in `records`.

    short: groups by source that are wanted and have room in their source. free: sequences that have room in all sources
    together. Who is next and does not fit is waited for: smaller groups would keep it waiting for ever. Time grows with the
    groups times the sources.
    """
    left = {name: count for name, count in short.items() if count > 0}
    sizes = {source.name: source.group_size for source in sources}
    out: list[str] = []
    while left:
        credits_ = turn({name: records[name].credit for name in left}, weights_, left)
        # `left` is in the order of the configuration.
        chosen = max(credits_, key=credits_.__getitem__)
        if sizes[chosen] > free:
            break
        for name, credit in credits_.items():
            records[name].credit = credit
        records[chosen].credit -= 1.0
        free -= sizes[chosen]
        left[chosen] -= 1
        if not left[chosen]:
            del left[chosen]
        out.append(chosen)
    return out
