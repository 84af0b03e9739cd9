"""Which windows are built and dropped: the budget holds, ranks go first, nothing starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.feed.ahead import Decision, WindowId, decide

A, B, C, D = WindowId(1, 0), WindowId(1, 1), WindowId(2, 0), WindowId(2, 1)
KNOWN = {A: 10, B: 10, C: 10, D: 10}


def decision(
    known: dict[WindowId, int] = KNOWN,
    standing: dict[WindowId, int] | None = None,
    held: tuple[WindowId, ...] = (),
    asked: tuple[WindowId, ...] = (),
    cursor: WindowId = A,
    prefetch: int = 2,
    budget: int = 100,
) -> Decision:
    return decide(
        known=known,
        standing=standing or {},
        held=frozenset(held),
        asked=asked,
        cursor=cursor,
        prefetch=prefetch,
        budget=budget,
    )


def test_the_next_windows_are_built_ahead_across_steps() -> None:
    assert decision() == Decision(build=(A, B))
    assert decision(cursor=B) == Decision(build=(B, C))
    assert decision(cursor=WindowId(1, 2)) == Decision(build=(C, D))
    assert decision(cursor=WindowId(9, 0)) == Decision()


def test_what_stands_is_not_built_again() -> None:
    assert decision(standing={A: 10, B: 10}) == Decision()


def test_a_rank_goes_before_what_is_ahead() -> None:
    assert decision(asked=(D,), cursor=WindowId(2, 2)) == Decision(build=(D,))
    assert decision(asked=(C,), cursor=A, budget=10) == Decision(build=(C,))


def test_room_is_made_for_a_rank_from_the_far_end() -> None:
    assert decision(standing={B: 10, C: 10}, asked=(A,), cursor=B, budget=20) == Decision(
        build=(A,), drop=(C,)
    )


def test_what_ranks_hold_stays_even_if_one_must_wait() -> None:
    assert decision(standing={A: 10, B: 10}, held=(A, B), asked=(C,), cursor=D, budget=20) == Decision()


def test_what_nobody_wants_is_dropped() -> None:
    assert decision(standing={A: 10}, cursor=B, prefetch=1) == Decision(build=(B,), drop=(A,))


def test_a_window_that_does_not_fit_now_is_not_overtaken() -> None:
    assert decision(known={A: 10, B: 95, C: 1}, prefetch=3) == Decision(build=(A,))


def test_a_window_over_the_budget_blocks_nobody() -> None:
    assert decision(known={A: 101, B: 10}, asked=(A,), cursor=B) == Decision(build=(B,))


def test_a_window_of_a_batch_to_come_is_waited_for() -> None:
    assert decision(asked=(WindowId(3, 0),), cursor=WindowId(3, 1)) == Decision()


windows = st.builds(WindowId, st.integers(1, 3), st.integers(0, 2))


@given(st.data())
def test_the_promises_hold_for_any_state(data: st.DataObject) -> None:
    known = data.draw(st.dictionaries(windows, st.integers(1, 40)))
    budget = data.draw(st.integers(1, 100))
    standing: dict[WindowId, int] = {}
    for window, size in data.draw(st.dictionaries(windows, st.integers(1, 40))).items():
        if sum(standing.values()) + size <= budget:
            standing[window] = known.get(window, size)
    if sum(standing.values()) > budget:
        standing = {}
    held = (
        frozenset(data.draw(st.lists(st.sampled_from(sorted(standing)))))
        if standing
        else frozenset[WindowId]()
    )
    asked = data.draw(st.lists(windows.filter(lambda window: window not in held), unique=True, max_size=3))
    cursor, prefetch = data.draw(windows), data.draw(st.integers(1, 4))
    got = decide(
        known=known,
        standing=standing,
        held=held,
        asked=asked,
        cursor=cursor,
        prefetch=prefetch,
        budget=budget,
    )
    after = {w: s for w, s in standing.items() if w not in got.drop} | {w: known[w] for w in got.build}
    assert sum(after.values()) <= budget
    assert len(set(got.build)) == len(got.build)
    assert not set(got.build) & set(standing)
    assert set(got.drop) <= set(standing)
    assert not set(got.drop) & (held | set(asked))
    ahead = [window for window in sorted(known) if window >= cursor][:prefetch]
    assert set(got.build) <= set(asked) | set(ahead)
    # The oldest ask is served as soon as what ranks hold and wait for leaves room for it.
    for window in asked[:1]:
        others = sum(size for w, size in standing.items() if w in held or w in asked)
        if window in known and window not in standing and others + known[window] <= budget:
            assert window in got.build
    # Stable: carried out, the decision leaves nothing to do but what does not fit.
    again = decide(
        known=known, standing=after, held=held, asked=asked, cursor=cursor, prefetch=prefetch, budget=budget
    )
    assert again == Decision()
