"""Limits of sources: whole runs without a broker, in which people change limits at any moment."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.batch.mixer import MixerCore
from pipeline.replay import change
from schemas.config import Decisions, RunConfig
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    Failure,
    LimitChanged,
    RunStarted,
    SampleRejected,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.names import sample_id, sample_index, sequence_id
from tests.recorded import demo_events
from tests.unit.factories import config, event, finished
from tests.unit.test_cores import World


def limit(concurrency: int, number: int = 1, name: str = "math") -> LimitChanged:
    return LimitChanged(of="source", name=name, number=number, concurrency=concurrency)


def limited(**limits: int) -> RunConfig:
    """Groups of three; two sources that are trained, and one that is evaluated."""
    source = {"pool": "p", "group_size": 3, "environment": {"kind": "arithmetic"}}
    sources = [
        {"name": "math", "groups": 2, **source},
        {"name": "code", "groups": 1, "oversample": 3.0, **source},
        {"name": "tests", "groups": 0, "evaluate": 4, **source},
    ]
    return config(sources=[{**each, "concurrency": limits.get(each["name"], 0)} for each in sources])


class Changing(World):
    """A world in which people change limits, and every dispatch is checked against a count of its own."""

    def __init__(self, run_config: RunConfig, seed: int, changes: int) -> None:
        super().__init__(run_config, seed)
        self.changes = changes
        self.numbers: Counter[str] = Counter()

    def do(self, fact: Fact) -> None:
        if self.changes and self.random.random() < 0.1:
            self.changes -= 1
            name = self.random.choice(["math", "code", "tests"])
            self.numbers[name] += 1
            self.publish(limit(self.random.choice([0, 3, 4, 5, 6, 9, 20]), self.numbers[name], name))
        super().do(fact)

    def advance(self, index: int) -> None:
        super().advance(index)
        mixer, at = self.cores[0]
        assert isinstance(mixer, MixerCore)
        if index == 0 and at == len(self.log):
            self.check_busy(mixer)

    def check_busy(self, mixer: MixerCore) -> None:
        """Where the mixer is done with the whole log, what is wanted has no room."""
        assert mixer.decisions is not None
        for source in self.config.sources:
            running, _, most = count(self.log, source.name, self.config)
            if mixer._wanted(mixer.decisions, source) > 0:
                assert most
                assert running + source.group_size > most, f"{source.name} idles at {running} of {most}"


def count(events: list[Event], source: str, run_config: RunConfig) -> tuple[int, int, int]:
    """Sequences that run, groups dispatched, and the limit, after these events: counted anew from the facts."""
    groups: set[int] = set()
    ended: set[str] = set()
    most = run_config.source(source).concurrency
    for fact in (e.fact for e in events):
        match fact:
            case SequenceDispatched(source=of, sample=sample) if of == source:
                groups.add(sample_index(sample, source))
            case SequenceFinished(source=of) | SequenceFailed(source=of) if of == source:
                ended.add(fact.sequence)
            case LimitChanged(name=of, concurrency=most_) if of == source:
                most = most_
            case _:
                pass
    return len(groups) * run_config.source(source).group_size - len(ended), len(groups), most


def check_dispatches(world: World) -> int:
    """No group was sent out that had no room when it was decided; how many groups had a limit."""
    places = {found.id: at for at, found in enumerate(world.log)}
    checked = 0
    for found in world.log:
        fact = found.fact
        if not isinstance(fact, SequenceDispatched) or fact.member:
            continue
        assert found.causation is not None
        known = world.log[: places[found.causation] + 1]
        running, groups, most = count(known, fact.source, world.config)
        if most:
            # With those before it that were decided at the same time.
            at_once = sample_index(fact.sample, fact.source) - groups + 1
            assert running + at_once * fact.group_size <= most
            checked += 1
    return checked


@given(
    seed=st.integers(0, 10_000),
    math=st.sampled_from([0, 3, 4, 7]),
    tests=st.sampled_from([0, 3, 11]),
    changes=st.integers(0, 8),
)
@settings(max_examples=40, deadline=None)
@example(seed=180, math=3, tests=0, changes=1)
def test_no_source_is_over_its_limit_none_idles_and_the_run_ends_as_it_would_without(
    seed: int, math: int, tests: int, changes: int
) -> None:
    world = Changing(limited(math=math, tests=tests), seed, changes)
    world.run()
    checked = check_dispatches(world)
    # Somebody may lift a limit before its source has sent out anything.
    assert checked or changes or not (math or tests)
    shares = [{name: s.groups for name, s in f.sources.items()} for f in world.facts(BatchYielded)]  # type: ignore[attr-defined]
    assert shares == [{"math": 2, "code": 1}] * 3
    evaluated = [f for f in world.facts(SequenceDispatched) if f.source == "tests"]  # type: ignore[attr-defined]
    free = World(limited(), seed)
    free.run()
    # In another order with the other sources' facts; of one source they are the same.
    assert evaluated == [f for f in free.facts(SequenceDispatched) if f.source == "tests"]  # type: ignore[attr-defined]


class Told:
    """A mixer whose decisions take effect at once."""

    def __init__(self, run_config: RunConfig) -> None:
        self.mixer = MixerCore("r")
        self.seq = 0
        self.sent: list[str] = []
        self.tell(RunStarted(run="r", config=run_config.decisions()))

    def tell(self, fact: Fact) -> list[str]:
        """The samples of `math` that are sent out on this fact."""
        self.seq += 1
        told = event(fact, self.seq)
        self.mixer.fold(told)
        decided = [d.fact for d in self.mixer.decide(told)]
        for each in decided:
            self.seq += 1
            self.mixer.fold(event(each, self.seq))
        fresh = [f.sample for f in decided if isinstance(f, SequenceDispatched) and f.source == "math"]
        self.sent += list(dict.fromkeys(fresh))
        return list(dict.fromkeys(fresh))

    def end(self, group: int, members: int = 3) -> list[list[str]]:
        sample = sample_id("math", group)
        return [self.tell(finished(sequence_id(sample, member), 1.0)) for member in range(members)]


def no_tests(**limits: int) -> RunConfig:
    whole = limited(**limits)
    return whole.model_copy(update={"sources": whole.sources[:2]})


def test_the_next_group_goes_out_with_the_end_that_makes_room_for_it() -> None:
    told = Told(no_tests(math=4))
    assert told.sent == ["math-000000"]
    # Four may run: with one left of the first group there is room for three.
    assert told.end(0) == [[], ["math-000001"], []]
    failure = Failure(kind="infra", reason="lost")
    for member, expected in enumerate(([], ["math-000002"])):
        failed = SequenceFailed(
            source="math", sample="math-000001", sequence=f"math-000001-{member}", attempts=1, failure=failure
        )
        assert told.tell(failed) == expected
        assert told.tell(finished(failed.sequence, 1.0)) == [], "it had ended before"
    assert told.end(2) == [[], [], []], "three are in play, and no more are wanted"


def test_a_limit_is_lowered_raised_and_lifted_while_it_runs() -> None:
    told = Told(no_tests())
    assert len(told.sent) == 3
    told.tell(limit(3))
    told.tell(SampleRejected(source="math", sample="math-000000", reason="stale"))
    assert len(told.sent) == 3, "nine run, three may"
    assert [told.end(0), told.end(1)] == [[[], [], []]] * 2
    assert told.end(2) == [[], [], ["math-000003"]]
    rejected = [f"math-{group:06d}" for group in (1, 2)]
    assert [told.tell(SampleRejected(source="math", sample=s, reason="stale")) for s in rejected] == [[], []]
    assert told.tell(limit(6, 2)) == ["math-000004"]
    assert told.tell(limit(0, 3)) == ["math-000005"]


def test_only_a_newer_change_of_this_source_that_has_room_for_a_group_counts() -> None:
    told = Told(no_tests(math=3))
    sent = len(told.sent)
    assert told.tell(LimitChanged(of="pool", name="math", number=5, concurrency=0)) == []
    assert told.tell(limit(0, 1, "nobody")) == []
    assert told.tell(limit(2, 1)) == []
    assert told.end(0)[2] == ["math-000001"], (
        "a limit without room for a group would stop the source for good"
    )
    assert told.tell(limit(3, 4)) == []
    assert told.tell(limit(0, 3)) == [], "an older one"
    assert len(told.sent) == sent + 1 == 2
    assert told.tell(limit(0, 5)) == ["math-000002"]


def test_a_limit_below_the_group_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="concurrency 2 is below group_size 3"):
        limited(math=2)
    assert limited(math=3).source("math").concurrency == 3


def test_without_limits_an_end_decides_nothing() -> None:
    """So a log without limits is decided as before there were any, in the same bytes and on the same events."""
    told = Told(no_tests())
    assert told.end(0) == [[], [], []]


def test_a_recorded_run_is_decided_anew_under_a_limit() -> None:
    """Its sequences end where they ended, some before they are dispatched under the limit: none holds its room for ever."""
    events = demo_events()
    started = events[0].fact
    assert isinstance(started, RunStarted)
    recorded = Decisions.model_validate(started.config).model_dump(mode="json")
    tight = change(recorded, [("sources.arithmetic.concurrency", 8), ("sources.calculator.concurrency", 16)])
    mixer = MixerCore("demo")
    sent: Counter[str] = Counter()

    def tell(found: Event) -> None:
        mixer.fold(found)
        for fact in (d.fact for d in mixer.decide(found)):
            if isinstance(fact, SequenceDispatched):
                sent[fact.source] += 1
                mixer.fold(event(fact, found.seq))
                assert mixer.running.count("arithmetic") <= 8

    for found in events:
        if isinstance(found.fact, RunStarted):
            told = RunStarted(run="demo", config=tight.model_dump(mode="json"))
            tell(event(told, found.seq))
        elif not isinstance(found.fact, SequenceDispatched):
            tell(found)
    dispatched = Counter(e.fact.source for e in events if isinstance(e.fact, SequenceDispatched))
    assert sent == dispatched
    assert mixer.running.early == set()
