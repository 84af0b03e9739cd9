"""A core's decisions made again over a run's events, each compared with the one that was recorded.

Promises:
- the rule is the service's: the core folds the events in stream order, and the first decision on a subject stands until
  its fact comes back; what is decided again on a subject that is taken is nothing;
- a subject on which another service spoke first is taken by that;
- a recorded fact of the core is compared in every byte of its body (an object of a decision by the checksum in the
  fact's ref) and in its cause, the event that it was decided on;
- a decision that the log does not hold is a divergence only when the service went on without it: it recorded a later
  decision, and then one on an event after that; or, of the mixer, it ended the run. Every other one is pending: the log
  was read while it was on its way;
- memory does not grow with the log, but for the subjects that are taken and the first `_KEPT` divergences.

After a divergence the core goes on with what was recorded, as the service would.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from pipeline.replay.service import Service
from schemas.envelope import Event
from schemas.facts import RULES, Fact, RunStarted, RunStopped, SampleRejected, SampleShaped

Kind = Literal["differs", "never decided", "never recorded", "stands twice", "fails"]
ABSENT = "(absent)"
_KEPT = 1000
_RECENT = 65_536
"""Events that a recorded cause is looked up among: it is nearly always one of the last."""


@dataclass(frozen=True, slots=True)
class Place:
    """An event of the log, by where it stands."""

    seq: int
    type: str
    id: str


def place(event: Event) -> Place:
    return Place(event.seq, event.fact.type, event.fact.id())


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the recorded run and this code part.

    `seq` is the message of the recorded fact; for one that was never recorded, that of the event it was decided on.
    `field` is the first field that differs, with both values; it is empty where one side has no fact. `cause` is the
    event decided upon: of the recomputed decision if there is one, else what the recorded fact names, if it is near.
    """

    seq: int
    subject: str
    kind: Kind
    field: str
    recorded: Any
    recomputed: Any
    cause: Place | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A decision that was still on its way when the log ended."""

    subject: str
    cause: Place


@dataclass(frozen=True, slots=True)
class Report:
    """`compared` counts recorded facts by type; `divergences` is in stream order, `more` counts those left off."""

    service: str
    run: str
    rules: int | None
    events: int
    last: int
    compared: dict[str, int]
    divergences: tuple[Divergence, ...]
    more: int
    pending: tuple[Pending, ...]
    state: dict[str, Any]

    @property
    def other_rules(self) -> bool:
        """Whether the run was made by other decision rules than this code's: the likely cause of a divergence."""
        return self.rules is not None and self.rules != RULES


@dataclass(slots=True)
class _Open:
    """A decision whose fact has not come yet. `passed` is the message of the first later decision that was recorded."""

    number: int
    fact: Fact
    cause: Place
    cause_id: str
    passed: int | None = None


