"""Batches whose plan stands without some of their sequences, since their objects are damaged or gone. A fold. Pure.

Promises:
- `batch.replanned` is decided once for each sequence that is quarantined, in the order in which the log has them: revision n of
  a batch leaves out its first n. Told again of one, it says the same again;
- no batch leaves out more than an event can name, `MAX_LEFT_OUT`: of what is lost beyond that nothing is decided, and packers
  refuse the step;
- of a batch that is trained, or not yielded, and of a sequence that is not in the batch, nothing is decided;
- state is the ids of the sequences of batches that are yielded and not trained, of which there are few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.facts import MAX_LEFT_OUT, BatchReplanned, SequenceQuarantined


@dataclass(slots=True)
class Quarantine:
    """The batches that are yielded and not trained, by step: of each sequence the revision that leaves it out, 0: none."""

    _batches: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    _trained: int = 0

    def yielded(self, step: int, sequences: Iterable[str]) -> None:
        if step > self._trained and step not in self._batches:
            self._batches[step] = dict.fromkeys(sequences, 0)

    def trained(self, step: int) -> None:
        self._trained = max(self._trained, step)
        for each in [s for s in self._batches if s <= step]:
            del self._batches[each]

    def quarantined(self, fact: SequenceQuarantined) -> None:
        batch = self._batches.get(fact.step)
        if batch is not None and batch.get(fact.sequence) == 0:
            newest = max(batch.values())
            if newest < MAX_LEFT_OUT:
                batch[fact.sequence] = newest + 1

    def replanned(self, fact: SequenceQuarantined) -> BatchReplanned | None:
        """What is decided on a fact that is folded."""
        batch = self._batches.get(fact.step, {})
        revision = batch.get(fact.sequence, 0)
        if not revision:
            return None
        without = {r: sequence for sequence, r in batch.items() if 0 < r <= revision}
        return BatchReplanned(
            step=fact.step, revision=revision, without=tuple(without[r] for r in sorted(without))
        )

    def dump(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "trained": self._trained,
            "batches": [[step, list(batch), list(batch.values())] for step, batch in self._batches.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `dump`."""
        self._trained = state["trained"]
        self._batches = {
            step: dict(zip(sequences, revisions, strict=True))
            for step, sequences, revisions in state["batches"]
        }
