"""The view of a run is a fold over its events: what is in flight, ready, rejected, trained, written."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipeline.config import load
from schemas.envelope import Event, at, new_event
from schemas.facts import (
    BatchYielded,
    Fact,
    LimitChanged,
    PenaltyFactors,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFinished,
    SequenceOpened,
    SequenceScored,
    SourceShare,
    StepTrained,
    WindowPacked,
)
from schemas.payload import ContextMeta, PayloadHeader, Ref, Span
from services.cli import summary
from services.cli.live import event_line, progress_line, render
from services.dashboard import RATE_WINDOW, View, fold

LEARN = load(Path(__file__).parents[2] / "examples" / "learn.toml")
START = datetime(2026, 1, 1, tzinfo=UTC)


def ref(size: int) -> Ref:
    return Ref(key="k", bytes=size, crc32c=1)


def events(*facts: Fact, every_s: float = 1.0) -> list[Event]:
    made = [at(new_event(fact, "test"), seq) for seq, fact in enumerate(facts, 1)]
    return [
        Event(e.fact, e.id, START + timedelta(seconds=every_s * e.seq), e.producer, seq=e.seq) for e in made
    ]


def folded(*facts: Fact, every_s: float = 1.0) -> View:
    view = View()
    for event in events(*facts, every_s=every_s):
        fold(view, event)
    return view


STARTED = RunStarted(run="learn", config=LEARN.decisions())


def dispatched(source: str, sample: int, member: int = 0, version: int = 0) -> SequenceDispatched:
    name = f"{source}-{sample:06d}"
    return SequenceDispatched(
        source=source, sample=name, sequence=f"{name}-{member}", member=member, group_size=8, pool="chat",
        task_index=sample, min_policy_version=version,
    )  # fmt: skip


def finished(source: str, sample: int, generated: int = 10, size: int = 1000) -> SequenceFinished:
    name = f"{source}-{sample:06d}"
    context = ContextMeta(
        offset=0,
        tokens=20,
        generated=generated,
        loss_spans=(Span(start=10, end=20),),
        min_version=0,
        max_version=0,
    )
    return SequenceFinished(
        source=source, sample=name, sequence=f"{name}-0", attempt=1, reward=1.0, termination="completed", turns=1,
        contexts=(context,), payload=PayloadHeader(key="k", bytes=size, columns=()),
    )  # fmt: skip


def completed(source: str, sample: int, *rewards: float) -> SampleCompleted:
    name = f"{source}-{sample:06d}"
    return SampleCompleted(
        source=source,
        sample=name,
        sequences=tuple(f"{name}-{i}" for i in range(len(rewards))),
        rewards=rewards,
        failed=0,
    )


def accepted(source: str, sample: int) -> SampleAccepted:
    return SampleAccepted(
        source=source,
        sample=f"{source}-{sample:06d}",
        pass_rate=0.5,
        mean_reward=0.5,
        tokens=80,
        min_version=0,
    )


def rejected(source: str, sample: int, reason: str) -> SampleRejected:
    return SampleRejected.model_validate(
        {"source": source, "sample": f"{source}-{sample:06d}", "reason": reason}
    )


def yielded(step: int, groups: int) -> BatchYielded:
    share = SourceShare(
        groups=groups, sequences=groups * 8, tokens=640, loss_tokens=320, mean_reward=0.5, max_staleness=1
    )
    return BatchYielded(
        step=step, through=1, policy_version=step - 1, sources={"arithmetic": share}, microbatches=2,
        plan=ref(50),
    )  # fmt: skip


def trained(step: int) -> StepTrained:
    return StepTrained(
        step=step,
        parent=None,
        weights=ref(3000),
        optimizer=ref(7000),
        loss=0.25,
        grad_norm=1.0,
        kl=0.001,
        loss_tokens=320,
        seconds=2.0,
    )


def test_a_group_is_in_flight_until_it_is_decided_then_ready_until_a_batch_takes_it() -> None:
    flow = [STARTED, dispatched("arithmetic", 0), dispatched("arithmetic", 0, 1), dispatched("arithmetic", 1)]
    source = folded(*flow).source("arithmetic")
    assert (len(source.in_flight), source.ready) == (2, 0)
    flow += [accepted("arithmetic", 0), rejected("arithmetic", 1, "all_zero")]
    source = folded(*flow).source("arithmetic")
    assert (len(source.in_flight), source.ready, source.rejected) == (0, 1, Counter(all_zero=1))
    source = folded(*flow, yielded(1, 1)).source("arithmetic")
    assert (source.ready, source.accepted) == (0, 1)


def test_an_accepted_group_that_grew_too_old_is_no_longer_ready() -> None:
    flow = [
        STARTED,
        dispatched("arithmetic", 0),
        accepted("arithmetic", 0),
        rejected("arithmetic", 0, "stale"),
    ]
    source = folded(*flow).source("arithmetic")
    assert (source.ready, source.rejected) == (0, Counter(stale=1))


def test_an_accepted_group_that_its_hooks_cannot_shape_is_no_longer_ready() -> None:
    refused = rejected("arithmetic", 0, "failed").model_copy(update={"by": "hook"})
    source = folded(STARTED, dispatched("arithmetic", 0), accepted("arithmetic", 0), refused).source(
        "arithmetic"
    )
    assert (source.ready, source.rejected) == (0, Counter(failed=1))


def test_what_graders_and_teachers_did_not_give_is_counted_and_told_when_there_is_any() -> None:
    def graded(sample: int, **fields: object) -> SampleGraded:
        name = f"arithmetic-{sample:06d}"
        known = {"source": "arithmetic", "sample": name, "grader": "g", "rewards": (1.0,)}
        return SampleGraded.model_validate({**known, **fields})

    name, header = "calculator-000000", PayloadHeader(key="k", bytes=30, columns=())
    scored = SequenceScored(
        source="calculator", sample=name, sequence=f"{name}-0", teacher="a", tokens=3, scores=header
    )
    flow = [STARTED, graded(0), scored]
    wrong = [
        graded(1, fallback="late"),
        graded(2, fallback="broken"),
        graded(1, revision=1, report=ref(9)),
        scored.model_copy(update={"scores": None, "failure": "too long"}),
    ]
    told = "graders and teachers: arithmetic 2 fallbacks, 1 late answer; calculator 1 unscored sequence"
    for facts, missing in ((flow, False), ([*flow, *wrong], True)):
        view = folded(*facts)
        console = Console(width=140)
        with console.capture() as capture:
            console.print(render(view, Counter(), START))
        assert (told in capture.get()) == missing
        assert (told in summary.totals(view, (1, 1), Counter(), False)) == missing
        plain = progress_line(view, START)
        assert ("ready 0 in flight (2 fallbacks; 1 late answer), " in plain, "(" in plain) == (missing,) * 2
    shaped = SampleShaped(
        source="calculator", sample=name, estimator="opd", advantages=(0, 0), sidecars=(header, None)
    )
    assert folded(*flow, *wrong, shaped).written == {"sidecars": 60, "reports": 9}


def test_a_batch_tells_its_penalty_factors() -> None:
    told = "step 1: batch yielded (arithmetic 1 group, reward 0.500)"
    weighed = yielded(1, 1).model_copy(update={"factors": PenaltyFactors(alpha=1.25, beta=0.5)})
    assert [event_line(folded(STARTED), events(fact)[0]) for fact in (yielded(1, 1), weighed)] == [
        told,
        f"{told}; penalty factors alpha 1.250, beta 0.500",
    ]


def test_rejections_and_rewards_belong_to_the_step_that_is_yielded_next() -> None:
    view = folded(
        STARTED,
        completed("arithmetic", 0, 1.0, 0.0), rejected("arithmetic", 0, "pass_rate"), yielded(1, 0),
        completed("arithmetic", 1, 1.0, 1.0), rejected("arithmetic", 1, "all_zero"), yielded(2, 0),
    )  # fmt: skip
    first, second = view.rows[1].sources["arithmetic"], view.rows[2].sources["arithmetic"]
    assert (first.rejected, first.rewards.value) == (Counter(pass_rate=1), 0.5)
    assert (second.rejected, second.rewards.value) == (Counter(all_zero=1), 1.0)


def test_a_step_gathers_its_windows_and_what_training_said() -> None:
    packed = [WindowPacked(step=1, microbatch=m, dp=0, tokens=100, bytes=999, fetched=40) for m in range(2)]
    view = folded(STARTED, yielded(1, 0), *packed, trained(1), PolicyPublished(step=1, weights=ref(3000)))
    row = view.rows[1]
    assert (row.windows, row.tokens, row.fetched, row.trained) == (2, 200, 80, trained(1))
    assert (view.trained_steps, view.policy_version, view.fetched) == (1, 1, 80)
    assert view.written == {"plans": 50, "weights": 3000, "optimizer": 7000}


def test_evaluations_are_kept_apart_by_the_policy_version_they_waited_for() -> None:
    name = "arithmetic-heldout"
    view = folded(
        STARTED,
        dispatched(name, 0), completed(name, 0, 0.0), rejected(name, 0, "evaluation"),
        dispatched(name, 1), completed(name, 1, 1.0), rejected(name, 1, "evaluation"),
        dispatched(name, 2, version=40), completed(name, 2, 1.0), rejected(name, 2, "evaluation"),
    )  # fmt: skip
    source = view.source(name)
    assert source.before is not None
    assert source.after is not None
    assert (source.before.count, source.before.value) == (2, 0.5)
    assert (source.after[0], source.after[1].value) == (40, 1.0)


def test_an_evaluation_is_told_once_a_policy_and_counts_tasks_not_sequences() -> None:
    name = "arithmetic-heldout"
    config = LEARN.decisions()
    (held_out,) = (source for source in config["sources"] if source["name"] == name)
    held_out["evaluate"], held_out["group_size"] = 2, 2
    view, told = View(), []
    for event in events(
        RunStarted(run="learn", config=config),
        dispatched(name, 0), completed(name, 0, 1.0, 0.0), dispatched(name, 1), completed(name, 1, 1.0, 1.0),
        dispatched(name, 2, version=4), completed(name, 2, 1.0, 1.0),
        dispatched(name, 3, version=4), completed(name, 3, 1.0, 1.0),
    ):  # fmt: skip
        fold(view, event)
        told.append(event_line(view, event))
    assert [line for line in told[1:] if line] == [
        f"{name}: mean reward 0.750 on 2 tasks, policy version 0",
        f"{name}: mean reward 1.000 on 2 tasks, policy version 4",
    ]
    assert told[4] is not None
    assert told[8] is not None


def test_the_rate_counts_sampled_tokens_of_the_window_only() -> None:
    seconds = int(RATE_WINDOW.total_seconds())
    view = folded(STARTED, *(finished("arithmetic", i, generated=30) for i in range(3 * seconds)))
    assert view.last_at is not None
    assert view.rate(view.last_at) == pytest.approx(30 * (seconds + 1) / seconds)
    assert view.rate(view.last_at + 2 * RATE_WINDOW) == 0.0
    assert view.generated == 30 * 3 * seconds
    assert len(view.recent) == seconds + 1  # what left the window is not kept


def test_the_final_table_and_the_live_view_show_the_figures() -> None:
    name = "arithmetic-heldout"
    view = folded(
        STARTED,
        dispatched(name, 0), completed(name, 0, 0.25),
        dispatched("arithmetic", 0), finished("arithmetic", 0), completed("arithmetic", 0, 1.0, 0.0), accepted("arithmetic", 0),
        rejected("arithmetic", 1, "all_zero"), yielded(1, 1), trained(1),
        dispatched(name, 1, version=1), completed(name, 1, 0.75),
        RunStopped(run="learn", reason="completed", steps=1),
    )  # fmt: skip
    console = Console(width=140, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        summary.show(console, view, (14, 2048), Counter(trainer=2), LEARN, resumed=False)
        console.print(render(view, Counter(trainer=2), START))
    text = capture.get()
    for shown in (
        "arithmetic", "1: all_zero 1", "0.2500", "before 0.250 (1 task), after 0.750 (1 task, policy version 1)",
        "1 step in 12.0 s; 1 sequence finished, 0 failed", "14 events, 2.0 KiB", "payloads 1000 B", "restarted: trainer 2", "stream RL_learn", "step 1/40",
    ):  # fmt: skip
        assert shown in text, text
    assert progress_line(view, START).startswith(
        "step 1/40: arithmetic 0/8 ready 0 in flight (1: all_zero 1 rejected), calculator 0/4 ready 0 in flight, "
    )


def test_a_limit_that_was_changed_is_told_and_stays_in_sight() -> None:
    def changed(number: int, concurrency: int) -> LimitChanged:
        return LimitChanged(of="pool", name="chat", number=number, concurrency=concurrency)

    view = folded(STARTED)
    [first] = events(changed(2, 1600))
    assert event_line(fold(view, first), first) == "pool chat: 1,600 at once from now on"
    for late in (changed(1, 7), LimitChanged(of="source", name="chat", number=1, concurrency=0)):
        fold(view, events(late)[0])
    console = Console(width=140, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view, Counter(), START))
    assert "limits changed: pool chat 1,600 at once, source chat no limit" in capture.get()


def test_the_time_of_a_run_that_was_interrupted_says_so() -> None:
    view = folded(STARTED, yielded(1, 1), trained(1))
    (first, *_) = summary.totals(view, (3, 100), Counter(), resumed=True)
    assert first.startswith(
        "1 step in 2.0 s since the run began, interruptions included; 0 sequences finished"
    )


def test_until_a_sequence_ends_the_view_says_what_the_run_waits_for() -> None:
    opened = SequenceOpened(
        source="arithmetic", sample="arithmetic-000000", sequence="arithmetic-000000-0", attempt=1, pool="chat",
        task_index=0, host="host", base_url="http://127.0.0.1:1", session="s", budget_s=1.0,
    )  # fmt: skip
    flow: list[Fact] = [STARTED]
    for fact, said in (
        (dispatched("arithmetic", 0), "no sequence is dispatched yet"),
        (opened, "no agent-loop host has opened a sequence yet"),
        (finished("arithmetic", 0), "waiting for the first sequence to finish"),
    ):
        view = folded(*flow)
        console = Console(width=140)
        with console.capture() as capture:
            console.print(render(view, Counter(), START))
        assert said in capture.get()
        assert said in progress_line(view, START)
        flow.append(fact)
    assert progress_line(folded(*flow), START).endswith("tokens/s")


@given(
    st.lists(
        st.tuples(st.sampled_from(["dispatch", "accept", "reject", "stale", "yield"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_counts_never_go_below_zero_for_a_log_that_follows_the_rules(moves: list[tuple[str, int]]) -> None:
    state: dict[int, str] = {}
    flow: list[Fact] = [STARTED]
    step = 0
    for move, i in moves:
        now = state.get(i, "new")
        if move == "dispatch" and now == "new":
            flow.append(dispatched("arithmetic", i))
            state[i] = "flying"
        elif move in ("accept", "reject") and now == "flying":
            flow.append(
                accepted("arithmetic", i) if move == "accept" else rejected("arithmetic", i, "pass_rate")
            )
            state[i] = move
        elif move in ("stale", "yield") and now == "accept":
            step += 1
            flow.append(yielded(step, 1) if move == "yield" else rejected("arithmetic", i, "stale"))
            state[i] = "gone"
    source = folded(*flow).source("arithmetic")
    states = Counter(state.values())
    assert len(source.in_flight) == states["flying"]
    assert source.ready == states["accept"]
    assert (
        source.accepted + source.rejected["pass_rate"] == states["accept"] + states["reject"] + states["gone"]
    )
