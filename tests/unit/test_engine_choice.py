"""Which replica a request goes to."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engines.replicas import View, choose

VIEWS = st.lists(
    st.builds(View, st.booleans(), st.booleans(), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=500)
@given(VIEWS, st.data())
def test_choice(views: list[View], data: st.DataObject):
    everyone = range(len(views))
    tried = data.draw(st.sets(st.sampled_from(everyone)))
    bound = data.draw(st.none() | st.sampled_from(everyone))
    got = choose(views, bound, tried)
    left = [views[i] for i in everyone if i not in tried]
    if not left:
        assert got is None
        return
    assert got is not None
    assert got not in tried
    chosen = views[got]
    if bound is not None and bound not in tried and views[bound].up:
        # A session stays, though its replica drains or others have less to do.
        assert got == bound
    elif any(view.up and not view.draining for view in left):
        assert chosen.up
        assert not chosen.draining
        assert chosen.in_flight == min(v.in_flight for v in left if v.up and not v.draining)
    elif any(view.up for view in left):
        assert chosen.up
    # Else all that are left are down, and one is tried all the same: a lone engine that restarts is waited for.


def test_a_session_outstays_draining_and_load_but_not_its_replicas_end():
    assert choose([View(), View(draining=True, in_flight=9)], bound=1) == 1
    assert choose([View(), View(up=False)], bound=1) == 0
    assert choose([View(), View()], bound=1, tried={1}) == 0


def test_a_replica_that_drains_is_better_than_one_that_is_down():
    assert choose([View(up=False), View(draining=True, in_flight=9)], None) == 1


def test_idle_replicas_are_given_sessions_in_turn():
    assert choose([View(sessions=1), View(sessions=0)], None) == 1
    assert choose([View(in_flight=0, sessions=9), View(in_flight=1)], None) == 0
