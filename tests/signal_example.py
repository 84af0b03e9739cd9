"""examples/signal.toml as tests run it: smaller batches, and what must hold of the log of each of its runs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import dumps
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import (
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceFailed,
    SequenceFinished,
    SequenceScored,
)

_Fact = TypeVar("_Fact")
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "signal.toml"


def example(steps: int, change: Callable[[dict[str, Any]], None] = lambda _: None) -> str:
    """It with so many steps of half as many groups, who grades not decided by how busy the machine is, and then changed: by
    sources, as read."""
    raw = tomllib.loads(EXAMPLE.read_text())
    raw["steps"] = steps
    for source in raw["sources"]:
        source["groups"] = max(1, source["groups"] // 2)
        if grader := source.get("grader"):
            [program] = grader["options"]["argv"]
            grader |= {"options": {"argv": [str(ROOT / program)]}, "deadline_s": 100, "timeout_s": 100}
    change({"teachers": raw["teachers"], **{source["name"]: source for source in raw["sources"]}})
    return dumps(RunConfig.model_validate(raw))


def check_signal(events: list[Event]) -> None:
    """Every decided group was graded and scored before it was decided, and every accepted one is shaped once by whom it is to
    be, as often as its grading says."""
    at = {(type(event.fact), event.fact.id()): event.seq for event in events}
    groups = {fact.sample: fact for fact in _of(events, SampleCompleted)}
    finished = {fact.sequence for fact in _of(events, SequenceFinished)}
    failed = {fact.sequence for fact in _of(events, SequenceFailed)}
    assert not finished & failed
    for fact in _of(events, SequenceScored):
        assert (fact.source, fact.teacher, fact.failure) == ("calculator", "before", None)
    for fact in (*_of(events, SampleAccepted), *_of(events, SampleRejected)):
        decided = at[type(fact), fact.id()]
        assert at[SampleGraded, fact.sample] < decided
        for sequence in groups[fact.sample].sequences if fact.source == "calculator" else ():
            assert at[SequenceScored, f"{sequence}-before"] < decided
    for fact in _of(events, SampleGraded):
        assert (fact.quality == ()) == (
            fact.source == "calculator" or (fact.source, fact.revision) == ("drill", 0)
        )
        rewards = groups[fact.sample].rewards
        assert fact.rewards == tuple(
            0 if hack else r for r, hack in zip(rewards, fact.hacks or (False,) * len(rewards), strict=True)
        )
        assert (fact.fallback is not None) == ((fact.source, fact.revision) == ("drill", 0))
    accepted = {fact.sample: fact for fact in _of(events, SampleAccepted)}
    for fact in _of(events, SampleShaped):
        assert at[SampleAccepted, fact.sample] < at[SampleShaped, fact.id()]
        assert fact.by == ("hook" if fact.source == "calculator" else "sampler")
        assert len(fact.sidecars) == (len(fact.advantages) if fact.by == "hook" else 0)
        assert fact.revision == 0 or at[SampleGraded, f"{fact.sample}-r1"] < at[SampleShaped, fact.id()]
        assert fact.sample in accepted


def _of(events: Iterable[Event], kind: type[_Fact]) -> list[_Fact]:
    return [event.fact for event in events if isinstance(event.fact, kind)]
