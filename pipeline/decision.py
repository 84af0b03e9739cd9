"""What a core decides: a fact, and the objects that must be in the store before the fact is in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from schemas.envelope import Event
from schemas.facts import Fact


@dataclass(frozen=True)
class Decision:
    """A fact to publish. `objects` are written first, by key; they are a pure function of the decision too."""

    fact: Fact
    objects: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


class Core(Protocol):
    """A service's decisions, as a fold over the log.

    `fold` takes events in stream order; `decide` is called after each and depends on the folded state and that event
    alone: time, randomness and configuration enter as events. It may decide the same fact again while the first is still
    on its way: the shell publishes it once.

    `load(dump())` on a fresh core gives the same state; `dump` returns JSON values only. `STATE_VERSION` is raised with
    every change of what the state is or means: a snapshot of another version is thrown away and the log refolded.
    """

    STATE_VERSION: ClassVar[int]

    def fold(self, event: Event) -> None: ...

    def decide(self, event: Event) -> list[Decision]: ...

    def dump(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...
