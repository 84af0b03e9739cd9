"""What a run came to so far, in numbers that only grow, and its newest batch and step: the view of the run and what it leaves out.

Promises:
- `read` is a pure step over messages in stream order, and `Totals.load(totals.dump())` goes on as `totals` would;
- the state grows with what is in flight, not with the steps of the run: of batches it keeps the newest `ROWS`, of evaluations
  the first and the newest;
- a step is counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from schemas.envelope import Event, Invalid, Unknown
from schemas.facts import (
    BatchConsumed,
    Failure,
    LimitChanged,
    SequenceDispatched,
    SequenceFailed,
    SequenceVerified,
    StepTrained,
    WindowPacked,
)
from services.dashboard.view import View, fold

STATE_VERSION = 1
"""Raised when the state, or what is counted, changes its meaning."""
ROWS = 64
REASONS = 64
"""Reasons of failures that are counted by their name, which hosts give; what comes after so many is `other`."""


@dataclass
class Totals:
    """See the module. `seq`: of the newest message that was read. Failures are counted by source, kind and reason, joined by a space,
    which no name has; seconds and tokens are those of the trained steps."""

    view: View = field(default_factory=View)
    seq: int = 0
    dispatched: Counter[str] = field(default_factory=Counter[str])
    attempts_failed: Counter[str] = field(default_factory=Counter[str])
    sequences_failed: Counter[str] = field(default_factory=Counter[str])
    reasons: set[str] = field(default_factory=set[str])
    windows: int = 0
    window_tokens: int = 0
    fetched: int = 0
    step_seconds: float = 0.0
    loss_tokens: int = 0
    consumed: int = 0
    trained: StepTrained | None = None
    trained_at: datetime | None = None

    def read(self, found: Event | Unknown | Invalid) -> None:
        self.seq = found.seq
        if not isinstance(found, Event):
            return
        match found.fact:
            case SequenceDispatched() as fact:
                self.dispatched[fact.source] += 1
            case SequenceVerified(failure=Failure() as failure) as fact:
                self.attempts_failed[self._failure(fact.source, failure)] += 1
            case SequenceFailed() as fact:
                self.sequences_failed[self._failure(fact.source, fact.failure)] += 1
            case WindowPacked() as fact:
                self.windows += 1
                self.window_tokens += fact.tokens
                self.fetched += fact.fetched
            case BatchConsumed() as fact:
                self.consumed = max(self.consumed, fact.step)
            case StepTrained() as fact if self.trained is None or fact.step > self.trained.step:
                self.step_seconds += fact.seconds
                self.loss_tokens += fact.loss_tokens
                self.trained, self.trained_at = fact, found.time
            case _:
                pass
        fold(self.view, found)
        self._forget()

    def _failure(self, source: str, failure: Failure) -> str:
        reason = failure.reason
        if reason not in self.reasons:
            if len(self.reasons) < REASONS:
                self.reasons.add(reason)
            else:
                reason = "other"
        return f"{source} {failure.kind} {reason}"

    def _forget(self) -> None:
        rows = self.view.rows
        while len(rows) > ROWS:
            del rows[min(rows)]
        for source in self.view.sources.values():
            while len(source.evaluations) > 2:
                # The first policy's, and the newest: what was learned is the difference.
                del source.evaluations[sorted(source.evaluations)[1]]

    def dump(self) -> dict[str, Any]:
        """JSON values, for `load`."""
        whole: dict[str, Any] = _adapter().dump_python(self, mode="json", exclude={"view": {"limits"}})
        limits = [fact.model_dump(mode="json") for fact in self.view.limits.values()]
        return {**whole, "limits": limits}

    @staticmethod
    def load(state: Mapping[str, Any]) -> Totals:
        totals = _adapter().validate_python({key: state[key] for key in state if key != "limits"})
        for each in state["limits"]:
            fact = LimitChanged.model_validate(each)
            totals.view.limits[fact.of, fact.name] = fact
        return totals


@cache
def _adapter() -> TypeAdapter[Totals]:
    return TypeAdapter(Totals)
