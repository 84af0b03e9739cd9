"""What a generation has so far: versions, candidates and routing over several requests, and what is asked next."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.progress import BadAnswer, Progress, continued, spans_of
from pipeline.engines.wire import SamplingParams

PROMPT = [1, 2, 3, 4]


def row(token: int) -> int:
    """What the fixtures say token `token` was routed to."""
    return token % 200


def rows(tokens: list[int], start: int) -> np.ndarray:
    """Routing of tokens[start:-1], as an engine gives it: the last token was no input."""
    return np.array([[[row(t), row(t + 1)]] for t in tokens[start:-1]], np.uint8).reshape(-1, 1, 2)


@given(st.lists(st.integers(0, 3)))
def test_version_spans_say_the_same_as_the_list(versions: list[int]):
    spans = spans_of(versions)
    assert [str(v) for v in versions] == [s["version"] for s in spans for _ in range(s["end"] - s["start"])]
    assert all(a["version"] != b["version"] and a["end"] == b["start"] for a, b in itertools.pairwise(spans))


@given(
    st.lists(st.lists(st.integers(5, 99), max_size=6), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.integers(0, 4),
)
def test_parts_join_to_the_generation_that_one_request_would_have_given(
    parts: list[list[int]], tells: list[bool], routed_from: int
):
    """Whether a part breaks off (and tells neither versions nor routing) or ends: nothing twice, nothing lost."""
    progress = Progress(PROMPT, SamplingParams(), routed_from)
    tells[len(parts) - 1] = True
    versions: list[int] = []
    for number, (tokens, told) in enumerate(zip(parts, tells, strict=False)):
        sampled = list(progress.token_ids)
        ask = progress.ask(f"r{number}", "s")
        assert list(ask.token_ids) == PROMPT + sampled
        progress.begin(floor=number)
        progress.add(tokens, [-float(t) for t in tokens])
        if told:
            progress.label([{"version": str(10 + number), "start": 0, "end": len(tokens)}] if tokens else [])
            progress.route(rows(PROMPT + sampled + tokens, ask.routed_from))
        versions += [10 + number if told else number] * len(tokens)
    got = progress.generation("stop")
    everything = [t for part in parts for t in part]
    assert got.token_ids == tuple(everything)
    assert got.logprobs == tuple(-float(t) for t in everything)
    assert got.versions == tuple(versions)
    assert got.routing is not None
    assert got.routing.start == routed_from
    assert np.array_equal(got.routing.rows, rows(PROMPT + everything, routed_from))
    assert got.candidates == ()


def test_a_cut_drops_the_end_of_what_came_last_and_its_routing():
    progress = Progress(PROMPT, SamplingParams())
    progress.begin()
    progress.add([5, 6], [-1.0, -2.0], [[5], [6, 7]])
    progress.add([7, 8], [-3.0, -4.0], [[7], [8]])
    progress.keep(1, 2)
    # What the engine sampled until it heard of it.
    progress.add([9], [-5.0], [[9]])
    progress.label([{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 5}])
    progress.keep(0, 1)
    progress.route(rows([*PROMPT, 5, 6, 7, 8, 9], 0))
    got = progress.generation("stop")
    assert (got.token_ids, got.logprobs, got.versions) == ((5, 6, 7), (-1.0, -2.0, -3.0), (1, 2, 2))
    assert got.candidates == ((5,), (6, 7), (7,))
    assert got.routing is not None
    assert np.array_equal(got.routing.rows, rows([*PROMPT, 5, 6, 7], 0))


def test_candidates_of_some_parts_leave_the_others_open():
    progress = Progress(PROMPT, SamplingParams())
    for tokens, masks in (([5], None), ([6], [[6, 7]]), ([8], None)):
        progress.begin()
        progress.add(tokens, [-1.0], masks)
    assert progress.generation("stop").candidates == ((), (6, 7), ())


@pytest.mark.parametrize(
    ("logprob", "said"),
    [(-9999.0, "-9999.0"), (-math.inf, "-inf"), (math.nan, "nan"), (0.5, "0.5"), (math.inf, "inf")],
)
def test_a_log_probability_that_cannot_be_is_refused(logprob: float, said: str):
    progress = Progress(PROMPT, SamplingParams())
    progress.begin()
    with pytest.raises(BadAnswer, match=f"log-probability {said} for sampled token 6"):
        progress.add([5, 6], [-1.0, logprob])
    assert progress.token_ids == []


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "1", "start": 0, "end": 1}],
        [{"version": "1", "start": 1, "end": 2}],
        [{"version": "1", "start": 0, "end": 3}],
        [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 2}],
        [{"version": "best", "start": 0, "end": 2}],
    ],
    ids=str,
)
def test_versions_that_do_not_cover_the_tokens_are_refused(spans: list[dict]):
    progress = Progress(PROMPT, SamplingParams())
    progress.begin()
    progress.add([5, 6], [-1.0, -2.0])
    with pytest.raises(BadAnswer):
        progress.label(spans)


def test_the_rest_is_asked_with_a_seed_of_its_own_and_what_is_missing():
    params = SamplingParams(max_tokens=10, seed=7, temperature=0.5)
    assert continued(params, 0) == params
    rest = continued(params, 4)
    assert (rest.max_tokens, rest.temperature) == (6, 0.5)
    assert rest.seed not in (7, continued(params, 5).seed)
    assert continued(params, 4) == rest
    assert continued(SamplingParams(), 4).seed is None


def test_an_array_stays_an_array():
    progress = Progress(np.array(PROMPT, np.int32), SamplingParams())
    progress.begin()
    progress.add([5], [-1.0])
    ask = progress.ask("r", "s")
    assert isinstance(ask.token_ids, np.ndarray)
    assert ask.token_ids.dtype == np.int32
    assert ask.token_ids.tolist() == [*PROMPT, 5]
