"""The scheduler's promises, without a model: order, blocks, prefill batches, one end per request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.tiny.scheduler import Sampled, Scheduler, Sequence
from pipeline.engines.wire import SamplingParams

STOP = 9


def request(prompt: int = 4, max_tokens: int = 4) -> Sequence:
    return Sequence(tuple(range(1, prompt + 1)), SamplingParams(), max_tokens, frozenset({STOP}))


def sampled(token: int) -> Sampled:
    return Sampled(token, -0.5, [])


def test_a_sequence_ends_at_a_stop_token_or_at_its_limit():
    scheduler = Scheduler(4, 10, 4, 100)
    stops, fills = request(), request(max_tokens=2)
    assert scheduler.record(stops, sampled(STOP), 1)
    assert stops.finish_reason == "stop"
    assert not scheduler.record(fills, sampled(1), 1)
    assert scheduler.record(fills, sampled(2), 2)
    assert fills.finish_reason == "length"
    assert (fills.output, fills.versions, fills.logprobs) == ([1, 2], [1, 2], [-0.5, -0.5])


def test_an_aborted_sequence_takes_no_more_tokens_and_keeps_its_reason():
    scheduler = Scheduler(4, 10, 4, 100)
    sequence = request()
    scheduler.record(sequence, sampled(1), 0)
    scheduler.abort(sequence)
    assert scheduler.record(sequence, sampled(STOP), 0)
    assert (sequence.output, sequence.finish_reason) == ([1], "abort")


def test_arrival_order_is_kept_when_the_head_does_not_fit():
    scheduler = Scheduler(8, 6, 4, 100)
    first, big, small = request(4, 5), request(8, 9), request(1, 1)
    for sequence in (first, big, small):
        scheduler.add(sequence)
    assert scheduler.admit() == [first]
    assert scheduler.admit() == []
    scheduler.abort(first)
    assert scheduler.reap() == [first]
    assert scheduler.admit() == [big, small]


def test_a_prefill_batch_is_bounded_by_padded_tokens_but_never_empty():
    scheduler = Scheduler(8, 100, 4, max_prefill_tokens=10)
    long, *short = [request(30), request(5), request(5), request(5)]
    for sequence in (long, *short):
        scheduler.add(sequence)
    assert scheduler.admit() == [long]
    assert scheduler.admit() == short[:2]
    assert scheduler.admit() == short[2:]


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = Scheduler(8, 5, 4, 100)
    with pytest.raises(ValueError, match="needs 5 cache blocks of 4, the cache has 4"):
        scheduler.add(request(10, 8))


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), max_size=25),
    st.integers(1, 5),
    st.integers(8, 16),
    st.randoms(use_true_random=False),
)
def test_blocks_are_owned_once_and_all_come_back(requests, max_running, blocks, random):
    scheduler = Scheduler(max_running, blocks, 4, 24)
    everything = [request(*r) for r in requests]
    for sequence in everything:
        scheduler.add(sequence)
    admitted: list[Sequence] = []
    for _ in range(1000):
        admitted += scheduler.admit()
        owned = [b for s in scheduler.running for b in s.blocks]
        assert len(owned) == len(set(owned))
        assert 0 not in owned
        assert len(owned) + scheduler.free_blocks == blocks - 1
        assert len(scheduler.running) <= max_running
        for sequence in scheduler.running:
            assert len(sequence.blocks) * 4 >= len(sequence.prompt) + sequence.max_tokens - 1
            if random.random() < 0.1:
                scheduler.abort(sequence)
            else:
                scheduler.record(sequence, sampled(random.choice((1, 2, STOP))), 0)
        scheduler.reap()
        if not scheduler.running and not scheduler.waiting:
            break
    assert admitted == everything
    assert all(s.finish_reason for s in everything)
    assert scheduler.free_blocks == blocks - 1
