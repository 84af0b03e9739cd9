"""What a run would have decided with other values: unchanged it is the recording; changed, it holds the run's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.replay import SERVICES, BadChange, Difference, WhatIf, change, read_setting
from schemas.envelope import Event
from schemas.facts import BatchYielded, RunStarted, SampleAccepted, SampleGraded, SampleRejected, SampleShaped
from services.cli.replay_report import difference_lines
from tests.recorded import demo_events
from tests.unit.factories import config
from tests.unit.signal_world import BY_HOOK, SignalWorld, signal_config
from tests.unit.test_cores import World

SOURCE = {"pool": "p", "group_size": 3, "environment": {"kind": "arithmetic"}}
HELD_OUT = {"name": "held-out", "groups": 0, "evaluate": 2, **SOURCE, "group_size": 1}


def recorded_config(events: Sequence[Event]) -> dict[str, Any]:
    started = events[0].fact
    assert isinstance(started, RunStarted)
    return started.config


def differs(events: Sequence[Event], service: str, *changes: tuple[str, Any]) -> Difference:
    run = events[0].fact.id()
    whatif = WhatIf(run, SERVICES[service], change(recorded_config(events), changes))
    for event in events:
        whatif.index(event)
    for event in events:
        whatif.feed(event)
    return whatif.report()


def demo(service: str, *changes: tuple[str, Any]) -> Difference:
    return differs(demo_events(), service, *changes)


def a_run(seed: int) -> list[Event]:
    sources = [{"name": "math", "groups": 2, **SOURCE}, {"name": "code", "groups": 1, **SOURCE}, HELD_OUT]
    world = World(config(sources=sources), seed)
    world.run()
    return world.log


@pytest.mark.parametrize("service", list(SERVICES))
def test_unchanged_the_demo_is_as_recorded(service: str) -> None:
    found = demo(service)
    assert found.none
    assert (found.groups, found.advantages_changed, found.failed, found.unfilled) == ((), 0, "", ())
    assert all(batch.recorded == batch.changed for batch in found.batches)
    assert found.stopped == (1651, 1651)


@given(seed=st.integers(0, 10_000), cut=st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_unchanged_any_part_of_any_run_is_as_recorded(seed: int, cut: int) -> None:
    for name in SERVICES:
        found = differs(a_run(seed)[:cut], name)
        assert found.none, (name, found.facts, found.failed)
        assert found.groups == ()


@given(
    seed=st.integers(0, 10_000),
    low=st.sampled_from([-1.0, 0.0, 0.4]),
    high=st.sampled_from([0.9, 1.0, 2.0]),
    keep=st.booleans(),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    ahead=st.integers(0, 3),
    estimator=st.sampled_from(["grpo", "rloo", "dr_grpo"]),
)
@settings(max_examples=30, deadline=None)
def test_whatever_is_changed_batches_hold_accepted_groups_once_and_fresh(
    seed: int, low: float, high: float, keep: bool, staleness: int, groups: int, ahead: int, estimator: str
) -> None:
    log = a_run(seed)
    found = differs(
        log,
        "sampler",
        ("sources.math.accept.min", low),
        ("sources.math.accept.max", high),
        ("sources.math.accept.drop_all_zero", keep),
        ("sources.math.staleness", staleness),
        ("sources.math.groups", groups),
        ("sources.math.estimator", estimator),
        ("batch.ahead", ahead),
    )
    assert found.failed == ""
    assert found.baseline.divergences == ()
    seen: set[str] = set()
    for batch in found.batches:
        if batch.changed is None:
            continue
        assert sum(s.startswith("math-") for s in batch.changed.samples) == groups
        assert sum(s.startswith("code-") for s in batch.changed.samples) == 1
        assert not seen & set(batch.changed.samples)
        seen.update(batch.changed.samples)
        assert max(batch.changed.staleness) <= max(staleness, 4)
    rejected = {g.sample for g in found.groups if g.changed.startswith("rejected")}
    assert not seen & rejected
    # Nothing is invented: every group of a batch is one that the recording finished.
    assert seen <= {e.fact.correlation() for e in log}


def test_a_stricter_limit_rejects_groups_and_names_them_and_the_batches_they_leave() -> None:
    found = demo("sampler", ("sources.arithmetic.accept.max", 0.7))
    passing = {
        e.fact.sample: e.fact.pass_rate
        for e in demo_events()
        if isinstance(e.fact, SampleAccepted) and e.fact.source == "arithmetic"
    }
    gone = {sample for sample, rate in passing.items() if rate >= 0.7}
    assert {g.sample for g in found.groups} == gone
    assert {(g.recorded, g.changed) for g in found.groups} == {("accepted", "rejected: pass_rate")}
    assert found.outcomes["arithmetic"] == {
        "accepted": (22, 22 - len(gone)),
        "rejected: pass_rate": (0, len(gone)),
    }
    assert found.outcomes["calculator"] == {"accepted": (22, 22), "rejected: pass_rate": (1, 1)}
    first = found.batches[0]
    assert first.recorded is not None
    assert first.changed is not None
    assert set(first.removed) == gone & set(first.recorded.samples)
    assert set(first.changed.samples) == set(first.recorded.samples) - set(first.removed) | set(first.added)
    assert first.changed.mean_reward < first.recorded.mean_reward
    # 17 groups are left for 5 batches of 4.
    assert found.unfilled == (5,)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.6), (0.3, 1.0), (0.5, 1.0), (0.2, 0.9)])
def test_batches_are_those_that_come_out_when_groups_are_counted_by_hand(low: float, high: float) -> None:
    """In the demo no group is ever too old: a batch takes the next four of each source, as they were shaped."""
    rates = {
        e.fact.sample: sum(reward >= 1 for reward in e.fact.rewards) / len(e.fact.rewards)
        for e in demo_events()
        if isinstance(e.fact, SampleGraded)
    }
    shaped = [e.fact for e in demo_events() if isinstance(e.fact, SampleShaped)]
    kept = {
        "arithmetic": [f.sample for f in shaped if f.source == "arithmetic" and low < rates[f.sample] < high],
        "calculator": [f.sample for f in shaped if f.source == "calculator"],
    }
    expected = [[s for each in kept.values() for s in each[4 * k : 4 * k + 4]] for k in range(5)]
    found = demo("sampler", ("sources.arithmetic.accept.min", low), ("sources.arithmetic.accept.max", high))
    assert [set(b.changed.samples) if b.changed else None for b in found.batches] == [
        set(each) if len(each) == 8 else None for each in expected
    ]


def test_another_estimator_changes_advantages_and_nothing_else() -> None:
    found = demo("sampler", ("sources.arithmetic.estimator", "dr_grpo"))
    assert found.groups == ()
    assert found.advantages_changed == 22
    assert found.largest_advantage_change > 1
    assert found.facts == (22 + 5, 0, 0)
    assert all(b.recorded == b.changed for b in found.batches)


def test_fresher_groups_only_are_rejected_as_stale_when_they_are_judged() -> None:
    found = demo("sampler", *((f"sources.{s}.staleness", 0) for s in ("arithmetic", "calculator")))
    assert {g.changed for g in found.groups} == {"rejected: stale"}
    for batch in found.batches:
        assert batch.changed is None or set(batch.changed.staleness) == {0}
    assert found.unfilled == (4, 5)


def test_more_demand_dispatches_more_and_keeps_the_recorded() -> None:
    found = demo("mixer", ("sources.arithmetic.oversample", 2.0))
    assert found.dispatched == {"arithmetic": (176, 192), "calculator": (184, 184)}
    assert found.facts == (0, 16, 0)
    assert found.dispatched_removed == ()
    assert found.dispatched_added[0] == "arithmetic-000022-0"
    assert demo("mixer", ("sources.arithmetic.oversample", 1.0)).dispatched["arithmetic"][1] < 176


def test_fewer_steps_leave_out_the_batches_after_them_and_the_end_keeps_its_place() -> None:
    mixer = demo("mixer", ("steps", 3))
    assert mixer.stopped == (1651, 1651)
    assert mixer.facts[0] == 1
    assert mixer.dispatched_added == ()
    sampler = demo("sampler", ("steps", 3))
    assert [b.step for b in sampler.batches if b.changed is None] == [4, 5]
    assert sampler.unfilled == (), "a batch that nobody asked for is none that could not be filled"
    told = list(difference_lines([sampler], []))
    assert "  batch 4: not in the changed run, which has 3 steps" in told
    assert not any("could not have been filled" in line for line in told)


def test_a_batch_that_would_have_come_sooner_says_on_which_message() -> None:
    """It takes the recorded place all the same, so that the steps that followed it still do."""
    found = demo("sampler", ("batch.ahead", 4), ("sources.calculator.groups", 3))
    first = found.batches[0]
    assert first.recorded is not None
    assert first.changed is not None
    assert first.changed.seq == first.recorded.seq
    assert first.changed.through < first.recorded.through


def test_events_of_a_source_that_is_gone_are_left_out_and_counted() -> None:
    config_ = recorded_config(demo_events())
    only = {**config_, "sources": [s for s in config_["sources"] if s["name"] == "arithmetic"]}
    whatif = WhatIf("demo", SERVICES["sampler"], change(only, []))
    for event in demo_events():
        whatif.index(event)
    for event in demo_events():
        whatif.feed(event)
    found = whatif.report()
    inputs = (
        "sequence.dispatched",
        "sequence.opened",
        "sequence.verified",
        "sequence.finished",
        "sample.graded",
    )
    gone = [
        e for e in demo_events() if getattr(e.fact, "source", "") == "calculator" and e.fact.type in inputs
    ]
    assert found.left_out == len(gone)
    assert found.failed == ""
    for batch in found.batches:
        assert batch.changed is None or all(s.startswith("arithmetic-") for s in batch.changed.samples)


def test_a_recording_that_diverges_by_itself_says_so() -> None:
    accepted = next(e for e in demo_events() if isinstance(e.fact, SampleAccepted))
    found = differs([e for e in demo_events() if e.id != accepted.id], "sampler")
    assert found.baseline.divergences
    assert isinstance(found.baseline.divergences[0].recomputed, dict)


def test_batches_of_the_recording_have_the_figures_of_their_facts() -> None:
    facts = {e.fact.step: e.fact for e in demo_events() if isinstance(e.fact, BatchYielded)}
    for batch in demo("sampler").batches:
        assert batch.recorded is not None
        shares = facts[batch.step].sources
        assert len(batch.recorded.samples) == sum(s.groups for s in shares.values())
        assert max(batch.recorded.staleness) == max(s.max_staleness for s in shares.values())
        assert batch.recorded.mean_reward == pytest.approx(sum(s.mean_reward for s in shares.values()) / 2)


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("sources.a.accept.max=0.9", "sources.a.accept.max", 0.9),
        ("steps = 3", "steps", 3),
        ("x=true", "x", True),
        ("x=grpo", "x", "grpo"),
        ('x="a=b"', "x", "a=b"),
        ("x=", "x", ""),
        ("x=1\ny=2", "x", "1\ny=2"),
    ],
)
def test_a_setting_is_a_path_and_a_toml_value(setting: str, path: str, value: object) -> None:
    assert read_setting(setting) == (path, value)
    assert type(read_setting(setting)[1]) is type(value)


def test_a_list_is_changed_as_a_whole() -> None:
    recorded = {"sources": [{"name": "math", "hooks": [{"kind": "grpo"}]}]}
    with pytest.raises(
        BadChange, match=r"math\.hooks is a list, .* as a whole: sources\.math\.hooks=\[\.\.\.\]"
    ):
        change(recorded, [("sources.math.hooks.0.kind", "rloo")])


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("sources.arithmetik.groups", 2, "no source 'arithmetik'; sources: arithmetic, calculator"),
        ("sources.arithmetic", 2, "a source is changed key by key"),
        ("sources.arithmetic.grops", 2, "did you mean 'groups'?"),
        (
            "trainer.lr",
            1.0,
            "no key 'trainer' in the decision part of the configuration; keys: batch, sources, steps",
        ),
        ("steps.more", 1, "steps is a value, it has no keys"),
        ("steps", 0, "steps = 0: a run has at least 1"),
        ("steps", True, "steps = True: Input should be a valid integer"),
        ("batch.dp", 0, "batch.dp = 0: Input should be greater than or equal to 1"),
        ("sources.calculator.accept.max", 3, "sources.calculator.accept.max = 3: Input should be less than"),
        ("sources.calculator.groups", 0, "sources.calculator: source 'calculator': give groups > 0"),
        ("sources", [], "no source has groups > 0"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_its_path(path: str, value: object, said: str) -> None:
    with pytest.raises(BadChange) as refused:
        change(recorded_config(demo_events()), [(path, value)])
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["steps", "=3", " =3", ""])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(BadChange, match="is not path=value"):
        read_setting(text)


def test_options_of_an_environment_take_new_keys() -> None:
    changed = change(recorded_config(demo_events()), [("sources.arithmetic.environment.options.digits", 3)])
    assert changed.source("arithmetic").environment.options == {"digits": 3}


def signal_run(seed: int) -> list[Event]:
    world = SignalWorld(signal_config(), seed, rejects=0.3)
    world.run()
    return world.log


@given(seed=st.integers(0, 10_000), cut=st.integers(1, 600))
@settings(max_examples=4, deadline=None)
def test_unchanged_a_run_with_a_hook_service_is_as_recorded(seed: int, cut: int) -> None:
    log = signal_run(seed)[:cut]
    for name in SERVICES:
        found = differs(log, name)
        assert found.none, (name, found.facts, found.failed)
        assert (found.groups, found.left_out, found.baseline.divergences) == ((), 0, ())
        assert all(batch.recorded == batch.changed for batch in found.batches)
    (line,) = differs(log, "sampler").unmade
    assert line.startswith("source code: its hooks read columns or are not built in")
    assert "other hooks" not in line


def test_of_hooks_that_only_the_hook_service_runs_the_recorded_advantages_stand() -> None:
    log = signal_run(9)
    stricter = differs(log, "sampler", ("sources.code.accept.max", 0.5))
    assert stricter.failed == ""
    assert stricter.advantages_changed == 0
    assert (
        stricter.outcomes["code"]["rejected: pass_rate"][1]
        > stricter.outcomes["code"]["rejected: pass_rate"][0]
    )
    foreign = differs(log, "sampler", ("sources.math.hooks", BY_HOOK["hooks"]))
    assert (foreign.failed, foreign.advantages_changed) == ("", 0)
    assert any(line.startswith("source math") and "which other hooks made" in line for line in foreign.unmade)
    assert [b.changed is None for b in foreign.batches] == [False] * 3
    assert any("which other hooks made" in line for line in difference_lines([foreign], []))


def test_hooks_that_need_events_alone_are_run_in_place_of_the_hook_service() -> None:
    log = signal_run(9)
    found = differs(log, "sampler", ("sources.code.hooks", [{"kind": "dr_grpo"}]))
    assert (found.failed, found.unmade) == ("", ())
    shaped = {e.fact.sample for e in log if isinstance(e.fact, SampleShaped) and e.fact.by == "hook"}
    assert 0 < found.advantages_changed <= len(shaped)
    # What the hook service could not shape, these can.
    failed = {e.fact.sample for e in log if isinstance(e.fact, SampleRejected) and e.fact.by == "hook"}
    assert failed
    assert {g.sample for g in found.groups if g.recorded == "rejected: failed"} >= failed


def test_a_teacher_that_scored_nothing_is_waited_for_and_that_is_said() -> None:
    found = differs(signal_run(9), "sampler", ("sources.math.teachers", ["large"]))
    assert [line for line in found.unmade if "teacher large scored none" in line]
    assert found.outcomes["math"].get("accepted", (0, 0))[1] == 0


def test_hooks_that_no_run_could_have_are_refused() -> None:
    for hooks, said in (
        ([{"kind": "length_penalty"}], "make no advantages"),
        (
            [{"kind": "grpo", "options": {"nu": 1, "ddof": 3}}],
            r"^sources\.math\.hooks: ddof = 3: Input should be 0 or 1\nsources\.math\.hooks: nu = 1: Extra inputs are not permitted$",
        ),
    ):
        with pytest.raises(BadChange, match=said):
            change(signal_config().decisions(), [("sources.math.hooks", hooks)])
