"""How many sequences of a source run at once: the limits that hold, and what runs under them. Folds over the log.

Promises:
- of a source's changes the one with the highest number holds; before the first, the configuration's. One that leaves no
  room for a group is not taken up, since nothing would ever run under it;
- a sequence runs from when the first of its group is dispatched, as the whole group takes its room at once, until it has
  finished or failed, whatever it does twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas.config import Source
from schemas.facts import LimitChanged, SequenceDispatched, SequenceFailed, SequenceFinished
from schemas.names import BadName, sample_index, sequence_id


def fits(concurrency: int, group_size: int) -> bool:
    """Whether groups of that size can run under the limit; 0 is none."""
    return concurrency == 0 or concurrency >= group_size


@dataclass
class Limits:
    """`changes`: number and concurrency of the newest change, by source."""

    changes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def fold(self, fact: LimitChanged, source: Source) -> None:
        """Takes a change of the source's limit."""
        newest, _ = self.changes.get(source.name, (0, 0))
        if fact.number > newest and fits(fact.concurrency, source.group_size):
            self.changes[source.name] = fact.number, fact.concurrency

    def of(self, source: Source) -> int:
        """Sequences of the source that run at once; 0: no limit."""
        _, concurrency = self.changes.get(source.name, (0, source.concurrency))
        return concurrency


@dataclass
class Running:
    """`sequences` that run, by source. `early`: those that ended before they were dispatched, as they do where a recorded
    run is decided anew with another configuration."""

    sequences: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    early: set[str] = field(default_factory=set[str])

    def count(self, source: str) -> int:
        return len(self.sequences.get(source, ()))

    def begin(self, fact: SequenceDispatched) -> None:
        """A group begins with `fact`, the first of its members that is dispatched."""
        members = {sequence_id(fact.sample, member) for member in range(fact.group_size)}
        self.sequences.setdefault(fact.source, set()).update(members - self.early)
        self.early -= members

    def end(self, fact: SequenceFinished | SequenceFailed, dispatched: int) -> None:
        """`dispatched`: groups of the source so far."""
        running = self.sequences.get(fact.source, set())
        if fact.sequence in running:
            running.discard(fact.sequence)
        elif not _dispatched(fact.sample, fact.source, dispatched):
            self.early.add(fact.sequence)

    def dump(self) -> dict[str, Any]:
        """JSON values."""
        running = {source: sorted(found) for source, found in self.sequences.items()}
        return {"sequences": running, "early": sorted(self.early)}

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> Running:
        """Of what `dump` gave."""
        running = {source: set(found) for source, found in state["sequences"].items()}
        return cls(running, set(state["early"]))


def _dispatched(sample: str, source: str, dispatched: int) -> bool:
    try:
        return sample_index(sample, source) < dispatched
    except BadName:
        # A stranger's: no group will ever have it.
        return True