class Recent:
    """The last events by id."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def add(self, event: Event) -> None:
        self._places[event.id] = place(event)
        if len(self._places) > _RECENT:
            del self._places[next(iter(self._places))]

    def find(self, id_: str | None) -> Place | None:
        return self._places.get(id_) if id_ is not None else None


class Rerun:
    """See the module's promises. `feed` every event in stream order, then read `report`."""

    def __init__(self, run: str, service: Service) -> None:
        self.run = run
        self.service = service
        self.core = service.core(run)
        self.rules: int | None = None
        self.started: RunStarted | None = None
        self.taken: set[str] = set()
        self.failed = False
        self._open: dict[str, _Open] = {}
        self._decided = 0
        self._latest_cause = 0
        self._ended = False
        self._compared: Counter[str] = Counter()
        self._divergences: list[Divergence] = []
        self._more = 0
        self._recent = Recent()
        self._events = 0
        self._last = 0

    def feed(self, event: Event) -> None:
        """Takes the next event. Raises nothing: what a core raises on an event is a divergence, the last."""
        if self.failed:
            return
        self._events += 1
        self._last = event.seq
        if isinstance(event.fact, RunStarted):
            self.rules, self.started = event.fact.rules, event.fact
        if self.decides(event.fact):
            self._compare(event)
        elif isinstance(event.fact, SampleRejected | SampleShaped):
            subject = event.fact.subject(self.run).text
            self.taken.add(subject)
            self._open.pop(subject, None)
        self._recent.add(event)
        try:
            self.core.fold(event)
            decisions = self.core.decide(event)
        except (
            Exception
        ) as error:  # whatever it is, it would stop the service on this event: that is the finding
            self.failed = True
            told = f"{type(error).__name__}: {error}"
            subject = event.fact.subject(self.run).text
            self._add(Divergence(event.seq, subject, "fails", "", None, told, place(event)))
            return
        for fact in (d.fact for d in decisions if self.service.decides(d.fact)):
            subject = fact.subject(self.run).text
            if subject not in self.taken and subject not in self._open:
                self._decided += 1
                self._open[subject] = _Open(self._decided, fact, place(event), event.id)

    def decides(self, fact: Fact) -> bool:
        """Whether the fact is the core's own decision in this run."""
        inherited = self.started is not None and self.started.begins_with(fact)
        return self.service.decides(fact) and not inherited

    def report(self) -> Report:
        """What was found up to the last event."""
        missed: list[Divergence] = []
        pending: list[Pending] = []
        for subject, each in self._open.items():
            overtaken = each.passed is not None and self._latest_cause > each.passed
            if overtaken or (self._ended and self.service.name == "mixer"):
                body = _json(each.fact)
                missed.append(
                    Divergence(each.cause.seq, subject, "never recorded", "", None, body, each.cause)
                )
            else:
                pending.append(Pending(subject, each.cause))
        found = sorted((*self._divergences, *missed), key=lambda d: d.seq)
        return Report(
            service=self.service.name,
            run=self.run,
            rules=self.rules,
            events=self._events,
            last=self._last,
            compared=dict(sorted(self._compared.items())),
            divergences=tuple(found[:_KEPT]),
            more=self._more + max(0, len(found) - _KEPT),
            pending=tuple(pending),
            state=self.core.dump(),
        )

    def pending(self) -> set[str]:
        """Subjects that were decided, and are not recorded."""
        return set(self._open)

    def _compare(self, event: Event) -> None:
        subject = event.fact.subject(self.run).text
        self._compared[event.fact.type] += 1
        self._ended = self._ended or isinstance(event.fact, RunStopped)
        twice = subject in self.taken
        self.taken.add(subject)
        decided = self._open.pop(subject, None)
        recorded = _json(event.fact)
        if decided is None:
            cause = self._recent.find(event.causation)
            kind = "stands twice" if twice else "never decided"
            self._add(Divergence(event.seq, subject, kind, "", recorded, None, cause))
            return
        self._latest_cause = max(self._latest_cause, decided.cause.seq)
        for each in self._open.values():
            # In the order of deciding, so that the service's own order costs nothing.
            if each.number > decided.number:
                break
            each.passed = event.seq if each.passed is None else each.passed
        found = first_difference(recorded, _json(decided.fact))
        if found is None and event.causation != decided.cause_id:
            known = self._recent.find(event.causation)
            shown = f"message {known.seq}" if known is not None else f"event {event.causation}"
            found = ("causationid", shown, f"message {decided.cause.seq}")
        if found is not None:
            self._add(Divergence(event.seq, subject, "differs", *found, decided.cause))

    def _add(self, divergence: Divergence) -> None:
        if len(self._divergences) < _KEPT:
            self._divergences.append(divergence)
        else:
            self._more += 1


def _json(fact: Fact) -> dict[str, Any]:
    return fact.model_dump(mode="json")


def first_difference(recorded: Any, recomputed: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """(path, recorded value, recomputed value) of the first leaf whose JSON differs in a byte; None if none does.

    Of a ref it is the checksum, from which the key follows.
    """
    if isinstance(recorded, dict) and isinstance(recomputed, dict):
        ours, theirs = cast("dict[str, Any]", recomputed), cast("dict[str, Any]", recorded)
        for key in sorted(dict.fromkeys((*theirs, *ours)), key=lambda name: name != "crc32c"):
            inner = f"{path}.{key}" if path else key
            found = first_difference(theirs.get(key, ABSENT), ours.get(key, ABSENT), inner)
            if found is not None:
                return found
        return None
    if isinstance(recorded, list) and isinstance(recomputed, list):
        ours_, theirs_ = cast("list[Any]", recomputed), cast("list[Any]", recorded)
        for i in range(max(len(ours_), len(theirs_))):
            mine = ours_[i] if i < len(ours_) else ABSENT
            other = theirs_[i] if i < len(theirs_) else ABSENT
            found = first_difference(other, mine, f"{path}[{i}]")
            if found is not None:
                return found
        return None
    # By their bytes, so that -0.0 is not 0.0 and 1 is not 1.0.
    same = orjson.dumps(recorded) == orjson.dumps(recomputed)
    return None if same else (path, cast("Any", recorded), recomputed)
