"""Dispatch by demand: the formulas, the order, and the mixer that folds them; and what a run may begin with."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.batch.demand import LEAST_RATE, Record, order, oversampling, targets, weights
from pipeline.batch.mixer import MixerCore
from schemas.config import Mixer, RunConfig, Source
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    Inherited,
    LimitChanged,
    RunStarted,
    SampleAccepted,
    SampleCompleted,
    SampleRejected,
    SequenceDispatched,
    SourceShare,
)
from schemas.payload import Ref
from tests.unit.factories import config, event, finished
from tests.unit.test_cores import World

REF = Ref(key="k", bytes=0, crc32c=0)
START = datetime(2026, 1, 1, tzinfo=UTC)
positive = st.floats(0.01, 1e4)


def source(name: str = "math", **changes: Any) -> Source:
    whole = {"name": name, "pool": "p", "groups": 4, "group_size": 2, "environment": {"kind": "arithmetic"}}
    return Source.model_validate({**whole, **changes})


@given(
    each=st.lists(st.tuples(positive, positive), min_size=1, max_size=12),
    bounds=st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3)),
)
def test_the_mean_of_the_oversampling_is_the_configured_one(
    each: list[tuple[float, float]], bounds: tuple[float, float, float]
) -> None:
    low, mean, high = sorted(bounds)
    demands, times = [m for m, _ in each], [t for _, t in each]
    parts = oversampling(demands, times, mean, low, high)
    assert all(low <= p <= high for p in parts)
    found = sum(m * p for m, p in zip(demands, parts, strict=True)) / sum(demands)
    assert found == pytest.approx(mean, abs=1e-6)
    # One c for all that are not clipped, and more for who takes longer.
    scales = [(p + 1) / t for t, p in zip(times, parts, strict=True) if low + 1e-9 < p < high - 1e-9]
    assert scales == pytest.approx(scales[:1] * len(scales))
    for (t, p), (u, q) in zip(
        sorted(zip(times, parts, strict=True)), sorted(zip(times, parts, strict=True))[1:], strict=False
    ):
        assert t == u or p <= q + 1e-12


def test_oversampling_by_hand() -> None:
    # c t - 1 with c = 1.125: 0.125 and 2.375 -> clipped to 0.5 and 1.0 is not 0.5; unclipped, c = (1.5 * 4) / (3 * 1 + 1 * 3) = 1.
    assert oversampling([3.0, 1.0], [1.0, 3.0], 0.5, 0.0, 2.0) == pytest.approx([0.0, 2.0])
    assert oversampling([1.0, 1.0], [1.0, 2.0], 0.5, 0.0, 2.0) == pytest.approx([0.0, 1.0])
    assert oversampling([1.0, 1.0], [2.0, 3.0], 0.5, 0.0, 2.0) == pytest.approx([0.2, 0.8])
    assert oversampling([5.0], [0.0], 0.5, 0.0, 2.0) == pytest.approx([0.5])
    assert oversampling([], [], 0.5, 0.0, 2.0) == []


def test_targets_and_weights_by_hand() -> None:
    sources, mixer = [source("easy"), source("hard")], Mixer(dispatch="demand", oversample=0.5)
    records = {"easy": Record(used=72, judged=72), "hard": Record(used=6, judged=72)}
    assert [records[s.name].rate() for s in sources] == pytest.approx([0.95, 0.125])
    # m = 4.21 and 32; without times each is oversampled alike.
    assert targets(sources, records, mixer) == [ceil(1.5 * 4 / 0.95), 48]
    assert targets(sources, records, Mixer()) == [6, 6]
    records["easy"].waiting, records["hard"].waiting = 4, 1
    assert weights(sources, records, 0.5) == pytest.approx({"easy": 2 / 0.95, "hard": (2 + 1.5) / 0.125})
    assert weights(sources, records, 0.0) == pytest.approx({"easy": 0.0, "hard": 24.0})


def test_a_rate_is_never_nothing_follows_what_is_recent_and_counts_what_is_spoiled() -> None:
    record = Record()
    assert record.rate() == 0.5
    for _ in range(1000):
        record.reject()
    assert record.rate() == LEAST_RATE
    for _ in range(300):
        record.accept()
    assert 0.6 < record.rate() < 0.75
    assert record.waiting == 300
    before = record.rate()
    record.spoil()
    assert record.waiting == 299
    assert record.rate() < before
    record.time(-5.0)
    assert record.seconds == 0.0
    record.time(4.0)
    assert record.seconds == 2.0


@given(
    shares=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6),
    rounds=st.integers(1, 400),
)
def test_the_order_follows_the_weights_and_starves_nobody(shares: list[float], rounds: int) -> None:
    sources = [source(f"s{i}") for i in range(len(shares))]
    by_name = {s.name: w for s, w in zip(sources, shares, strict=True)}
    records = {s.name: Record() for s in sources}
    out = order(sources, records, by_name, dict.fromkeys(by_name, rounds), 2 * rounds)
    assert len(out) == rounds
    whole = sum(shares)
    for name, share in by_name.items():
        assert abs(out.count(name) - rounds * share / whole) < len(shares)
        longest = ceil((len(shares) + 1) * whole / share)
        assert all(name in out[at : at + longest] for at in range(rounds - longest))
    # It goes on where it was: in two bursts, the same.
    again = {s.name: Record() for s in sources}
    cut = rounds // 2
    short = dict.fromkeys(by_name, rounds)
    parts = order(sources, again, by_name, short, 2 * cut)
    short = {name: count - parts.count(name) for name, count in short.items()}
    assert parts + order(sources, again, by_name, short, 2 * (rounds - cut)) == out


def test_who_is_next_is_waited_for() -> None:
    sources = [source("big", group_size=8), source("small", group_size=2)]
    records = {"big": Record(), "small": Record()}
    assert order(sources, records, {"big": 1.0, "small": 1.0}, {"big": 9, "small": 9}, 7) == []
    assert order(sources, records, {"big": 1.0, "small": 1.0}, {"big": 9, "small": 9}, 11) == ["big", "small"]
    with pytest.raises(ValidationError, match=r"mixer\.in_flight 7 is below group_size 8 of source 'math'"):
        config(mixer={"in_flight": 7}, sources=[{**source(group_size=8).model_dump()}])


class Stream:
    """A mixer over a log in a list, whose decisions enter it at random places."""

    def __init__(self, run_config: RunConfig, seed: int, inherited: Inherited | None = None) -> None:
        self.random = random.Random(seed)
        self.config = run_config
        self.core, self.other = MixerCore("r"), MixerCore("r")
        self.log: list[Event] = []
        self.on_the_way: list[Fact] = []
        self.taken: set[str] = set()
        self.decided: list[bytes] = []
        self.running: dict[str, set[str]] = {s.name: set() for s in run_config.sources}
        self.open: dict[str, set[str]] = {}
        self.completed: list[str] = []
        self.waiting: Counter[str] = Counter()
        self.step = 0
        self.enter(RunStarted(run="r", config=run_config.decisions(), inherited=inherited))

    def enter(self, fact: Fact) -> None:
        now = replace(event(fact, len(self.log) + 1), time=START + timedelta(seconds=len(self.log)))
        self.log.append(now)
        self.core.fold(now)
        facts = [d.fact for d in self.core.decide(now)]
        # One that goes through a dump after every event decides the same.
        fresh = MixerCore("r")
        fresh.load(orjson.loads(orjson.dumps(self.other.dump())))
        self.other = fresh
        self.other.fold(now)
        assert [d.fact for d in self.other.decide(now)] == facts
        for decided in facts:
            self.decided.append(orjson.dumps(decided.model_dump(mode="json")))
            if decided.id() not in self.taken:
                self.taken.add(decided.id())
                self.on_the_way.append(decided)
        for of in (s for s in self.config.sources if any(f.source == s.name for f in facts)):  # type: ignore[attr-defined]
            if not self.core.records:
                break  # as ever: see `tests/unit/test_limits.py`
            limit = self.core.limits.of(of)
            coming = [f for f in self.on_the_way if f.source == of.name]  # type: ignore[attr-defined]
            assert not limit or len(self.running[of.name]) + len(coming) <= limit
        if isinstance(fact, SequenceDispatched):
            self.running[fact.source].add(fact.sequence)
            self.open.setdefault(fact.sample, set()).add(fact.sequence)

    def do(self) -> None:
        """One thing that may happen next."""
        running = [(name, s) for name, each in self.running.items() for s in sorted(each)]
        choices = [c for c in ("publish", "end", "judge", "yield", "limit") if self._may(c, running)]
        match self.random.choice(choices):
            case "publish":
                self.enter(self.on_the_way.pop(0))
            case "end":
                name, sequence = self.random.choice(running)
                self.running[name].discard(sequence)
                sample = sequence.rpartition("-")[0]
                self.enter(finished(sequence, 1.0))
                self.open[sample].discard(sequence)
                of = next(s for s in self.config.sources if s.name == name)
                if not self.open[sample] and f"{sample}-{of.group_size - 1}" in self._seen():
                    self.completed.append(sample)
                    self.enter(
                        SampleCompleted(source=name, sample=sample, sequences=(), rewards=(), failed=2)
                    )
            case "judge":
                sample = self.completed.pop(0)
                name = sample.rpartition("-")[0]
                if self.random.random() < {"math": 0.9, "code": 0.3}[name]:
                    self.waiting[name] += 1
                    accepted = {"pass_rate": 0.5, "mean_reward": 0.5, "tokens": 1, "min_version": 0}
                    self.enter(SampleAccepted.model_validate({"source": name, "sample": sample, **accepted}))
                else:
                    self.enter(SampleRejected(source=name, sample=sample, reason="pass_rate", pass_rate=1.0))
            case "yield":
                self.step += 1
                shares = {s.name: s.groups for s in self.config.sources}
                self.waiting.subtract(shares)
                self.enter(_batch(self.step, shares))
            case "limit":
                change = LimitChanged(
                    of="source", name="math", number=len(self.log), concurrency=self.random.choice([0, 2, 5])
                )
                self.enter(change)

    def _seen(self) -> set[str]:
        return {e.fact.sequence for e in self.log if isinstance(e.fact, SequenceDispatched)}

    def _may(self, what: str, running: list[tuple[str, str]]) -> bool:
        match what:
            case "publish":
                return bool(self.on_the_way)
            case "end":
                return bool(running)
            case "judge":
                return bool(self.completed)
            case "yield":
                return all(self.waiting[s.name] >= s.groups for s in self.config.sources)
            case _:
                return self.random.random() < 0.05


def _batch(step: int, groups: dict[str, int]) -> BatchYielded:
    figures = {"sequences": 1, "tokens": 1, "loss_tokens": 1, "mean_reward": 0.0, "max_staleness": 0}
    return BatchYielded(
        step=step,
        through=1,
        policy_version=step - 1,
        sources={n: SourceShare.model_validate({"groups": g, **figures}) for n, g in groups.items()},
        microbatches=1,
        plan=REF,
    )


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    in_flight=st.sampled_from([0, 3, 7]),
    concurrency=st.sampled_from([0, 4]),
    dispatch=st.sampled_from(["demand", "fixed"]),
)
def test_over_random_streams_limits_hold_and_two_cores_decide_each_group_once(
    seed: int, in_flight: int, concurrency: int, dispatch: str
) -> None:
    each = {"pool": "p", "groups": 2, "environment": {"kind": "arithmetic"}}
    stream = Stream(
        config(
            steps=100,
            mixer={"dispatch": dispatch, "in_flight": in_flight},
            sources=[
                {"name": "math", "group_size": 2, **each},
                {"name": "code", "group_size": 3, "concurrency": concurrency, **each},
            ],
        ),
        seed,
    )
    for _ in range(120):
        stream.do()
        total = sum(len(found) for found in stream.running.values()) + len(stream.on_the_way)
        if in_flight or dispatch == "demand":
            assert len(stream.decided) == len(set(stream.decided)), "no group is decided twice"
            assert not in_flight or total <= in_flight
    counts = Counter(e.fact.source for e in stream.log if isinstance(e.fact, SequenceDispatched))
    if not in_flight:
        assert set(counts) == {"math", "code"}
    assert stream.log[-1].seq > 100 or not stream.on_the_way
    # A second core over the same log, in one go.
    again = MixerCore("r")
    decided: list[bytes] = []
    for each_event in stream.log:
        again.fold(each_event)
        decided += [orjson.dumps(d.fact.model_dump(mode="json")) for d in again.decide(each_event)]
    assert decided == stream.decided
    assert again.dump() == stream.core.dump()


@pytest.mark.parametrize("mixer", [{}, {"dispatch": "demand"}])
def test_a_run_that_begins_with_groups_sends_out_the_ones_after_them(mixer: dict[str, object]) -> None:
    inherited = Inherited(run="old", groups={"math": 2}, facts=REF)
    stream = Stream(config(mixer=mixer), 0, inherited)
    first = {name: [f for f in stream.on_the_way if f.source == name] for name in ("math", "code")}  # type: ignore[attr-defined]
    assert first["math"][0].sample == "math-000002"  # type: ignore[attr-defined]
    assert first["code"][0].sample == "code-000000"  # type: ignore[attr-defined]
    assert len(first["code"]) - len(first["math"]) == 2 * 2
    started = stream.log[0].fact
    assert isinstance(started, RunStarted)
    before = stream.core.dump()
    theirs = first["math"][0].model_copy(update={"sample": "math-000001", "sequence": "math-000001-0"})
    stream.enter(theirs)
    stream.enter(finished("math-000001-0", 1.0))
    assert stream.core.dump() == before, "their sequences neither run nor are dispatched anew"
    assert started.begins_with(theirs)
    assert not started.begins_with(first["math"][0])
    assert not started.begins_with(first["code"][0])


@pytest.mark.parametrize("mixer", [{}, {"dispatch": "demand"}])
def test_tasks_come_round_again(mixer: dict[str, object]) -> None:
    stream = Stream(config(mixer=mixer, sources=[source(groups=5, tasks=3).model_dump()]), 0)
    tasks = {f.sample: f.task_index for f in stream.on_the_way if isinstance(f, SequenceDispatched)}
    assert list(tasks.values()) == [i % 3 for i in range(len(tasks))]
    assert len(tasks) >= 8


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), shared=st.sampled_from([("demand", 0), ("demand", 5), ("fixed", 3)]))
def test_every_run_ends_by_demand_and_under_a_limit_for_all(seed: int, shared: tuple[str, int]) -> None:
    each = {"pool": "p", "environment": {"kind": "arithmetic"}}
    sources = [
        {"name": "math", "groups": 2, "group_size": 2, **each},
        {"name": "code", "groups": 3, "group_size": 3, "staleness": 1, **each},
        {"name": "held", "groups": 0, "evaluate": 3, "group_size": 1, **each},
    ]
    world = World(config(mixer={"dispatch": shared[0], "in_flight": shared[1]}, sources=sources), seed)
    world.run()
    while world.cores[0][1] < len(world.log):
        world.advance(0)
    reasons = Counter(f.reason for f in world.subjects.values() if isinstance(f, SampleRejected))
    assert reasons["evaluation"] == 6
    mixer = world.cores[0][0]
    assert isinstance(mixer, MixerCore)
    for name in ("math", "code"):
        accepted = sum(isinstance(f, SampleAccepted) and f.source == name for f in world.subjects.values())
        withdrawn = [
            f
            for f in world.subjects.values()
            if isinstance(f, SampleRejected) and f.source == name and f.sample in _accepted(world)
        ]
        batches = sum(f.sources[name].groups for f in world.subjects.values() if isinstance(f, BatchYielded))
        assert mixer.records[name].waiting == accepted - len(withdrawn) - batches


def _accepted(world: World) -> set[str]:
    return {f.sample for f in world.subjects.values() if isinstance(f, SampleAccepted)}


class Simulation:
    """Two sources on one fleet, without a broker: a mixer, groups that take their time, a batch when each has its share."""

    def __init__(self, mixer: dict[str, object], oversample: float, seed: int, slots: int = 256) -> None:
        each = {
            "pool": "p", "groups": 8, "group_size": 4, "oversample": oversample, "environment": {"kind": "arithmetic"},
        }  # fmt: skip
        sources = [{"name": name, **each} for name in ("quick", "slow")]
        self.config = config(steps=1000, mixer=mixer, sources=sources)
        self.random = random.Random(seed)
        self.slots = slots
        self.core = MixerCore("r")
        self.now = 0.0
        self.log = 0
        self.queue: list[SequenceDispatched] = []
        self.ends: list[tuple[float, int, str, str]] = []
        self.left: dict[str, int] = {}
        self.waiting: Counter[str] = Counter()
        self.filled: list[float] = []
        self.unused: list[int] = []

    def run(self, batches: int) -> None:
        self.enter(RunStarted(run="r", config=self.config.decisions()))
        while len(self.filled) < batches:
            while self.queue and len(self.ends) < self.slots:
                fact = self.queue.pop(0)
                mean = 30.0 if fact.source == "slow" else 1.0
                end = self.now + mean * self.random.lognormvariate(0.0, 0.5)
                heapq.heappush(self.ends, (end, len(self.left), fact.source, fact.sequence))
                self.left.setdefault(fact.sample, fact.group_size)
            self.now, _, name, sequence = heapq.heappop(self.ends)
            sample = sequence.rpartition("-")[0]
            self.enter(finished(sequence, 1.0))
            self.left[sample] -= 1
            if not self.left[sample]:
                self.enter(SampleCompleted(source=name, sample=sample, sequences=(), rewards=(), failed=4))
                if self.random.random() < (0.25 if name == "slow" else 0.75):
                    self.waiting[name] += 1
                    accepted = {"pass_rate": 0.5, "mean_reward": 0.5, "tokens": 1, "min_version": 0}
                    self.enter(SampleAccepted.model_validate({"source": name, "sample": sample, **accepted}))
                else:
                    self.enter(SampleRejected(source=name, sample=sample, reason="pass_rate", pass_rate=1.0))
            if all(self.waiting[s.name] >= s.groups for s in self.config.sources):
                self.waiting.subtract({s.name: s.groups for s in self.config.sources})
                self.filled.append(self.now)
                self.unused.append(sum(self.waiting.values()))
                self.enter(_batch(len(self.filled), {s.name: s.groups for s in self.config.sources}))

    def enter(self, fact: Fact) -> None:
        pending = [fact]
        while pending:
            self.log += 1
            now = replace(event(pending.pop(0), self.log), time=START + timedelta(seconds=self.now))
            self.core.fold(now)
            for decision in self.core.decide(now):
                assert isinstance(decision.fact, SequenceDispatched)
                self.queue.append(decision.fact)
                pending.append(decision.fact)


def figures(mixer: dict[str, object], oversample: float = 1.5) -> tuple[float, float, float]:
    """(seconds a batch, accepted groups that are left over when it fills, dispatched groups in it), after the first 3."""
    seeds, batches, first = 1, 12, 3
    out = [0.0, 0.0, 0.0]
    for seed in range(seeds):
        world = Simulation(mixer, oversample, seed)
        world.run(batches)
        part = (batches - first) * seeds
        out[0] += (world.filled[-1] - world.filled[first - 1]) / part
        out[1] += sum(world.unused[first:]) / part
        out[2] += sum(world.core.dispatched.values()) / (batches * seeds)
    return out[0], out[1], out[2]


def test_of_sources_that_differ_in_time_and_acceptance_batches_fill_sooner_by_demand() -> None:
    """30 times in time and 3 in acceptance; `alike` has as many groups in play as there are by demand, of both sources alike."""
    fixed, alike, by_demand = figures({}), figures({}, 4.0), figures({"dispatch": "demand"})
    print(f"seconds a batch, groups left over, groups dispatched a batch: {fixed}, {alike}, {by_demand}")
    assert by_demand[0] < 0.4 * fixed[0]
    assert by_demand[0] < 0.8 * alike[0]
    assert by_demand[1] < 0.4 * alike[1]
